"""Times of training steps that were measured on this machine, in `.athanor/speeds.json`, and what follows for other shapes."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from athanor.base.artifacts import read_json, write_json
from athanor.base.errors import InputError, ParamsError
from athanor.model.config import ModelConfig
from athanor.model.flops import training_flops

FILE = Path(".athanor") / "speeds.json"
# Seconds on the reference (docs/recipe.md): two cores that train the default's shape at 10,500 tokens a second.
START_SECONDS = 5.0  # of a stage that trains
SFT_COST = 1.04  # of a token, times that of pretraining: rows hold more documents
DATA_SECONDS, DATA_SECONDS_PER_MB = 15.0, 0.8  # of the six stages before the training
STAGES = {
    "download": 7.0,
    "train-classifiers": 2.5,
    "clean": 3.0,
    "train-tokenizer": 2.0,
    "shard": 1.6,
    "sft-data": 6.5,
}
# And the work of the model, as tokens of training. Of eval it is the battery; the text that it reads comes on top.
WITH_MODEL = {"eval": (12.0, 105_000), "export": (9.0, 40_000)}
FORWARD = 1 / 3  # of the operations of training
EXPONENT = 0.93  # time of a token by its operations, between two shapes: larger products run better


class Speeds(NamedTuple):
    """`machine`: how slow the stages without training are, 1 as the reference; seconds for a token of training by shape.

    fp32: how many times slower than in training a product is in fp32.
    """

    machine: float
    cores: int
    seconds: dict[ModelConfig, float]
    fp32: float = 1.0


def scaled(known: Mapping[ModelConfig, float], config: ModelConfig) -> float:
    """Seconds for a token of a shape that was not measured, from the measured one nearest in operations."""
    flops = training_flops(config, config.context_tokens)
    ratios = {shape: flops / training_flops(shape, shape.context_tokens) for shape in known}
    nearest = min(ratios, key=lambda shape: abs(math.log(ratios[shape])))
    return known[nearest] * ratios[nearest] ** EXPONENT


def with_model(stage: str, machine: float, seconds_per_token: float, read_tokens: float = 0.0) -> float:
    """Seconds of a stage that runs the model and does not train it; `read_tokens` at the forward's cost."""
    fixed, tokens = WITH_MODEL[stage]
    return machine * fixed + (tokens + FORWARD * read_tokens) * seconds_per_token


def first_run(stage: str, speeds: Speeds, config: ModelConfig | None, tokens: int | None) -> float | None:
    """Seconds of a stage that never ran here; of the default's text where it works on data. None: nothing is known."""
    if stage in STAGES:
        return speeds.machine * STAGES[stage]
    if config is None:
        return None
    each = speeds.seconds.get(config) or scaled(speeds.seconds, config)
    if stage in WITH_MODEL:
        return with_model(stage, speeds.machine, each, (tokens or 0) * speeds.fp32)
    if tokens is None or stage not in ("pretrain", "sft"):
        return None
    return speeds.machine * START_SECONDS + tokens * each * (SFT_COST if stage == "sft" else 1.0)


def save(root: Path, speeds: Speeds) -> None:
    before = load(root)
    known = {**(before.seconds if before else {}), **speeds.seconds}
    rows = [{"model": config.to_dict(), "seconds": seconds} for config, seconds in known.items()]
    about = {"machine": speeds.machine, "cores": speeds.cores, "fp32": speeds.fp32}
    write_json(root / FILE, {"host": platform.node(), **about, "rows": rows})


def load(root: Path) -> Speeds | None:
    """What was measured on this host; None where nothing was."""
    try:
        stored = read_json(root / FILE)
        if stored["host"] != platform.node():
            return None
        known = {ModelConfig.from_dict(row["model"]): row["seconds"] for row in stored["rows"]}
        return Speeds(stored["machine"], stored["cores"], known, stored.get("fp32", 1.0)) if known else None
    except (InputError, ParamsError, KeyError, TypeError):
        return None

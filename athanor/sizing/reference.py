"""Seconds of a stage by what its parameters ask of it, on the machine of speeds.STAGES: for the ratio of two sets of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from athanor.base.errors import InputError
from athanor.model.flops import training_flops
from athanor.sizing.data import conversation_tokens, eval_tokens
from athanor.sources import datapath
from athanor.sources.params import PythonSource, names_of

TOKEN_FLOPS = 8e6  # what a token costs beside its operations, as operations: micro and the default on one core
PYTHON_BYTES = 9.3e6  # of the standard library's text
DEFAULT_ITEMS, BATTERY_TOKENS = 834, 105_000  # of the default's battery, as tokens of training
SECONDS_PER_FLOP = 3.5e-12
# Seconds of the default at the start and by the megabyte of text; what reads a sample reads no more than that.
TEXT = {
    "download": (1.5, 0.6),
    "train-classifiers": (1.0, 0.4),
    "clean": (1.0, 0.35),
    "train-tokenizer": (0.3, 0.25),
    "shard": (0.6, 0.15),
}
SAMPLES = {"train-classifiers": "classifiers", "train-tokenizer": "tokenizer"}


def text_bytes(built: Mapping[str, Any]) -> float:
    """Of the sources' text as it is now; 1 where nothing is known of it."""
    text = datapath.text_of(built["download"])
    for source in built["download"].sources:
        if isinstance(source, PythonSource):
            names = names_of(source)
            text |= dict.fromkeys(names, PYTHON_BYTES / len(names))
    return max(sum(text.values()), 1.0)


def reference_seconds(stage: str, built: Mapping[str, Any], text: float | None = None) -> float | None:
    """None for a stage that trains, or is not known. `text`: bytes, where they are known to be others."""
    try:
        size = text_bytes(built) if text is None else text
    except InputError:
        return None
    if stage in TEXT:
        fixed, each = TEXT[stage]
        if sample := SAMPLES.get(stage):
            size = min(size, built[sample].sample_bytes)
        made = 1.5 * conversation_tokens(built) / 1.3e6 if stage == "download" else 0.0
        return fixed + each * size / 1e6 + made
    if stage == "sft-data":
        return 0.3 + 5.0 * conversation_tokens(built) / 1.3e6
    if stage not in ("eval", "export"):
        return None
    model = built["model"]
    config = model.config(model.vocab_size or built["tokenizer"].vocab_size)
    each = SECONDS_PER_FLOP * (training_flops(config, config.context_tokens) + TOKEN_FLOPS)
    tokens = 90_000.0
    if stage == "eval":
        items = sum(built["battery"].categories.values())
        tokens = 1.6 * (BATTERY_TOKENS * items / DEFAULT_ITEMS + eval_tokens(built) / 3)
    return 3.0 + tokens * each

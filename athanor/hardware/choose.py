"""Every `auto` resolved at once: settings and a profile in, choices and their reasons out. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from athanor.hardware import policy
from athanor.hardware.policy import Choice
from athanor.model.architecture import Architecture
from athanor.model.config import ModelConfig
from athanor.model.device import MICRO_BATCH_TOKENS
from athanor.model.kernels import rows_by_hand
from athanor.training.attention import DEFAULT
from athanor.training.memory import Load, training_bytes
from athanor.training.setup import Choices

_USABLE = 0.95  # of free memory
AUTO = "auto"


@dataclass(frozen=True)
class Asked:
    """What parameters and machine settings say, autos included; `lanes` run side by side on `threads`."""

    precision: str
    attention: str
    compile: str
    checkpointing: str
    micro_batch_tokens: int
    batch_tokens: int
    steps: int
    lanes: int = 1
    threads: int = 1


def resolve(
    asked: Asked,
    architecture: Architecture,
    config: ModelConfig,
    profile: Mapping[str, Any] | None,
    free_bytes: int | None,
) -> tuple[Choices, dict[str, str]]:
    """Choices, and why, by name. A part that the profile lacks gets its safe default."""
    found = profile or {}
    said = Choice(None, "as set")
    share = policy.memory_fraction(architecture)
    free = None if free_bytes is None else int(free_bytes * share.value * _USABLE)

    number = said._replace(value=asked.precision)
    if asked.precision == AUTO:
        gflops = {name: row["ceiling"] for name, row in found.get("products", {}).get("gflops", {}).items()}
        number = policy.precision(architecture, gflops, found.get("steps"), found.get("stable"))

    kernel = said._replace(value=asked.attention)
    by_hand = rows_by_hand(architecture.device, number.value, config.context_tokens)
    if asked.attention == AUTO and by_hand:
        kernel = Choice(DEFAULT, "rows so short are worked by hand on a CPU")
    elif asked.attention == AUTO:
        kernel = policy.attention(architecture, found.get("attention"))

    def fits(rows: int, again: bool = False) -> bool:
        load = Load(rows, config.context_tokens, number.value, asked.lanes, min(asked.lanes, asked.threads))
        return free is None or needed_bytes(config, load, again) <= free

    again = said._replace(value=asked.checkpointing == "on")
    if asked.checkpointing == AUTO:
        again = policy.checkpointing(fits(1), fits(1, again=True))

    tokens = said._replace(value=asked.micro_batch_tokens)
    if not asked.micro_batch_tokens:
        tokens = _micro_batch(asked, architecture, config, found, lambda rows: fits(rows, again.value))

    code = said._replace(value=asked.compile == "on")
    if asked.compile == AUTO:
        rows = (tokens.value or MICRO_BATCH_TOKENS[architecture.device]) / config.context_tokens
        measured_rows = found.get("rows", rows)
        blocks = config.layers * asked.batch_tokens / config.context_tokens / measured_rows
        side_by_side = max(1, min(asked.lanes, asked.threads))
        code = policy.compiled(found.get("compile"), blocks_per_step=blocks / side_by_side, steps=asked.steps)

    chosen = Choices(number.value, kernel.value, code.value, again.value, tokens.value, share.value)
    parts = (number, kernel, code, again, tokens, share)
    names = [field.name for field in dataclasses.fields(Choices)]
    return chosen, {name: part.why for name, part in zip(names, parts, strict=True)}


def _micro_batch(
    asked: Asked, architecture: Architecture, config: ModelConfig, found: Mapping[str, Any], fits: Callable[[int], bool]
) -> Choice:
    """Tokens of a micro-batch, 0 for the trainer's rule.

    Where micro-batches run side by side their size is a rule and not a
    measurement: bytes shall not depend on a machine's mood for a gain that
    other cores take anyway.
    """
    if asked.lanes > 1 or architecture.device == "cpu" and not found.get("micro_batch"):
        return Choice(0, "the trainer's rule")
    measured = policy.micro_batch_rows(found.get("micro_batch"), fits)
    if measured.value:
        return Choice(measured.value * config.context_tokens, measured.why)
    most = min(MICRO_BATCH_TOKENS[architecture.device], asked.batch_tokens)
    rows = max(1, most // config.context_tokens)
    if fits(rows):
        return Choice(0, "the trainer's rule")
    while rows > 1 and not fits(rows):
        rows //= 2
    return Choice(rows * config.context_tokens, "more does not fit")


def needed_bytes(config: ModelConfig, load: Load, again: bool) -> int:
    """Peak bytes of training, where activations are computed `again` block by block: each block's input is kept."""
    if not again:
        return training_bytes(config, load)
    nothing = dataclasses.replace(load, micro_batch_rows=0)
    single = dataclasses.replace(config, layers=1)
    inside = training_bytes(single, load) - training_bytes(single, nothing)
    inputs = load.parallel * config.layers * config.dim * load.micro_batch_tokens * 4
    return training_bytes(config, nothing) + inside + inputs

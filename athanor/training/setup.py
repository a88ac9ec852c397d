"""From parameters, machine settings and choices to a prepared device, its load, and a model tuned for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from athanor.errors import ParamsError
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.training.attention import DEFAULT, attention
from athanor.training.compiling import Shapes, checkpoint_blocks, compile_blocks, untune
from athanor.training.device import limit_memory, micro_batch, prepare
from athanor.training.lanes import lane_count
from athanor.training.memory import Load


@dataclass(frozen=True)
class Choices:
    """How a machine works, with every `auto` resolved. All but `precision` only change the rounding of sums.

    micro_batch_tokens: 0 for the trainer's own rule. memory_fraction: of the
    device's memory that may be taken, 1 for no limit.
    """

    precision: str
    attention: str = DEFAULT
    compile: bool = False
    checkpointing: bool = False
    micro_batch_tokens: int = 0
    memory_fraction: float = 1.0


def place(
    config: ModelConfig,
    *,
    device: str,
    threads: int,
    micro_batch_tokens: int,
    batch_tokens: int,
    precision: str,
    section: str,
    seed: int,
    memory_fraction: float = 1.0,
) -> tuple[torch.device, Load]:
    """Prepare the device and decide how much it takes on at a time.

    Also seeds the global generators: torch starts them at random, and their
    state is part of every checkpoint.
    ParamsError names `section`.batch_tokens when a batch is not whole rows.
    """
    if batch_tokens % config.context_tokens:
        raise ParamsError(
            f"{batch_tokens} is not a multiple of model.context_tokens",
            where=f"{section}.batch_tokens",
            fix=f"use a multiple of {config.context_tokens}",
        )
    place = prepare(device, threads)
    limit_memory(place, memory_fraction)
    torch.manual_seed(seed)
    rows = micro_batch(place, micro_batch_tokens, config.context_tokens, batch_tokens)
    micro_batches = -(-batch_tokens // (rows * config.context_tokens))
    lanes = min(lane_count(config, place), micro_batches)
    return place, Load(rows, config.context_tokens, precision, lanes, min(lanes, threads))


@contextlib.contextmanager
def tuned(
    model: Transformer,
    choices: Choices,
    load: Load,
    *,
    batch_tokens: int,
    documents: bool,
    cache: Path,
    note: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Inside the block, `model` and its copies run as chosen.

    `documents` says whether rows may hold several, kept apart by a mask.
    `cache` is where compiled code is kept.
    """
    try:
        if choices.compile:
            shapes = Shapes.of(load.micro_batch_rows, load.row_tokens, batch_tokens, documents)
            compile_blocks(
                [model],
                shapes,
                precision=choices.precision,
                cache=cache,
                one_thread=lane_count(model.config, model.head_weight.device) > 1,
                note=note,
                should_stop=should_stop,
            )
        if choices.checkpointing:
            checkpoint_blocks([model])
        with attention(choices.attention, model.head_weight.device):
            yield
    finally:
        untune([model])

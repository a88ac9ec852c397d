"""From parameters and machine settings to a prepared device and its load."""

from __future__ import annotations

import torch

from athanor.errors import ParamsError
from athanor.model.config import ModelConfig
from athanor.training.device import micro_batch, prepare
from athanor.training.lanes import lane_count
from athanor.training.memory import Load


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
    torch.manual_seed(seed)
    rows = micro_batch(place, micro_batch_tokens, config.context_tokens, batch_tokens)
    micro_batches = -(-batch_tokens // (rows * config.context_tokens))
    lanes = min(lane_count(config, place), micro_batches)
    return place, Load(
        rows, config.context_tokens, precision, lanes, min(lanes, threads), accumulates=micro_batches > lanes
    )

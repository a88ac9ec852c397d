"""Runs that go wrong on purpose. As a program it is the victim of the kill tests:

    python tests/training/healing.py FOLDER start|end|STEP

kills itself when the way back begins to be told, at its end, or when the step comes for the second time.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from athanor.training.guard import Rules
from athanor.training.schedule import Schedule

MICRO = "training_micro"
if MICRO not in sys.modules:
    spec = importlib.util.spec_from_file_location(MICRO, Path(__file__).with_name("micro.py"))
    sys.modules[MICRO] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[MICRO])
micro = sys.modules[MICRO]

BATCH = 128
SCHEDULE = Schedule("wsd", 0.01, 0.001, 256, 1024, 48 * BATCH)
# Runs of 48 steps: everything is as by default, only shorter.
RULES = Rules(
    window=12, minimum=6, loss_factor=1.15, spike_factor=1.05, spike_hits=3, spike_steps=4, block=6, blocks=4, refused=4, margin=2, anchor_every=8
)
GARBAGE = range(20, 24)  # batches of the data, counted from 0
FLAT = Schedule("wsd", 0.01, 0.001, 256, 8 * BATCH, 48 * BATCH)


class Garbage(micro.CountingSampler):
    """Random ids in some batches of the data."""

    def __init__(self, batches=GARBAGE) -> None:
        super().__init__()
        self.batches, self.read = batches, []

    def batch(self, position: int, tokens: int, skipped: int = 0) -> Any:
        number = (position + skipped) // tokens
        self.read.append(number)
        rows = super().batch(position + skipped, tokens)
        if number not in self.batches:
            return rows
        draw = np.random.Generator(np.random.PCG64([8, number]))
        return rows._replace(tokens_BS=draw.integers(0, micro.CONFIG.vocab_size, rows.tokens_BS.shape))


def run(folder: Path, sampler: Any = None, hooks: dict[str, Any] | None = None, **changes: Any) -> Any:
    changes = {"schedule": SCHEDULE, "rules": RULES, "spike_guard": False, "log_every_steps": 1, **changes}
    return micro.run(folder, Garbage() if sampler is None else sampler, hooks, **changes)

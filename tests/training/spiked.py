"""Runs that go wrong on purpose. As a program it is the victim of the kill tests:

    python tests/training/spiked.py FOLDER resume|drop|STEP

kills itself on the way back (before anything is restored, at the first
checkpoint that goes), or at a step after it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from athanor.training.guard import Rules
from athanor.training.schedule import Schedule
from tests.training import micro

BATCH = 128
SCHEDULE = Schedule("wsd", 0.01, 0.001, 256, 1024, 48 * BATCH)
# For runs of 48 steps: numbers of steps are small, factors as by default.
RULES = Rules(window=12, minimum=6, spike_hits=3, spike_steps=4, block=6, blocks=4, refused=4, margin=2, anchor_every=8)
GARBAGE = range(20, 24)  # batches of the data, counted from 0


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
    usual = {"schedule": SCHEDULE, "rules": RULES, "spike_guard": False, "log_every_steps": 1}
    changes = {**usual, "micro_batch_rows": 8, "validation_every_tokens": 16 * BATCH, **changes}
    return micro.run(folder, Garbage() if sampler is None else sampler, hooks, **changes)


def main(folder: Path, when: str) -> None:
    from athanor.training import checkpoint, recovery

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    told: list[int] = []

    def on_step(row: dict[str, float]) -> None:
        if when.isdigit() and row["step"] == int(when) and told:
            die()

    if when == "resume":
        recovery.resume = die
    if when == "drop":
        real = checkpoint.drop

        def drop(*arguments: Any) -> None:
            checkpoint.shutil.rmtree = die
            real(*arguments)

        checkpoint.drop = drop
    hooks = {"on_step": on_step, "on_rollback": lambda step, facts: told.append(step)}
    run(folder, hooks=hooks, save_every_seconds=0.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""Synthetic training runs: every input that a rule reads, healthy until a test plants a fault."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from athanor.monitor.finding import Finding
from athanor.monitor.monitor import Monitor, plan_facts, plan_of
from athanor.monitor.thresholds import Thresholds
from athanor.training.schedule import Schedule

BATCH, VOCAB, GIB = 2048, 4096, 2**30
Rows = list[dict[str, float]]


def schedule(steps: int) -> Schedule:
    total = steps * BATCH
    return Schedule("wsd", 4e-3, 0.0, max(1, steps // 25) * BATCH, int(0.3 * total), total)


def plan(phase: str, steps: int, cooldown_data: bool = False, precision: str | None = None) -> dict[str, Any]:
    return plan_facts(phase, schedule(steps), BATCH, VOCAB, 64 * GIB, cooldown_data, precision)


@functools.cache  # nothing changes the rows
def healthy(steps: int, seed: int = 0, *, phase: str = "pretrain", tail: str = "gaussian", noise: float = 0.01) -> Rows:
    """A power law from ln(vocabulary) with noise of `tail`: gaussian, or student with 3 degrees of freedom."""
    draw, rate = np.random.default_rng(seed), schedule(steps).lr_at
    t = np.arange(1, steps + 1)
    jitter = draw.normal(size=steps) if tail == "gaussian" else draw.standard_t(3, steps)
    jitter[0] *= 0.1  # before the first step nothing is learnt yet, and the loss is nearly exact
    start = math.log(VOCAB) if phase == "pretrain" else 4.0
    loss = (1.5 + (start - 1.5) * t**-0.28) * np.exp(noise * jitter)
    norm = np.exp(0.25 * draw.normal(size=steps)) * (0.3 + t**-0.3)
    speed, wait = 8000 * np.exp(0.02 * draw.normal(size=steps)), 0.02 * np.exp(0.2 * draw.normal(size=steps))
    every, name = max(2, steps // 8), "val_bpb.all" if phase == "pretrain" else "val_loss"
    rows = []
    for step in range(1, steps + 1):
        i, tokens = step - 1, step * BATCH
        row = {"step": step, "tokens": tokens, "loss": loss[i], "lr": rate(tokens), "grad_norm": norm[i]}
        row["skipped"] = 0.0
        seconds = BATCH / speed[i]
        row |= {"tokens_per_second": speed[i], "time.data_s": wait[i] * seconds}
        row |= {"time.forward_backward_s": 0.9 * seconds, "time.optimizer_s": 0.08 * seconds}
        row |= {"memory.bytes": 2.0 * GIB, "memory.host_bytes": 4.0 * GIB * (1 + 0.005 * float(draw.random()))}
        rows.append({key: float(value) for key, value in row.items()})
        if step % 5 == 0:
            # Largest logits grow at first and then settle.
            vitals = {"attention_logit_max": 30 * step / (step + 50), "embedding_spread": 1.2, "final_norm_gain": 1.5}
            vitals |= {"largest": 100 * step / (step + 50), "largest_block": 3.0}
            vitals |= {"gradient_tiny": 0.02, "gradient_tiny_block": 5.0}
            rows.append({"step": step, **{f"vitals.{key}": value for key, value in vitals.items()}})
            rows.append({"step": step, "disk.free_bytes": 100.0 * GIB - step * 1000, "time.checkpoint_s": 0.01})
        if step % every == 0 or step == steps:
            rows.append({"step": step, name: float(1.0 + 2 * step**-0.3)})
    return rows


def change(rows: Rows, name: str, how: Callable[[int, float], float], first: int = 1, last: int = 10**9) -> Rows:
    """The rows with another value of one number from step `first` to `last`; `how` gets step and value."""
    return [
        {**row, name: how(int(row["step"]), row[name])} if name in row and first <= row["step"] <= last else row
        for row in rows
    ]


def findings(
    rows: Iterable[dict[str, float]],
    steps: int,
    phase: str = "pretrain",
    *,
    resumes: Iterable[int] = (),
    thresholds: Thresholds | None = None,
    cooldown_data: bool = False,
    precision: str | None = None,
) -> list[Finding]:
    """What the monitor says; the run is interrupted after each step of `resumes`."""
    monitor = Monitor(plan_of(plan(phase, steps, cooldown_data, precision)), thresholds or Thresholds())
    found, left = [], sorted(resumes)
    for row in rows:
        if left and row["step"] > left[0]:
            left.pop(0)
            monitor.resumed()
        found += monitor.feed(row)
    return found


def trouble(found: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.level != "info"]

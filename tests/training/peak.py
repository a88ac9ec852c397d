"""The true peaks of two training steps each, as a process of its own:

    python tests/training/peak.py '[{"config": {...}, "load": {...}, "batch_rows": 8}, ...]'

Prints for each the bytes by which the process grew. Run with MALLOC_MMAP_THRESHOLD_=65536: so freed memory goes
back to the system, and none that an earlier one left is used again.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.training.best import Best
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.memory import StepFootprint
from athanor.training.optimizer import OptimizerSettings
from athanor.training.settings import LoopSettings
from athanor.training.step import Stepper


class Rows(NamedTuple):
    tokens_BS: np.ndarray
    document_BS: np.ndarray


def status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


def steps(config: ModelConfig, load: StepFootprint, batch_rows: int) -> None:
    model = Transformer.fresh(config, 0)
    tokens = batch_rows * load.row_tokens
    settings = LoopSettings(
        tokens, tokens, 1.0, 0.0, load.precision, True, 0, 0, load.micro_batch_rows, load.parallel, 1, 1e9
    )
    draw = np.random.default_rng(0)
    shape = (batch_rows, load.row_tokens + 1)
    rows = Rows(
        draw.integers(0, config.vocab_size, shape), np.sort(draw.integers(0, 4 if load.documents else 1, shape), axis=1)
    )
    if load.checkpointing:
        for block in model.model.layers:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    with CpuReplicas(model, load.parallel) as replicas:
        stepper = Stepper(replicas, OptimizerSettings(0.9, 0.95, 1e-8, 0.1, load.optimizer), settings)
        best = Best()
        for number in range(2):
            stepper.step(rows, 1e-3)
            best.update(number + 1, [0.0], model, keep=load.keeps_best)


def main() -> None:
    tiny = ModelConfig(64, 1, 16, 2, 1, 8, 32, 16, 1e4, 1e-6, False)
    for recomputes in (False, True):  # what the first use loads is no part of a later peak
        steps(tiny, StepFootprint(1, 16, "fp32", checkpointing=recomputes), 2)
    for asked in json.loads(sys.argv[1]):
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark so far is forgotten
        torch.set_num_threads(asked["load"]["parallel"])
        steps(ModelConfig(**asked["config"]), StepFootprint(**asked["load"]), asked["batch_rows"])
        print(status("VmHWM") - before, flush=True)


if __name__ == "__main__":
    main()

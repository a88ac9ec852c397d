"""A LoRA run of a few seconds. As a program, one process of several that do it together, or one to be killed:

python tests/adapters/lora_run.py BASE FOLDER RESULT.json [step at which it kills itself]
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from athanor.adapters.foreign import Foreign, load_foreign, tuned
from athanor.adapters.lora import LoraSettings
from athanor.model.precision import autocast
from athanor.training.loop import Hooks, train
from athanor.training.memory import StepFootprint
from athanor.training.schedule import Schedule
from athanor.training.setup import Choices
from athanor.training.world import init_world
from tests.training import micro

CONTEXT, BATCH, STEPS = 16, 64, 6
LORA = LoraSettings(rank=4, alpha=8.0, dropout=0.1, targets="all")
SCHEDULE = Schedule("cosine", 0.05, 0.0, 64, 0, STEPS * BATCH)
SETTINGS = dataclasses.replace(
    micro.SETTINGS,
    total_tokens=STEPS * BATCH,
    batch_tokens=BATCH,
    validation_every_tokens=3 * BATCH,
    micro_batch_rows=1,
    log_every_steps=2,
    save_every_seconds=0.0,
)


class Sampler:
    """Rows of two conversations that count upwards, of which the later part is supervised."""

    def batch(self, position_tokens: int, batch_tokens: int, skipped_tokens: int = 0) -> micro.Rows:
        draw = np.random.Generator(np.random.PCG64([7, position_tokens]))
        B, S = batch_tokens // CONTEXT, CONTEXT + 1
        tokens_BS = (draw.integers(0, 64, (B, 1)) + np.arange(S)) % 64
        document_BS = (np.arange(S) >= draw.integers(4, 12, (B, 1))).astype(np.int64)
        return micro.Rows(tokens_BS, document_BS, (draw.random((B, S)) < 0.7).astype(np.uint8))


def validate(model: Foreign, precision: str) -> dict[str, Any]:
    with torch.no_grad(), autocast(precision, model.head_weight.device):
        return {"score": float(model(torch.arange(16)[None]).sum())}


def run(base: Path, folder: Path, *, world: Any = None, settings: LoraSettings = LORA, **options: Any) -> Any:
    """Train a fresh LoRA on a base; returns (model, result, rows of the journal)."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    seed, precision = options.pop("seed", 1), options.pop("precision", "fp32")
    model = load_foreign(base, settings, CONTEXT, seed, precision)
    rows: list[dict[str, float]] = []
    on_step = options.pop("on_step", lambda row: None)
    hooks = Hooks(
        validate=lambda model: validate(model, precision), on_step=lambda row: (rows.append(row), on_step(row))[0]
    )
    choices = Choices(precision, checkpointing=options.pop("checkpointing", False))
    loop = dataclasses.replace(SETTINGS, precision=precision, **options)
    with tuned(model, choices, StepFootprint(1, CONTEXT, precision)):
        extra = {} if world is None else {"world": world}
        result = train(model, Sampler(), micro.ADAMW, SCHEDULE, loop, folder, hooks, **extra)
    return model, result, rows


def weights(model: Foreign) -> dict[str, list[float]]:
    return {name: weight.detach().flatten().tolist() for name, weight in model.named_parameters()}


def main(base: str, folder: str, told: str, kill_at: str = "0") -> None:
    world = None
    if "RANK" in os.environ:
        rank = int(os.environ["RANK"])
        world = init_world("ddp", device="cpu", timeout_s=100.0, main=rank == 0)
        told, seed = f"{told}.{rank}", 1 if rank == 0 else 9  # weights come from the main process
    else:
        seed = 1

    def on_step(row: dict[str, float]) -> None:
        if row["step"] == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)

    model, result, _ = run(Path(base), Path(folder), world=world, seed=seed, on_step=on_step)
    told_of = {"weights": weights(model), "curve": result.curve, "validations": result.validations}
    Path(told).write_text(json.dumps(told_of))


if __name__ == "__main__":
    main(*sys.argv[1:])

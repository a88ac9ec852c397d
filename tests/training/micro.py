"""A training run of a few milliseconds a step. As a program it is the victim of the kill tests:

python tests/training/micro.py FOLDER [steps until it kills itself, 0 for never]
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.training.best import SelectionKey
from athanor.training.loop import Hooks, train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.result import TrainResult
from athanor.training.schedule import Schedule
from athanor.training.settings import LoopSettings

CONFIG = ModelConfig(64, 2, 16, 4, 2, 4, 32, 16, 1e4, 1e-6, False)
ADAMW = OptimizerSettings(0.9, 0.95, 1e-8, 0.1)
OPTIONS: list[dict[str, Any]] = [
    {"name": "adamw"},
    {"name": "muon", "embedding_lr_factor": 2.0},
]
SETTINGS = LoopSettings(
    total_tokens=24 * 128,
    batch_tokens=128,
    grad_clip=1.0,
    z_loss=0.0,
    precision="fp32",
    document_mask=True,
    validation_every_tokens=640,
    sample_every_tokens=0,
    micro_batch_rows=2,
    threads=1,
    log_every_steps=3,
    save_every_seconds=1e9,
)
SCHEDULE = Schedule("wsd", 0.01, 0.001, 256, 1024, SETTINGS.total_tokens)


class Rows(NamedTuple):
    tokens_BS: np.ndarray
    document_BS: np.ndarray
    mask_BS: np.ndarray | None = None


class CountingSampler:
    """Rows that count upwards from a random start: learnable, and a pure function of the position."""

    def __init__(self, masked: bool = False) -> None:
        self.masked = masked

    def batch(self, position_tokens: int, batch_tokens: int) -> Rows:
        draw = np.random.Generator(np.random.PCG64([7, position_tokens]))
        B, S = batch_tokens // CONFIG.context_tokens, CONFIG.context_tokens + 1
        tokens_BS = (draw.integers(0, CONFIG.vocab_size, (B, 1)) + np.arange(S)) % CONFIG.vocab_size
        document_BS = np.sort(draw.integers(0, 3, (B, S)), axis=1)
        mask_BS = (draw.random((B, S)) < 0.3).astype(np.uint8) if self.masked else None
        return Rows(tokens_BS, document_BS, mask_BS)


class Trunk(contextlib.nullcontext):
    """The folder of a trunk, without a lock."""

    def __init__(self, path: Path) -> None:
        super().__init__(self)
        self.path = path


def make_model(seed: int = 0, **changes: Any) -> Transformer:
    return Transformer.fresh(dataclasses.replace(CONFIG, **changes), seed)


def validate(model: Transformer) -> dict[str, Any]:
    with torch.no_grad():
        return {"score": float(model(torch.arange(16)[None]).sum())}


def near(score: float) -> SelectionKey:
    """A selection key that likes a validation the better, the nearer its score."""
    return lambda scores: [-abs(scores["score"] - score)]


def run(
    folder: Path,
    sampler: Any = None,
    hooks: dict[str, Any] | None = None,
    trunk: Any = None,
    schedule: Schedule = SCHEDULE,
    selection_key: SelectionKey | None = None,
    **changes: Any,
) -> tuple[Transformer, TrainResult]:
    """Train from scratch or from the folder's checkpoint."""
    torch.set_flush_denormal(True)
    model = make_model()
    settings = dataclasses.replace(SETTINGS, total_tokens=schedule.total_tokens, **changes)
    hooks = Hooks(**{"validate": validate, **(hooks or {})})
    result = train(
        model,
        sampler or CountingSampler(),
        ADAMW,
        schedule,
        settings,
        folder,
        hooks,
        trunk,
        selection_key=selection_key,
    )
    return model, result


def outcome(model: Transformer, result: TrainResult) -> tuple[bytes, Any]:
    """Everything that must not depend on interruptions."""
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    return weights, (
        result.curve,
        result.validations,
        result.supervised_tokens,
        result.skipped_steps,
        result.chosen_step,
    )


if __name__ == "__main__":
    kill_at = int(sys.argv[2])

    def on_step(row: dict[str, float]) -> None:
        if row["step"] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    run(Path(sys.argv[1]), hooks={"on_step": on_step}, save_every_seconds=0.0, log_every_steps=1)

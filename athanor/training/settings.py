"""Settings of the training loop and its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from athanor.training.guard import Rules
from athanor.training.memory import StepFootprint


@dataclass(frozen=True)
class LoopSettings:
    """What decides the result, then how this machine runs it. `total_tokens` is a multiple of `batch_tokens`."""

    total_tokens: int
    batch_tokens: int
    grad_clip: float
    z_loss: float
    precision: str
    document_mask: bool
    validation_every_tokens: int
    sample_every_tokens: int
    micro_batch_rows: int
    threads: int  # at work on micro-batches, where there are replicas
    log_every_steps: int
    save_every_seconds: float
    spike_guard: bool = True  # refuse steps that are far out, on the device
    max_rollbacks: int = 3  # times that the run goes back and leaves data out; 0 never looks for a reason
    rules: Rules = Rules()
    overlap: bool = False  # batches are read and checkpoints written beside the steps
    footprint: StepFootprint | None = (
        None  # as memory was estimated for it: what advice begins from when memory runs out all the same
    )

    @property
    def steps(self) -> int:
        return self.total_tokens // self.batch_tokens

    @classmethod
    def of(cls, params: Any, machine: Any, **stage_settings: Any) -> LoopSettings:
        """From a stage's parameters and the machine's settings, by their common names, and what the stage decides."""
        result = {name: getattr(params, name) for name in _OF_PARAMS}
        return cls(**result, **{name: getattr(machine, name) for name in _OF_MACHINE}, **stage_settings)


_OF_PARAMS = ("batch_tokens", "grad_clip", "z_loss", "spike_guard", "max_rollbacks")
_OF_MACHINE = ("threads", "log_every_steps", "save_every_seconds")

"""What a checkpoint holds: weights, optimiser, loss scale, random states, and where the run stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from athanor.training.checkpoint import Checkpoint
from athanor.training.curve import History
from athanor.training.step import Stepper


class RunState:
    """Where a run stands: everything that a checkpoint holds besides weights and optimiser."""

    def __init__(self) -> None:
        self.step = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.supervised = 0
        self.pairs = 0  # of query and key, that attention was allowed
        self.history = History()
        self.validations: list[dict[str, Any]] = []
        self.ledger: list[dict[str, Any]] = []  # see ledger.py
        self.repairs = 0  # ways back because of numbers that no batch had spoilt
        self.examined = 0  # skipped steps that were looked into

    def state(self) -> dict[str, Any]:
        """The part that goes into JSON; the history is tensors."""
        return {name: value for name, value in vars(self).items() if name != "history"}

    def go_back(self, state: dict[str, Any], history: History) -> None:
        """Stand where an earlier checkpoint stood, and keep what was learned since about the data and the machine."""
        kept = {name: vars(self)[name] for name in ("ledger", "repairs", "examined")}
        self.load({**state, **kept}, history)

    def load(self, state: dict[str, Any], history: History) -> None:
        vars(self).update({**state, "history": history})


def run_tensors(stepper: Stepper, progress: RunState) -> dict[str, Tensor]:
    """Every tensor that decides how the run goes on."""
    tensors = {f"model.{name}": weight.detach() for name, weight in stepper.model.named_parameters()}
    tensors |= {f"optimizer.{name}": value for name, value in stepper.optimizer.tensors().items()}
    tensors |= {f"scale.{name}": value for name, value in stepper.scale.tensors().items()}
    tensors |= {f"guard.{name}": value for name, value in stepper.guard.tensors().items()}
    tensors |= {f"history.{name}": column for name, column in progress.history.tensors().items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors |= {f"rng.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


@torch.no_grad()
def restore(saved: Checkpoint, stepper: Stepper, progress: RunState, *, back: bool = False) -> None:
    """Put a checkpoint's content into parts built for the same configuration; `back`: the run has been further."""

    def part(prefix: str) -> dict[str, Tensor]:
        return _part(saved, prefix)

    weights = part("model.")
    for name, weight in stepper.model.named_parameters():
        weight.copy_(weights[name])
    stepper.optimizer.load(part("optimizer."))
    stepper.scale.load(part("scale."))
    stepper.guard.load(part("guard."))
    torch.set_rng_state(saved.tensors["rng.cpu"])
    if torch.cuda.is_available():
        states = part("rng.cuda.")
        for number in range(min(len(states), torch.cuda.device_count())):
            torch.cuda.set_rng_state(states[str(number)], number)
    (progress.go_back if back else progress.load)(saved.state, history_of(saved))


def history_of(saved: Checkpoint) -> History:
    return History.load(_part(saved, "history."))


def _part(saved: Checkpoint, prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in saved.tensors.items() if name.startswith(prefix)}


def json_safe(value: Any) -> Any:
    """A nested value with None for numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: json_safe(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

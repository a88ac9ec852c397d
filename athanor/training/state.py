"""The content of a checkpoint: weights, optimiser, loss scale, random states, and the run's progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from athanor.training import checkpoint
from athanor.training.best import Best
from athanor.training.checkpoint import Checkpoint
from athanor.training.curve import History
from athanor.training.step import Stepper


class RunState:
    """The progress of a run: everything that a checkpoint holds besides weights and optimiser."""

    def __init__(self, code: str = "") -> None:
        self.code = code  # the digest of what runs now
        self.codes: list[tuple[str, int]] = [(code, 0)]  # all that trained, each with the step that it began at
        self.step = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.supervised = 0
        self.pairs = 0  # of query and key, that attention was allowed
        self.history = History()
        self.validations: list[dict[str, Any]] = []
        self.ledger: list[dict[str, Any]] = []  # see skipped_ranges.py
        self.repairs = 0  # rollbacks because of non-finite numbers that no batch had caused
        self.examined = 0  # skipped steps that were looked into
        self.best = Best()

    def state(self) -> dict[str, Any]:
        """The part that goes into JSON; the history and the best weights are tensors."""
        values = {name: value for name, value in vars(self).items() if name not in ("history", "best", "code")}
        return {**values, "best": {"step": self.best.step, "rank": self.best.key}}

    def go_back(self, state: dict[str, Any], history: History, best: Mapping[str, Tensor]) -> None:
        """Return to an earlier checkpoint's state, but keep what is known since about the data and the machine."""
        carried = {name: vars(self)[name] for name in ("ledger", "repairs", "examined")}
        self.load({**state, **carried}, history, best)

    def load(self, state: dict[str, Any], history: History, best: Mapping[str, Tensor]) -> None:
        best_state = state.get("best") or {"step": 0, "rank": []}
        vars(self).update({**state, "history": history, "best": Best(best_state["step"], best_state["rank"], best)})
        self.codes = [(code, step) for code, step in self.codes]
        if self.codes[-1][0] != self.code:
            self.codes.append((self.code, self.step))


def run_tensors(stepper: Stepper, progress: RunState) -> dict[str, Tensor]:
    """Every tensor that decides how the run continues, in full. All processes have to call this.

    Only the main process is given those that had to be gathered.
    """
    backend, tensors = stepper.backend, {}
    named = {f"model.{name}": (name, weight.detach()) for name, weight in backend.named_parameters()}
    for name, value in stepper.optimizer.tensors().items():
        named[f"optimizer.{name}"] = (name.rpartition(".")[0], value)
    for name, (parameter, tensor) in named.items():
        full = backend.gathered(parameter, tensor)
        if stepper.world.main:
            tensors[name] = full.cpu() if full is not tensor else full
    tensors |= {f"scale.{name}": value for name, value in stepper.scale.tensors().items()}
    tensors |= {f"guard.{name}": value for name, value in stepper.guard.tensors().items()}
    tensors |= {f"history.{name}": column for name, column in progress.history.tensors().items()}
    tensors |= {f"best.{name}": weight for name, weight in progress.best.weights.items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors |= {f"rng.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


def resume(
    folder: Path,
    stepper: Stepper,
    progress: RunState,
    on_note: Callable[[str], None],
    max_step: int | None = None,
    usable: Callable[[Checkpoint], bool] = lambda saved: True,
    *,
    rewinding: bool = False,
) -> bool:
    """Load the newest complete checkpoint of `folder`, of step `max_step` or before; False if there is none.

    The main process reads it and sends it to the others, which need not see the folder. `usable` may refuse one;
    `rewinding`: the run has been further.
    """
    world = stepper.world
    saved = checkpoint.latest(folder, on_note, max_step, usable) if world.main else None
    state = world.broadcast_object(None if saved is None else saved.state)
    if state is None:
        return False
    restore(world.tensors(None if saved is None else saved.tensors), state, stepper, progress, rewinding=rewinding)
    return True


class _Prefixed(Mapping[str, Tensor]):
    """The tensors whose names begin with a prefix, looked up on demand and cut to this process's shard."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, cut: Callable[[str, Tensor], Tensor]) -> None:
        self.tensors, self.prefix, self.cut = tensors, prefix, cut

    def __getitem__(self, name: str) -> Tensor:
        return self.cut(name, self.tensors[self.prefix + name])

    def __iter__(self) -> Iterator[str]:
        return (name[len(self.prefix) :] for name in self.tensors if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@torch.no_grad()
def restore(
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    stepper: Stepper,
    progress: RunState,
    *,
    rewinding: bool = False,
) -> None:
    """Put a checkpoint's content into parts built for the same configuration."""
    backend = stepper.backend

    def prefixed(prefix: str) -> Mapping[str, Tensor]:
        def own_shard(name: str, tensor: Tensor) -> Tensor:
            if prefix == "model.":
                return backend.shard_of(name, tensor)
            return backend.shard_of(name.rpartition(".")[0], tensor) if prefix == "optimizer." else tensor

        return _Prefixed(tensors, prefix, own_shard)

    weights = prefixed("model.")
    for name, weight in backend.named_parameters():
        weight.copy_(weights[name])
    stepper.optimizer.load(prefixed("optimizer."))
    stepper.scale.load(prefixed("scale."))
    stepper.guard.load(prefixed("guard."))
    torch.set_rng_state(tensors["rng.cpu"])
    if torch.cuda.is_available() and stepper.world.size == 1:
        states = prefixed("rng.cuda.")
        for number in range(min(len(states), torch.cuda.device_count())):
            torch.cuda.set_rng_state(states[str(number)], number)
    history, best = History.load(prefixed("history.")), dict(prefixed("best."))
    (progress.go_back if rewinding else progress.load)(dict(state), history, best if stepper.world.main else {})


def history_of(saved: Checkpoint) -> History:
    return History.load(_Prefixed(saved.tensors, "history.", lambda name, tensor: tensor))


def json_safe(value: Any) -> Any:
    """A nested value with None for numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

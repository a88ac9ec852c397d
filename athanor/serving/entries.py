"""One model of a server's list, with what is known of it and of its process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from athanor.serving.about import SHAPE, file_states, shape
from athanor.serving.discover import AvailableModel
from athanor.serving.running import template_of
from athanor.serving.starters import starters


@dataclass
class Entry:
    """A model and its state. reserved: bytes set aside while it is loaded; measured: bytes it held at the last look."""

    model: AvailableModel
    worker: Any = None
    task: asyncio.Task[None] | None = None
    busy: int = 0
    last_used: int = 0  # number of the request that used it last
    reserved: int = 0
    measured: int = 0
    gone: bool = False  # from the disk; it stays in the list while its process lives
    files: Any = None  # state of the files that it was loaded from
    info: Mapping[str, Any] = field(default_factory=dict)  # what its files say, then what its process says
    failure: tuple[str, float, Any] | None = None  # reason, when, state of the files

    def __post_init__(self) -> None:
        self._describe(self.model)

    def _describe(self, model: AvailableModel) -> None:
        path, self.model = Path(model.path), model
        if not self.ready():  # a process says what it was loaded from, and is asked until it is replaced
            self.info = shape(path) | template_of(path)
        self.failure = (model.problem, time.monotonic(), file_states(model)) if model.problem else None

    def follow(self, model: AvailableModel) -> None:
        """Take in how the model is on the disk now. It keeps its id; and its label, which may name experiments, while
        it is the same."""
        came_back, self.gone = self.gone, False
        if came_back or replace(model, id=self.model.id, label=self.model.label) != self.model:
            self._describe(replace(model, id=self.model.id))

    def ready(self) -> bool:
        return self.worker is not None and self.worker.alive

    def at_work(self) -> bool:
        """Whether it answers, or is being loaded for an answer."""
        return bool(self.busy or self.task)

    def held_bytes(self) -> int:
        if self.ready():
            self.measured = int(self.worker.resident_bytes())
            return self.measured
        return self.reserved

    def state(self) -> dict[str, Any]:
        """As the page gets it (GET /api/state)."""
        model, info = self.model, self.info
        state = "loading" if self.task else "ready" if self.ready() else "failed" if self.failure else "idle"
        return {
            **{name: getattr(model, name) for name in ("id", "label", "source", "backend", "created")},
            "state": state,
            "reason": self.failure[0] if self.failure and state == "failed" else None,
            "starters": starters(Path(model.path)),
            **{key: info.get(key) for key in (*SHAPE, "defaults", "template")},
        }

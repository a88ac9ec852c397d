"""The run of a worker process of a stage: it reads parameters and computes, and writes no journal and no outputs."""

from __future__ import annotations

from typing import Any

from athanor.runtime.progress import Progress
from athanor.runtime.run import Run
from athanor.runtime.slots import Slot


class _HeldElsewhere(Slot):
    """A slot that the main process has locked: here only its path and name are used."""

    def __enter__(self) -> Slot:
        return self

    def release(self) -> None:
        """Nothing is held."""

    def mark_done(self) -> None:
        """The main process does."""


class WorkerRankRun(Run):
    """A `Run` without journal, outputs and locks, for all processes of a stage but the main one."""

    main = False
    _slot_kind = _HeldElsewhere

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Does nothing: the main process does it, with the same values."""

    metrics = plot = attach = note = watch_health = check_unchanged = finish = fail = _nothing

    @property
    def journal(self) -> Any:
        return _NoJournal()

    def progress(self, total: float | None, desc: str = "", unit: str = "") -> Progress:
        self._watch.bar = _Silent()
        return self._watch.bar

    def on_signal(self, *_: object) -> None:
        self._stopping = True


class _NoJournal:
    """Ignores events, numbers and rollbacks."""

    def scalars(self, *_: Any, **__: Any) -> None:
        """Nothing: there is no record."""

    event = rewind = scalars


class _Silent(Progress):
    """Counts and says nothing."""

    def __init__(self) -> None:
        self.done = 0.0
        self.total = None
        self.unit = ""
        self.bar = None

    def resume_at(self, done: float) -> None:
        self.done = done

    def expect(self, amount: float) -> None:
        """Nothing."""

    def update(self, amount: float, note: str = "") -> None:
        self.done += amount

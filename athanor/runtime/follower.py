"""The run of a process that only helps: it reads parameters and computes, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from athanor.runtime.progress import Progress
from athanor.runtime.run import Run
from athanor.runtime.slots import Slot


class _Elsewhere(Slot):
    """A slot that another process has: here it is a name."""

    def __enter__(self) -> Slot:
        return self

    def release(self) -> None:
        """Nothing is held."""

    def mark_done(self) -> None:
        """The main process does."""


class Follower(Run):
    """A `Run` without journal, outputs and locks, for all processes of a stage but the main one."""

    main = False
    _slot_kind = _Elsewhere

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Nothing: the main process writes."""

    def plot(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def attach(self, path: str | os.PathLike[str]) -> None:
        """Nothing."""

    @property
    def journal(self) -> Any:
        return _NoJournal()

    def note(self, text: str) -> None:
        """Nothing: what is worth knowing is the same in all processes."""

    def watch_health(self, *_: Any, **__: Any) -> None:
        """Nothing: the numbers are the same."""

    def progress(self, total: float | None, desc: str = "", unit: str = "") -> Progress:
        self._watch.bar = _Silent()
        return self._watch.bar

    def on_signal(self, *_: object) -> None:
        self._stop = True

    def check_unchanged(self) -> None:
        """Nothing: the main process looks."""

    def finish(self) -> None:
        """Nothing: the main process tells."""

    def fail(self, status: str, message: str) -> None:
        """Nothing: it was printed."""


class _NoJournal:
    """Takes events, numbers and steps back for none of its own."""

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

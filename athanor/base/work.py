"""Work on shards: what the library asks of whatever runs it, on one machine or on many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from athanor.base.errors import Interrupted

Facts = dict[str, Any]  # plain JSON types by name
Tick = Callable[[int], None]  # hears how much was done

# task, and an empty folder for what it writes -> facts about it, as plain JSON types.
Work = Callable[[Any, Path], Facts]


def ignore(*_: object) -> None:
    """A callback that does nothing."""


def never() -> bool:
    """A stop condition that is never met."""
    return False


_STOP: ContextVar[Callable[[], bool]] = ContextVar("stop", default=never)


@contextmanager
def stopping(stop: Callable[[], bool]) -> Iterator[None]:
    """Let `check_stop` ask `stop`: work that takes long may run in the coordinator's own process, which none can end."""
    token = _STOP.set(stop)
    try:
        yield
    finally:
        _STOP.reset(token)


def check_stop() -> None:
    if _STOP.get()():
        raise Interrupted("stopped; what was downloaded is kept, run again to continue")


class MapShards(Protocol):
    """Does `work` for every task, in any order and any number of processes; returns the facts by name of the task.

    `work` is a function of a module (other processes import it), pure: its
    files and facts depend on the task alone. A task is made of JSON types,
    tuples, paths and dataclasses. The files of task `name` end up
    in `folder/name`, whole or not at all, and what is there already is not
    done again. `sizes` are bytes of text by task, for the progress shown.

    Nothing but the names is held in memory: `tasks` and `sizes` may compute a
    value when it is asked for, and a task is asked for when it is submitted.
    The facts returned are in the order of `tasks`, and read from `folder` at
    each look-up: look up once, and before `folder` is removed.
    """

    def __call__(
        self, work: Work, tasks: Mapping[str, Any], folder: Path, *, desc: str, sizes: Mapping[str, int] | None = None
    ) -> Mapping[str, Facts]: ...

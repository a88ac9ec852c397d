"""Actors that give way before each call on a file, and a scheduler that lets them go on in a given order."""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from greenlet import getcurrent, greenlet

from athanor.base.errors import AthanorError

NAMES = "open stat mkdir rename replace unlink rmdir scandir link utime".split()
MAX_STEPS = 5000  # of one schedule; more is an endless loop
FLOCK, MONOTONIC = fcntl.flock, time.monotonic


class Actor(greenlet):
    """A process: what it does, and what it waits for."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(self._act)
        self.name, self.work = name, work
        self.blocked: tuple[int, int] | None = None  # handle and operation of a lock that it waits for
        self.pauses = False
        self.error: BaseException | None = None

    def _act(self) -> None:
        try:
            self.work()
        except AthanorError:
            pass  # told in one line, as it should be
        except BaseException as error:
            self.error = error

    def ready(self) -> bool:
        if self.blocked is None:
            return True
        handle, operation = self.blocked
        try:
            FLOCK(handle, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        FLOCK(handle, fcntl.LOCK_UN)
        return True


@dataclass
class World:
    """One schedule: a folder, the actors in it, and what went wrong."""

    root: Path
    prefix: list[int]
    actors: list[Actor] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    inside: Counter[str] = field(default_factory=Counter)
    # Of each decision: the ready actors, the chosen one, and the one that would have gone on.
    decisions: list[tuple[list[int], int, int | None]] = field(default_factory=list)
    asleep: float = 0.0

    def add(self, name: str, work: Callable[[], None]) -> None:
        self.actors.append(Actor(name, work))

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """A place for one at a time."""
        self.inside[what] += 1
        if self.inside[what] > 1:
            self.problems.append(f"two at once: {what}")
        try:
            yield
        finally:
            self.inside[what] -= 1

    def check(self, fine: bool, problem: str) -> None:
        if not fine:
            self.problems.append(problem)

    def run(self) -> None:
        current: int | None = None
        for _ in range(MAX_STEPS):
            ready = [n for n, actor in enumerate(self.actors) if not actor.dead and actor.ready()]
            if not ready:
                break
            goes_on = current if current in ready else None
            if goes_on is not None and self.actors[goes_on].pauses:  # the next one, or polling would never end
                goes_on = next((n for n in ready if n > goes_on), ready[0])
            chosen = ready[0] if goes_on is None else goes_on
            if len(ready) > 1:
                if len(self.decisions) < len(self.prefix):
                    chosen = self.prefix[len(self.decisions)]
                self.decisions.append((ready, chosen, goes_on))
            current, actor = chosen, self.actors[chosen]
            actor.blocked, actor.pauses = None, False
            actor.switch()
        left = [actor.name for actor in self.actors if not actor.dead]
        self.check(not left, f"deadlock or endless loop: {', '.join(left)}")
        for actor in self.actors:
            self.check(actor.error is None, f"{actor.name}: {actor.error!r}".replace(str(self.root), ""))

    def alternatives(self, preemptions: int) -> Iterator[list[int]]:
        """The schedules that differ from this one first at a decision that its prefix did not make."""
        spent, taken = 0, []
        for number, (ready, chosen, goes_on) in enumerate(self.decisions):
            if number >= len(self.prefix):
                for other in ready:
                    if other != chosen and spent + (goes_on is not None and other != goes_on) <= preemptions:
                        yield [*taken, other]
            spent += goes_on is not None and chosen != goes_on
            taken.append(chosen)


# -- what makes actors stop -----------------------------------------------------


@contextmanager
def watched(world: World) -> Iterator[None]:
    """Before each call on a file below the world's root, whoever makes it gives way to the scheduler."""
    root = str(world.root)

    def give_way() -> None:
        me = getcurrent()
        if isinstance(me, Actor):
            me.parent.switch()

    def stops(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **more: Any) -> Any:
            if words and not isinstance(words[0], int) and str(words[0]).startswith(root):
                give_way()
            return real(*words, **more)

        return call

    def flock(file: Any, operation: int) -> None:
        handle = file if isinstance(file, int) else file.fileno()
        give_way()
        while not operation & (fcntl.LOCK_NB | fcntl.LOCK_UN):
            try:
                return FLOCK(handle, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                getcurrent().blocked = handle, operation
                give_way()
        FLOCK(handle, operation)

    def sleep(seconds: float) -> None:
        me = getcurrent()
        if isinstance(me, Actor):
            world.asleep += seconds
            me.pauses = True
            give_way()

    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(mock.patch.object(os, name, stops(getattr(os, name))))
        opened = stops(io.open)
        for module in (io, builtins):
            stack.enter_context(mock.patch.object(module, "open", opened))
        stack.enter_context(mock.patch.object(fcntl, "flock", flock))
        stack.enter_context(mock.patch.object(time, "sleep", sleep))
        stack.enter_context(mock.patch.object(time, "monotonic", lambda: MONOTONIC() + world.asleep))
        stack.enter_context(mock.patch.object(os, "fsync", lambda handle: None))
        yield

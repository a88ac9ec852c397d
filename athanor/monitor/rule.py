"""The form of a rule: inputs it needs, state it keeps, a verdict on each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from athanor.monitor.setup import Shared
from athanor.monitor.statistics import Alarm

Row = Mapping[str, float]


class Verdict(NamedTuple):
    """A bad reading. `at_once`: bad enough to be told without seeing it again."""

    level: int
    value: float
    threshold: float
    diagnosis: str
    fix: str
    at_once: bool = False


NO_READING = Verdict(0, 0.0, 0.0, "", "")  # a step inside a window: neither good nor bad


class Rule:
    """A rule is asked at each step that has all its `inputs`, and sleeps at others.

    Its state depends on the rows it saw and on nothing else, so a live run and
    its journal give the same findings.
    """

    inputs: ClassVar[tuple[str, ...]]
    phases: ClassVar[tuple[str, ...]] = ("pretrain", "sft")
    finite: ClassVar[bool] = True  # sleeps at steps where an input is not a finite number

    def __init__(self, shared: Shared) -> None:
        self.shared, self.limits, self.phase = shared, shared.limits, shared.plan.phase
        self.alarm = self.make_alarm()

    def make_alarm(self) -> Alarm:
        return self.alarm_of()

    def alarm_of(self, need: int = 1, of: int = 1) -> Alarm:
        """An alarm that rests for a share of the run: what lasts is told once, what comes back is told again."""
        return Alarm(need, of, self.shared.span(0.1, 10, 100), self.shared.span(0.2, 20, 200))

    def check(self, step: int, row: Row) -> Verdict | None:
        """A verdict when the step is bad, None when it is fine or history is too short, NO_READING inside a window."""
        raise NotImplementedError

    def told(self, step: int) -> None:
        """A finding of this rule went out."""

    def resumed(self) -> None:
        """The process was killed and goes on from a checkpoint."""

"""What a rule is: the inputs it needs, the state it keeps, and a verdict on each step.

Besides the rows it knows the run's plan, its thresholds, and statistics that several rules share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from athanor.monitor.finding import CRITICAL, WARNING
from athanor.monitor.statistics import Alarm, Curve, Window
from athanor.monitor.thresholds import Thresholds

Row = Mapping[str, float]

WINDOW = 128  # steps behind the medians of loss and gradient norm
MIN_HISTORY = 20  # steps before anything is compared with them

# Phases whose loss is a cross entropy and falls as the model learns. That of grpo hovers around 0 and is often below
# it: only a loss that is no number says something there. That of dpo begins at ln 2 whatever the vocabulary is, falls
# towards 0 where pairs are learned by heart, and is mostly that of the few pairs of a batch that are wrong: its jumps
# and its level after a resume are noise. A lasting rise is none, and a loss that never changes is a fault.
CROSS_ENTROPY = ("pretrain", "sft", "tune")


@dataclass(frozen=True)
class Plan:
    """What was meant to happen. None: not known, and rules that need it sleep.

    `rate`: learning rate of the step that ends at a token position.
    """

    phase: str  # pretrain, sft, tune, grpo or dpo: also the section of params.yaml that fixes name
    rate: Callable[[int], float] | None = None
    total_steps: int | None = None
    batch_tokens: int | None = None
    peak_lr: float | None = None
    warmup_steps: int = 0
    other_data_step: int | None = None  # after it a cooldown's own mixture begins, with a loss of its own
    vocab_size: int | None = None
    memory_bytes: int | None = None  # of the machine
    precision: str | None = None


@dataclass
class Spike:
    """A loss spike that has not ended: its first step, the series of losses it is in, and the latest losses.

    `base` is the median loss before it, `sigma` the noise of the loss's logarithm.
    """

    step: int
    name: str
    base: float
    sigma: float
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=5))


def losses_of(row: Mapping[str, float]) -> list[str]:
    """The names of a step's losses: `loss` of the whole batch, and one for each of its sources where they are known."""
    return [name for name in row if name == "loss" or name.startswith("loss.")]


class Shared:
    """Statistics of the steps before the current one, and what one rule leaves for another."""

    def __init__(self, plan: Plan, thresholds: Thresholds) -> None:
        self.plan, self.limits = plan, thresholds
        # A long window in a short run would take the fall of the loss for noise.
        self.loss = Window(self.span(0.1, 40, WINDOW))
        # Natural logarithms of each series that `losses_of` a row names.
        self.log_losses: dict[str, Window] = {}
        self.log_norm = Window(self.span(0.1, 40, WINDOW))  # natural logarithms: gradient norms are about log-normal
        self.curve = Curve()
        self.spike: Spike | None = None
        self.speed: float | None = None  # tokens per second of the last step that had it
        self.judging_resume = False  # the first steps after a resume belong to its rules
        self.rebased = 0  # how often the level of the loss was accepted as a new one

    def span(self, share: float, low: int, high: int) -> int:
        """A number of steps: a share of the run between two bounds, the upper one when its length is not known."""
        total = self.plan.total_steps
        return high if total is None else max(low, min(high, int(total * share)))

    @property
    def seconds_per_step(self) -> float | None:
        batch = self.plan.batch_tokens
        return batch / self.speed if batch and self.speed else None

    def rebase(self) -> None:
        """Take the level of the loss from here on as the normal one."""
        self.loss.clear()
        self.log_losses.clear()
        self.spike = None
        self.rebased += 1


class Verdict(NamedTuple):
    """A bad reading. `at_once`: bad enough for an alarm without a second one."""

    level: int
    value: float
    threshold: float
    diagnosis: str
    fix: str
    at_once: bool = False


NO_READING = Verdict(0, 0.0, 0.0, "", "")  # a step inside a window: neither good nor bad


class Rule:
    """A rule looks at each step that has all its `inputs`, and skips the others.

    Its state depends on the rows it saw and on nothing else, so a live run and
    its journal give the same findings.
    """

    inputs: ClassVar[tuple[str, ...]]
    phases: ClassVar[tuple[str, ...]] = ("pretrain", "sft", "tune", "grpo", "dpo")
    finite: ClassVar[bool] = True  # sleeps at steps where an input is not a finite number
    agreed: ClassVar[tuple[int, int]] = (1, 1)  # so many of so many readings raise the alarm

    def __init__(self, shared: Shared) -> None:
        self.shared, self.limits, self.phase = shared, shared.limits, shared.plan.phase
        self.precision_key = f"{self.phase if self.phase in ('pretrain', 'sft') else 'side'}.precision"
        # After an alarm it is silent for a share of the run: what lasts is reported once, what comes back again.
        self.alarm = Alarm(*self.agreed, shared.span(0.1, 10, 100), shared.span(0.2, 20, 200))
        self.begin()

    def begin(self) -> None:
        """Make the state that the rule keeps."""

    def level(self, name: str, value: float, below: bool = False) -> tuple[int, float]:
        """The level of a value by the thresholds of this name, and the one that it broke; level 0 for none."""
        for level, suffix in ((CRITICAL, "critical"), (WARNING, "warning")):
            limit = getattr(self.limits, f"{name}_{suffix}")
            if value < limit if below else value > limit:
                return level, limit
        return 0, 0.0

    def check(self, step: int, row: Row) -> Verdict | None:
        """A verdict when the step is bad, None when it is fine or history is too short, NO_READING inside a window."""
        raise NotImplementedError

    def on_finding(self, step: int) -> None:
        """Called after a finding of this rule was reported."""

    def resumed(self) -> None:
        """The process was killed and goes on from a checkpoint."""

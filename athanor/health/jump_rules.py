"""Rules about jumps of the loss: spikes, what became of them, and what a resume did to it."""

from __future__ import annotations

import math

from athanor.health.finding import CRITICAL, INFO, WARNING
from athanor.health.rule import Row, Rule, Verdict
from athanor.health.setup import MIN_HISTORY, Shared, Spike
from athanor.health.statistics import MEDIAN_ERROR, Alarm, Window, median


class LossSpike(Rule):
    """A sudden jump: far outside the noise and by a tenth, in two of three steps, or to twice the median in one."""

    inputs = ("loss",)

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.before = (0.0, 0.0)  # median and sigma when the jump began
        self.quiet = self.alarm.of

    def make_alarm(self) -> Alarm:
        return self.alarm_of(2, 3)

    def check(self, step: int, row: Row) -> Verdict | None:
        history, loss = self.shared.loss, row["loss"]
        self.quiet += 1
        # A step that was refused taught the model nothing.
        if len(history) < MIN_HISTORY or self.shared.judging_resume or row.get("skipped"):
            return None
        spike = self.shared.spike
        middle = spike.base if spike else history.median
        if loss <= middle * (1 + self.limits.spike_rise):
            return None
        sigma = spike.sigma if spike else history.sigma
        z = (loss - middle) / max(sigma, 1e-9 * middle, 1e-12)
        if z <= self.limits.spike_sigma:
            return None
        if self.quiet >= self.alarm.of:
            self.before = middle, sigma
        self.quiet = 0
        rise = loss / max(middle, 1e-12)
        critical, single = rise > self.limits.spike_critical, rise > self.limits.spike_single
        # A hard batch of conversations reaches 6 sigma and three times the median by itself.
        single = single and z > self.limits.spike_single_sigma
        limit = self.limits.spike_critical if critical else 1 + self.limits.spike_rise
        limit = self.limits.spike_single if single else limit
        text = f"The loss jumped to {loss:.3f}, {rise:.2f} times the median {middle:.3f} ({z:.0f} sigma)."
        fix = f"wait whether it recovers; {self.phase}.lr 2-5 times lower or {self.phase}.grad_clip "
        fix += "0.5 if it comes again."
        return Verdict(CRITICAL if critical else WARNING, rise, limit, text, fix, at_once=single)

    def told(self, step: int) -> None:
        """A finding went out: the episode begins that SpikeRecovery closes."""
        if self.shared.spike is None:
            self.shared.spike = Spike(step, *self.before)


class SpikeRecovery(Rule):
    """What became of a spike: back soon (information), late (warning), or never (critical)."""

    inputs = ("loss",)

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.fast, self.never = shared.span(0.05, 10, 50), shared.span(0.3, 60, 500)
        self.alarm = Alarm(calm=1, cooldown=0)  # one verdict ends an episode; each episode has its own

    def check(self, step: int, row: Row) -> Verdict | None:
        spike = self.shared.spike
        if spike is None or step <= spike.step:
            return None
        spike.recent.append(row["loss"])
        level_now, took = median(spike.recent), step - spike.step
        if len(spike.recent) > 2 and level_now <= 1.01 * spike.base + 0.5 * spike.sigma:
            self.shared.spike = None
            level, limit = (INFO, float(self.fast)) if took <= self.fast else (WARNING, float(self.fast))
            slow = "" if level == INFO else " slowly"
            text = f"The loss recovered{slow} from the spike at step {spike.step}: back at "
            text += f"{level_now:.3f} after {took} steps."
            fix = "nothing." if level == INFO else f"{self.phase}.lr lower if spikes come again; look "
            fix += "at the data around it."
            return Verdict(level, took, limit, text, fix)
        if took <= self.never:
            return None
        text = f"The loss did not recover from the spike at step {spike.step}: {level_now:.3f} after {took} steps, "
        text += f"{spike.base:.3f} before it."
        fix = f"start anew with {self.phase}.lr at half and {self.phase}.grad_clip 0.5; precision fp32 if it was fp16."
        self.shared.rebase()
        return Verdict(CRITICAL, took, float(self.never), text, fix)


class ResumeSpike(Rule):
    """The loss after a resume is higher than before it: something was not restored."""

    inputs = ("loss",)

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.need = shared.span(0.05, 10, 50)
        self.alarm.calm = self.alarm.cooldown = 0  # each resume is judged once
        self.after: list[float] = []
        self.before = self.sigma = 0.0
        self.n = 0

    def resumed(self) -> None:
        history = self.shared.loss
        self.shared.judging_resume = len(history) >= MIN_HISTORY
        self.after = []
        if self.shared.judging_resume:
            self.before, self.sigma, self.n = history.median, history.sigma, len(history)

    def check(self, step: int, row: Row) -> Verdict | None:
        if not self.shared.judging_resume:
            return None
        self.after.append(row["loss"])
        if len(self.after) < self.need:
            return None
        self.shared.judging_resume = False
        now, before = median(self.after), self.before
        error = MEDIAN_ERROR * max(self.sigma, 1e-9) * math.sqrt(1 / self.need + 1 / self.n)
        z = (now - before) / error
        if z <= self.limits.resume_warning or now <= before * (1 + self.limits.resume_change):
            return None
        self.shared.rebase()
        critical = z > self.limits.resume_critical
        limit = self.limits.resume_critical if critical else self.limits.resume_warning
        text = f"After the resume the median loss of {self.need} steps is {now:.3f}, {before:.3f} before it "
        text += f"({z:.0f} standard errors)."
        fix = f"the checkpoint may not fit: run athanor drill --stages {self.phase}; athanor slots shows what is kept."
        return Verdict(CRITICAL if critical else WARNING, z, limit, text, fix)


class ResumeUnderReport(Rule):
    """The loss is too low after a resume and steps up later: the same data came again in between."""

    inputs = ("loss",)

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.need, self.until = shared.span(0.05, 10, 50), shared.span(0.5, 100, 1000)
        self.recent = Window(self.need)
        self.lowest: float | None = None
        self.expected = self.error = 0.0
        self.open, self.seen = False, 0

    def resumed(self) -> None:
        history = self.shared.loss
        self.open, self.seen, self.lowest = len(history) >= MIN_HISTORY, 0, None
        self.recent.clear()
        if self.open:
            # Where the loss was going, from the two halves of the window; a fall that goes on is no surprise.
            values = list(history.values)
            half = len(values) // 2
            fall = max(0.0, median(values[:half]) - median(values[half:]))
            self.expected = median(values[half:]) - fall
            self.error = MEDIAN_ERROR * max(history.sigma, 1e-9) * math.sqrt(1 / self.need + 2 / len(values))

    def check(self, step: int, row: Row) -> Verdict | None:
        if not self.open:
            return None
        self.seen += 1
        self.recent.add(row["loss"])
        self.open = self.seen < self.until
        if len(self.recent) < self.need:
            return None
        now, limit = self.recent.median, self.limits.resume_warning
        if self.lowest is None:
            self.lowest = now
            low = self.expected - now
            self.open = low > limit * self.error and low > self.limits.resume_change * self.expected
            return None
        self.lowest = min(self.lowest, now)
        z = (now - self.lowest) / self.error
        if z <= limit or now <= self.lowest * (1 + self.limits.resume_change):
            return None
        self.open = False
        self.shared.rebase()
        text = f"After the resume the loss was {self.lowest:.3f} where {self.expected:.3f} was due, and stepped up to "
        text += f"{now:.3f}: the same data came twice."
        fix = f"do not trust the curve between; run athanor drill --stages {self.phase}: the resumed "
        fix += "run must equal a whole one."
        return Verdict(WARNING, z, limit, text, fix)


RULES = {
    "resume_spike": ResumeSpike,  # first: it decides whether a jump is a resume's
    "resume_under_report": ResumeUnderReport,
    "loss_spike": LossSpike,
    "spike_recovery": SpikeRecovery,
}

"""Rules about jumps of the loss: spikes, what became of them, and what a resume did to it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from athanor.monitor.finding import CRITICAL, INFO, WARNING
from athanor.monitor.rule import CROSS_ENTROPY, MIN_HISTORY, NO_READING, Row, Rule, Spike, Verdict, losses_of
from athanor.monitor.statistics import MEDIAN_ERROR, Window, median


class LossSpike(Rule):
    """A sudden jump: far outside the noise and by a tenth, in two of three steps, or to twice the median in one.

    Judged by the logarithm, and each source of data by itself where the losses of sources are known: in
    fine-tuning the loss of a batch is mostly a matter of what is in it, 0.01 for answers known by heart and 3
    for text. Of such a run the total is judged only while it is steadier than any source, as in pretraining.
    """

    inputs = ("loss",)
    phases = CROSS_ENTROPY

    def begin(self) -> None:
        self.jumps: dict[str, _Jump] = {}
        self.worst: _Jump | None = None

    def check(self, step: int, row: Row) -> Verdict | None:
        # A step that was refused taught the model nothing.
        if self.shared.judging_resume or row.get("skipped"):
            return None
        verdicts = []
        for name in losses_of(row):
            jump = self.jumps.setdefault(name, _Jump(name))
            if (verdict := self._judge(jump, row[name])) is not None:
                verdicts.append((verdict, jump))
        if not verdicts:
            return None
        verdict, self.worst = max(verdicts, key=lambda each: each[0][:2])
        return verdict

    def _judge(self, jump: _Jump, loss: float) -> Verdict | None:
        history, spike, limits = self.shared.log_losses.get(jump.name), self.shared.spike, self.limits
        jump.recent.append(0)
        if history is None or len(history) < MIN_HISTORY or loss <= 0:
            return None
        lasting = spike if spike is not None and spike.name == jump.name else None
        log_median = math.log(lasting.base) if lasting else history.median
        rise = math.exp(math.log(loss) - log_median)
        if rise <= 1 + limits.spike_rise:
            return None
        sigma = lasting.sigma if lasting else _scale(history)
        z = math.log(rise) / max(sigma, 1e-9)
        if z <= limits.spike_sigma or (jump.name == "loss" and not self._steadiest(history)):
            return None
        if not any(jump.recent):
            jump.before = math.exp(log_median), sigma
        critical, single = rise > limits.spike_critical, rise > limits.spike_single and z > limits.spike_single_sigma
        jump.recent[-1] = CRITICAL if critical else WARNING
        agreed_level = sorted(jump.recent)[1]  # of three readings, what two have at least
        if not (agreed_level or single):
            return None
        level = CRITICAL if single else agreed_level
        limit = (
            limits.spike_single
            if single
            else limits.spike_critical
            if agreed_level == CRITICAL
            else 1 + limits.spike_rise
        )
        suffix = "" if jump.name == "loss" else f" of {jump.name.removeprefix('loss.')}"
        text = f"The loss{suffix} jumped to {loss:.3f}, {rise:.2f} times the median {math.exp(log_median):.3f} ({z:.0f} sigma)."
        fix = f"wait whether it recovers; {self.phase}.lr 2-5 times lower or {self.phase}.grad_clip "
        fix += "0.5 if it comes again."
        return Verdict(level, rise, limit, text, fix)

    def _steadiest(self, total: Window) -> bool:
        """Whether no source's loss has less noise than the total; not before that of each source is known."""
        sources = [window for name, window in self.shared.log_losses.items() if name != "loss"]
        return all(len(window) >= MIN_HISTORY and _scale(total) <= _scale(window) for window in sources)

    def on_finding(self, step: int) -> None:
        """Begin the episode that SpikeRecovery closes."""
        if self.shared.spike is None and self.worst is not None:
            self.shared.spike = Spike(step, self.worst.name, *self.worst.before)


def _scale(history: Window) -> float:
    """The larger of the noise of all values and of the upper half: a tenth of batches unlike the others is no spike."""
    return max(history.sigma, history.sigma_above)


@dataclass
class _Jump:
    """What is known of one series of losses: the levels of its last three readings, and the median and sigma before them.

    The sigma is that of the logarithm.
    """

    name: str
    recent: deque[int] = field(default_factory=lambda: deque((0, 0, 0), maxlen=3))
    before: tuple[float, float] = (0.0, 0.0)


class SpikeRecovery(Rule):
    """What became of a spike: back soon (information), late (warning), or never (critical)."""

    inputs = ("loss",)
    phases = CROSS_ENTROPY

    def begin(self) -> None:
        self.fast_steps, self.never_steps = self.shared.span(0.05, 10, 50), self.shared.span(0.3, 60, 500)
        self.alarm.calm, self.alarm.cooldown = 1, 0  # one verdict ends an episode; each episode has its own

    def check(self, step: int, row: Row) -> Verdict | None:
        spike = self.shared.spike
        if spike is None or step <= spike.step:
            return None
        took = step - spike.step
        if spike.name not in row:
            if took > self.never_steps:  # that source does not come any more
                self.shared.spike = None
            return NO_READING
        spike.recent.append(row[spike.name])
        level_now = median(spike.recent)
        if len(spike.recent) > 2 and level_now <= 1.01 * spike.base * math.exp(0.5 * spike.sigma):
            self.shared.spike = None
            details = f"from the spike at step {spike.step}: back at {level_now:.3f} after {took} steps."
            if took <= self.fast_steps:
                return Verdict(INFO, took, float(self.fast_steps), f"The loss recovered {details}", "nothing.")
            fix = f"{self.phase}.lr lower if spikes come again; look at the data around it."
            return Verdict(WARNING, took, float(self.fast_steps), f"The loss recovered slowly {details}", fix)
        if took <= self.never_steps:
            return None
        text = f"The loss did not recover from the spike at step {spike.step}: {level_now:.3f} after {took} steps, "
        text += f"{spike.base:.3f} before it."
        fix = f"start anew with {self.phase}.lr at half and {self.phase}.grad_clip 0.5; precision fp32 if it was fp16."
        self.shared.rebase()
        return Verdict(CRITICAL, took, float(self.never_steps), text, fix)


class ResumeSpike(Rule):
    """The loss after a resume is higher than before it: something was not restored."""

    inputs = ("loss",)
    phases = CROSS_ENTROPY

    def begin(self) -> None:
        self.need = self.shared.span(0.05, 10, 50)
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
        level, limit = self.level("resume", z)
        if not level or now <= before * (1 + self.limits.resume_change):
            return None
        self.shared.rebase()
        text = f"After the resume the median loss of {self.need} steps is {now:.3f}, {before:.3f} before it "
        text += f"({z:.0f} standard errors)."
        fix = f"the checkpoint may not fit: run python -m tools.drill --stages {self.phase}; athanor slots shows what is kept."
        return Verdict(level, z, limit, text, fix)


class ResumeUnderReport(Rule):
    """The loss is too low after a resume and steps up later: the same data came again in between."""

    inputs = ("loss",)
    phases = CROSS_ENTROPY

    def begin(self) -> None:
        self.need, self.until = self.shared.span(0.05, 10, 50), self.shared.span(0.5, 100, 1000)
        self.recent = Window(self.need)
        self.lowest: float | None = None
        self.expected = self.error = 0.0
        self.is_open, self.steps_seen = False, 0

    def resumed(self) -> None:
        history = self.shared.loss
        self.is_open, self.steps_seen, self.lowest = len(history) >= MIN_HISTORY, 0, None
        self.recent.clear()
        if self.is_open:
            # Where the loss was going, from the two halves of the window; a fall that goes on is no surprise.
            values = list(history.values)
            half = len(values) // 2
            fall = max(0.0, median(values[:half]) - median(values[half:]))
            self.expected = median(values[half:]) - fall
            self.error = MEDIAN_ERROR * max(history.sigma, 1e-9) * math.sqrt(1 / self.need + 2 / len(values))

    def check(self, step: int, row: Row) -> Verdict | None:
        if not self.is_open:
            return None
        self.steps_seen += 1
        self.recent.add(row["loss"])
        self.is_open = self.steps_seen < self.until
        if len(self.recent) < self.need:
            return None
        now, limit = self.recent.median, self.limits.resume_warning
        if self.lowest is None:
            self.lowest = now
            shortfall = self.expected - now
            self.is_open = shortfall > limit * self.error and shortfall > self.limits.resume_change * self.expected
            return None
        self.lowest = min(self.lowest, now)
        z = (now - self.lowest) / self.error
        if z <= limit or now <= self.lowest * (1 + self.limits.resume_change):
            return None
        self.is_open = False
        self.shared.rebase()
        text = f"After the resume the loss was {self.lowest:.3f} where {self.expected:.3f} was due, and stepped up to "
        text += f"{now:.3f}: the same data came twice."
        fix = f"do not trust the curve between; run python -m tools.drill --stages {self.phase}: the resumed "
        fix += "run must equal a whole one."
        return Verdict(WARNING, z, limit, text, fix)


RULES = {
    "resume_spike": ResumeSpike,  # first: it decides whether a jump is a resume's
    "resume_under_report": ResumeUnderReport,
    "loss_spike": LossSpike,
    "spike_recovery": SpikeRecovery,
}

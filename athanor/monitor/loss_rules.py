"""Rules about the level of the loss, from the first step to the end."""

from __future__ import annotations

import math

from athanor.monitor.finding import CRITICAL, INFO, WARNING
from athanor.monitor.rule import CROSS_ENTROPY, NO_READING, Row, Rule, Verdict
from athanor.monitor.statistics import MEDIAN_ERROR, Window


class InitialLoss(Rule):
    """A model that knows nothing scores ln(vocabulary size)."""

    inputs = ("loss",)
    phases = CROSS_ENTROPY

    def check(self, step: int, row: Row) -> Verdict | None:
        size = self.shared.plan.vocab_size
        if step != 1 or not size:
            return None
        loss, chance = row["loss"], math.log(size)
        excess = loss / chance - 1
        if self.phase != "pretrain":
            if excess <= self.limits.initial_loss_warning:
                return None
            # No trouble: a base model of one novel, surely wrong about exercises, begins at 10. Files of other models
            # are refused by their digests.
            text = f"Fine-tuning begins with a loss of {loss:.3f}, above chance ({chance:.3f}): the base knows no such text."
            fix = "nothing if it falls; text that is more like the conversations helps."
            return Verdict(INFO, excess, self.limits.initial_loss_warning, text, fix)
        level, limit = self.level("initial_loss", abs(excess))
        if not level:
            return None
        text = f"The first loss is {loss:.3f} where a fresh model scores ln({size}) = {chance:.3f}: "
        if excess < 0:
            fix = "check the shift of the targets and the document mask."
            return Verdict(level, excess, limit, text + "the input shows the labels.", fix)
        text += "the init is too wide, or the loss is wired wrongly."
        return Verdict(level, excess, limit, text, "check the model's init and loss.")


class NotLearning(Rule):
    """Looks once, when a sound run has left chance level by far."""

    inputs = ("loss",)
    phases = ("pretrain",)

    def begin(self) -> None:
        self.check_step = self.shared.plan.warmup_steps + self.shared.span(0.2, 20, 300)
        self.start: float | None = None
        self.recent = Window(self.shared.span(0.04, 10, 50))
        self.done = False

    def check(self, step: int, row: Row) -> Verdict | None:
        if self.done:
            return None
        if self.start is None:
            size = self.shared.plan.vocab_size
            self.start = math.log(size) if size else row["loss"]
        self.recent.add(row["loss"])
        if step < self.check_step or len(self.recent) < self.recent.size:
            return None
        self.done = True
        drop = self.start - self.recent.median
        level, limit = self.level("not_learning", drop, below=True)
        if not level:
            return None
        text = f"After {step} steps the loss is {self.recent.median:.3f}, {drop:.3f} nats below "
        text += f"chance ({self.start:.3f})."
        fix = "pretrain.lr 2-5 times higher; look at data/shards with: athanor data peek."
        return Verdict(level, drop, limit, text, fix)


RESOLVED = 0.02  # of the loss: blocks whose difference is uncertain by more are not compared


class Plateau(Rule):
    """Two blocks of steps with the same mean loss, while the rate is still high. Only information."""

    inputs = ("loss", "lr")
    phases = CROSS_ENTROPY

    def begin(self) -> None:
        self.size = max(self.shared.span(0.1, 100, 1000), (self.shared.plan.total_steps or 0) // 20)
        self.alarm.calm = 1  # window
        self.block: list[float] = []
        self.before: tuple[float, float] | None = None

    def check(self, step: int, row: Row) -> Verdict | None:
        self.block.append(row["loss"])
        if len(self.block) < self.size:
            return NO_READING
        mean = sum(self.block) / self.size
        error2 = sum((loss - mean) ** 2 for loss in self.block) / self.size**2
        before, self.before, self.block = self.before, (mean, error2), []
        peak = self.shared.plan.peak_lr
        if before is None or step <= self.shared.plan.warmup_steps + 2 * self.size:
            return None
        if peak is not None and row["lr"] <= self.limits.plateau_lr_fraction * peak:
            return None
        gain = (before[0] - mean) / before[0] if before[0] else 0.0
        significant = 2 * math.sqrt(error2 + before[1])
        if gain >= self.limits.plateau_improvement or before[0] - mean >= significant:
            return None
        if significant > RESOLVED * before[0]:  # short batches of mixed questions: such means tell nothing
            return None
        text = f"The mean loss of the last {self.size} steps is {mean:.4f}, after {before[0]:.4f} of those before."
        fix = f"{self.phase}.lr 2-5 times higher or a longer warmup; a smaller {self.phase}.weight_decay; more data."
        return Verdict(INFO, gain, self.limits.plateau_improvement, text, fix)


class Divergence(Rule):
    """The median loss stays above its best without any spike, by more than noise explains."""

    inputs = ("loss",)
    phases = (*CROSS_ENTROPY, "dpo")

    def begin(self) -> None:
        self.size = self.alarm.need = self.alarm.window = self.shared.span(0.1, 20, 100)
        self.recent = Window(self.size)
        self.best: float | None = None
        self.rebased = 0

    def check(self, step: int, row: Row) -> Verdict | None:
        shared = self.shared
        if shared.rebased != self.rebased:
            self.rebased, self.best = shared.rebased, None
            self.recent.clear()
        self.recent.add(row["loss"])
        if len(self.recent) < self.size or step <= shared.plan.warmup_steps:
            return None
        now = self.recent.median
        if self.best is None or now < self.best:
            self.best = now
            return None
        rise = now / max(self.best, 1e-12)
        level, limit = self.level("divergence", rise)
        noise = MEDIAN_ERROR * self.recent.sigma / math.sqrt(self.size)
        if not level or shared.spike or shared.judging_resume or now - self.best <= 6 * noise:
            return None
        text = f"The loss drifts up: a median of {now:.3f} over {self.size} steps, {self.best:.3f} at its best."
        fix = f"{self.phase}.lr lower; precision fp32 if it is fp16; check the data that came since."
        return Verdict(level, rise, limit, text, fix)


class NanLoss(Rule):
    """A loss that is no number."""

    inputs = ("loss",)
    finite = False

    def begin(self) -> None:
        self.norm_before: float | None = None

    def check(self, step: int, row: Row) -> Verdict | None:
        loss, norm = row["loss"], self.norm_before
        self.norm_before = row.get("grad_norm")
        if math.isfinite(loss):
            return None
        text = f"The loss is {loss}"
        if norm is not None and not math.isfinite(norm):
            text += f" after a gradient norm of {norm}: the backward pass broke first."
        else:
            text += (
                ": the forward pass broke."
                if norm is None
                else f" after a gradient norm of {norm:.3g}: the forward broke."
            )
        fix = f"{self.phase}.lr lower, {self.precision_key} fp32, and look at the batch of this step."
        return Verdict(CRITICAL, loss, 0.0, text, fix)


class ZeroLoss(Rule):
    inputs = ("loss",)
    phases = CROSS_ENTROPY
    agreed = (5, 5)

    def check(self, step: int, row: Row) -> Verdict | None:
        if row["loss"] != 0:
            return None
        text = "The loss is 0 in five steps: no token is supervised, or all labels are masked."
        suspect = {"sft": "the mask in data/sft and sft_data.sources", "tune": "the labels in data/tune"}.get(
            self.phase, "the documents in data/shards"
        )
        return Verdict(CRITICAL, 0.0, 0.0, text, f"check {suspect}.")


class ConstantLoss(Rule):
    """The same loss again and again: a batch that never changes, or weights that do not."""

    inputs = ("loss",)
    phases = (*CROSS_ENTROPY, "dpo")

    def begin(self) -> None:
        self.need = self.shared.span(0.2, 10, 50)
        self.anchor, self.same_count = math.nan, 0

    def check(self, step: int, row: Row) -> Verdict | None:
        loss = row["loss"]
        if abs(loss - self.anchor) <= 1e-6 * abs(self.anchor):
            self.same_count += 1
        else:
            self.anchor, self.same_count = loss, 1
        if self.same_count < self.need or loss == 0:
            return None
        text = (
            f"The loss has been {loss:.6f} for {self.same_count} steps: a stale batch, or weights that are not updated."
        )
        return Verdict(CRITICAL, loss, 1e-6, text, f"check that {self.phase}.lr is not 0 and that the data differ.")


class Overfitting(Rule):
    """Three validations in a row went up while the training loss went down."""

    inputs = ("validation",)
    phases = CROSS_ENTROPY

    def begin(self) -> None:
        self.alarm.calm = 1
        self.scores: list[tuple[int, float]] = []
        self.best = math.inf

    def check(self, step: int, row: Row) -> Verdict | None:
        score, curve = row["validation"], self.shared.curve
        # A run that went back to a checkpoint validates again.
        self.scores = [*[earlier for earlier in self.scores if earlier[0] < step][-3:], (step, score)]
        self.best = min(self.best, score)
        if len(self.scores) < 4:
            return None
        values = [value for _, value in self.scores]
        if not all(before < after for before, after in zip(values, values[1:], strict=False)):
            return None
        began, now = curve.at(self.scores[0][0]), curve.at(step)
        if began is None or now is None or now >= began or values[-1] < values[0] * (1 + self.limits.overfitting_rise):
            return None
        rise = score / self.best if self.best > 0 else math.inf
        critical = rise > self.limits.overfitting_critical
        limit = self.limits.overfitting_critical if critical else 1 + self.limits.overfitting_rise
        text = f"The validation rose three times, {values[0]:.4f} to {score:.4f}, while the training loss fell "
        text += f"from {began:.3f} to {now:.3f}; the best was {self.best:.4f}."
        if self.phase != "pretrain":
            fix = "fewer sft.epochs, a larger sft.weight_decay, or more conversations."
        else:
            fix = "fewer pretrain.tokens or more data (mixture), a larger pretrain.weight_decay."
        return Verdict(CRITICAL if critical else WARNING, rise, limit, text, fix)


RULES = {
    "initial_loss": InitialLoss,
    "not_learning": NotLearning,
    "nan_loss": NanLoss,
    "zero_loss": ZeroLoss,
    "constant_loss": ConstantLoss,
    "divergence": Divergence,
    "plateau": Plateau,
    "overfitting": Overfitting,
}

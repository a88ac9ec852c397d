"""Rules about gradients and numbers: their norm before clipping, steps that were skipped, the loss scale, vitals."""

from __future__ import annotations

import math
from collections import deque

from athanor.monitor.finding import CRITICAL, INFO, WARNING
from athanor.monitor.rule import CROSS_ENTROPY, MIN_HISTORY, NO_READING, Row, Rule, Verdict

SKIP_WINDOW = 1000
EXPONENTS = {"fp16": 16, "bf16": 128, "fp32": 128}  # two to their power is no number of the format any more
MIN_SHARE_STEPS = 200  # below, a share of skipped steps means little


class _Skips:
    """Steps that were not taken, among the last 1000 and in a row."""

    def __init__(self) -> None:
        self.flags: deque[bool] = deque(maxlen=SKIP_WINDOW)
        self.count = self.consecutive = 0

    def see(self, skipped: bool) -> None:
        if len(self.flags) == SKIP_WINDOW:
            self.count -= self.flags[0]
        self.flags.append(skipped)
        self.count += skipped
        self.consecutive = self.consecutive + 1 if skipped else 0

    @property
    def share(self) -> float:
        return self.count / len(self.flags) if len(self.flags) >= MIN_SHARE_STEPS else 0.0


class SkippedSteps(Rule):
    """A gradient that is not finite. Not in fp16, whose loss scale probes the range by skipping steps."""

    inputs = ("loss", "grad_norm")
    finite = False

    def begin(self) -> None:
        self.skips = _Skips()

    def check(self, step: int, row: Row) -> Verdict | None:
        if "loss_scale" in row or self.shared.plan.precision == "fp16":  # a replayed step has lost its scale
            return None
        norm, broken = row["grad_norm"], not math.isfinite(row["grad_norm"])
        self.skips.see(broken)
        if not broken or not math.isfinite(row["loss"]):  # a broken loss is nan_loss's
            return None
        is_frequent = self.skips.count >= 3 and self.skips.share > self.limits.skipped_critical
        critical = self.skips.consecutive >= 3 or is_frequent
        limit = self.limits.skipped_critical if is_frequent else 3.0 if critical else 1.0
        text = f"The gradient norm is {norm} with a finite loss of {row['loss']:.3f}; the step was skipped"
        text += f", {self.skips.consecutive} in a row, {self.skips.count} of the last {len(self.skips.flags)}."
        fix = f"{self.phase}.lr lower or {self.phase}.grad_clip smaller; {self.precision_key} fp32 "
        fix += "finds out whether it is range."
        return Verdict(CRITICAL if critical else WARNING, norm, limit, text, fix)


class RefusedSteps(Rule):
    """Steps that the spike guard refused to learn from, although their numbers are finite. A few of them are normal."""

    inputs = ("loss", "grad_norm", "skipped")

    def begin(self) -> None:
        self.skips = _Skips()

    def check(self, step: int, row: Row) -> Verdict | None:
        refused = row["skipped"] > 0
        self.skips.see(refused)
        if not refused:
            return None
        too_many = self.skips.consecutive >= 5 or (
            self.skips.count >= 3 and self.skips.share > self.limits.refused_warning
        )
        text = f"The step was refused: a loss of {row['loss']:.3f} and a gradient norm of {row['grad_norm']:.3g}; "
        text += f"{self.skips.consecutive} in a row, {self.skips.count} of the last {len(self.skips.flags)}."
        fix = f"{self.phase}.lr lower, and look at the data of these steps."
        fix = fix if too_many else "nothing, as long as it is rare."
        limit = self.limits.refused_warning if too_many else 1.0
        return Verdict(WARNING if too_many else INFO, float(self.skips.count), limit, text, fix)


class LossScale(Rule):
    """fp16 only: the range is exhausted when the scale falls below 1, or when steps are skipped all the time."""

    inputs = ("loss_scale",)
    finite = False

    def begin(self) -> None:
        self.skips = _Skips()
        # A loss scale begins high and falls until it fits.
        self.rows, self.settling_steps = 0, self.shared.span(0.05, 10, 100)

    def check(self, step: int, row: Row) -> Verdict | None:
        scale, self.rows = row["loss_scale"], self.rows + 1
        fix = f"{self.precision_key} bf16 or fp32, or {self.phase}.lr lower."
        if self.rows > self.settling_steps:
            self.skips.see(not math.isfinite(row.get("grad_norm", math.inf if row.get("skipped") else 0.0)))
        if scale < self.limits.scale_low:
            text = f"The loss scale fell to {scale:g}: fp16 has no range left for these gradients."
            return Verdict(CRITICAL, scale, self.limits.scale_low, text, fix)
        if self.skips.consecutive >= 5:
            text = f"{self.skips.consecutive} steps in a row were skipped at a loss scale of {scale:g}."
            return Verdict(CRITICAL, float(self.skips.consecutive), 5.0, text, fix)
        if self.skips.count >= 3 and self.skips.share > self.limits.scale_skipped:
            text = f"{self.skips.share:.1%} of the last {len(self.skips.flags)} steps were skipped at a "
            text += f"loss scale of {scale:g}."
            return Verdict(WARNING, self.skips.share, self.limits.scale_skipped, text, fix)
        return None


class GradientSpike(Rule):
    """The gradient norm rises suddenly; judged by its logarithm."""

    inputs = ("grad_norm",)
    phases = (*CROSS_ENTROPY, "dpo")  # policy_gradient knows that of grpo

    def check(self, step: int, row: Row) -> Verdict | None:
        norm, history = row["grad_norm"], self.shared.log_norm
        if norm <= 0 or len(history) < MIN_HISTORY or row.get("skipped"):
            return None
        median = math.exp(history.median)
        times, limits = norm / median, self.limits
        huge = self.phase != "pretrain" and norm > limits.gradient_absolute
        if times <= limits.gradient_rise and not huge:
            return None
        z = (math.log(norm) - history.median) / max(history.sigma, 0.01)
        far = z > limits.gradient_sigma, times > limits.gradient_warning
        # Late in dpo most batches have a norm near 0, and one with a wrong pair tens of times that: both must hold.
        if not (all(far) if self.phase == "dpo" else any(far)) and not huge:
            return None
        critical = times > limits.gradient_critical or huge
        text = f"The gradient norm burst to {norm:.3g}, {times:.1f} times the median {median:.3g} "
        text += f"({z:.0f} sigma of its logarithm)."
        fix = f"{self.phase}.grad_clip 0.5 or 0.3, {self.phase}.lr lower; a loss spike often follows."
        limit = limits.gradient_critical if critical else limits.gradient_warning
        return Verdict(CRITICAL if critical else WARNING, times, limit, text, fix)


class GradientBand(Rule):
    """A norm that stays outside what is usual."""

    inputs = ("grad_norm",)
    phases = CROSS_ENTROPY  # that of grpo and dpo is near 0 where groups tie and where pairs are learned

    def begin(self) -> None:
        self.need = self.shared.log_norm.size

    def check(self, step: int, row: Row) -> Verdict | None:
        # Norms near zero have a rule of their own.
        if len(self.shared.log_norm) < self.need or row["grad_norm"] < self.limits.vanishing_norm:
            return NO_READING
        median = math.exp(self.shared.log_norm.median)
        low, high = self.limits.gradient_low, self.limits.gradient_high
        if low <= median <= high:
            return None
        text = f"The median gradient norm of {len(self.shared.log_norm)} steps is {median:.3g}, "
        text += f"outside {low:g} to {high:g}."
        if median > high:
            fix = f"{self.phase}.lr lower; {self.phase}.grad_clip hides the real norm."
            return Verdict(WARNING, median, high, text, fix)
        return Verdict(WARNING, median, low, text, "look for weights that get no gradient, or a loss divided twice.")


class VanishingGradient(Rule):
    inputs = ("grad_norm",)

    def begin(self) -> None:
        self.need, self.zeros_needed = self.shared.span(0.1, 10, 20), self.shared.span(0.1, 5, 10)
        self.low_steps = self.zero_steps = 0

    def check(self, step: int, row: Row) -> Verdict | None:
        if row.get("policy.tied_groups") == 1:  # nothing to learn from: told by tied_groups
            return NO_READING
        norm = row["grad_norm"]
        self.low_steps = self.low_steps + 1 if norm < self.limits.vanishing_norm else 0
        self.zero_steps = self.zero_steps + 1 if norm == 0 else 0
        fix = "check the mask of the targets, detached tensors and requires_grad."
        if self.zero_steps >= self.zeros_needed:
            text = f"The gradient norm is exactly 0 for {self.zero_steps} steps: no signal reaches the weights."
            return Verdict(CRITICAL, 0.0, self.limits.vanishing_norm, text, fix)
        if self.low_steps >= self.need:
            text = (
                f"The gradient norm is {norm:.1e}, for {self.low_steps} steps: hardly any signal reaches the weights."
            )
            return Verdict(WARNING, norm, self.limits.vanishing_norm, text, fix)
        return None


class OverflowAhead(Rule):
    """What a block computes comes near the largest number of the format, or grows so fast that it soon will."""

    inputs = ("vitals.largest", "vitals.largest_block")

    def begin(self) -> None:
        self.exponent = EXPONENTS.get(self.shared.plan.precision or "")
        self.readings: deque[tuple[int, float]] = deque(maxlen=3)  # step, and logarithm to base 2

    def check(self, step: int, row: Row) -> Verdict | None:
        value, block = row["vitals.largest"], int(row["vitals.largest_block"])
        if self.exponent is None or value <= 0:
            return None
        while self.readings and self.readings[-1][0] >= step:  # the run went back to a checkpoint
            self.readings.pop()
        self.readings.append((step, math.log2(value)))
        headroom, growth = self.exponent - self.readings[-1][1], self._growth()
        level, limit = self.level("headroom", headroom, below=True)
        text = f"Block {block} computes numbers up to {value:,.0f}, {headroom:.1f} powers of two below the largest of "
        text += f"{self.shared.plan.precision}"
        text += f"; at their growth they reach it in about {headroom / growth:.0f} steps." if growth > 0 else "."
        fix = f"{self.precision_key} bf16 or fp32, or {self.phase}.lr lower; model.qk_norm true for a new run."
        if level:
            return Verdict(level, headroom, limit, text, fix)
        # Early in a run numbers grow fast and are far from the end.
        near = headroom < 2 * self.limits.headroom_warning
        if near and growth > 0 and headroom / growth < self.limits.overflow_steps:
            return Verdict(WARNING, headroom / growth, self.limits.overflow_steps, text, fix)
        return None

    def _growth(self) -> float:
        """Powers of two per step: the smaller of the last two rises, because one reading may be far out; 0 before."""
        if len(self.readings) < 3:
            return 0.0
        steps, sizes = zip(*self.readings, strict=True)
        return min((sizes[i + 1] - sizes[i]) / (steps[i + 1] - steps[i]) for i in (0, 1))


class GradientUnderflow(Rule):
    """fp16 only: most of a block's gradients are zero or have lost digits, because they are too small for the format."""

    inputs = ("vitals.gradient_tiny", "vitals.gradient_tiny_block")
    agreed = (2, 3)

    def check(self, step: int, row: Row) -> Verdict | None:
        share, limit = row["vitals.gradient_tiny"], self.limits.gradient_tiny
        if self.shared.plan.precision != "fp16" or share <= limit:
            return None
        scale = f" at a loss scale of {row['loss_scale']:g}" if "loss_scale" in row else ""
        text = (
            f"{share:.0%} of the gradients of block {int(row['vitals.gradient_tiny_block'])} are zero or subnormal in"
        )
        return Verdict(WARNING, share, limit, f"{text} fp16{scale}.", f"{self.precision_key} bf16 or fp32.")


class AttentionLogits(Rule):
    """Logits of the attention that are large, or twice as large as before (Dehghani et al. 2023, arXiv:2302.05442)."""

    inputs = ("vitals.attention_logit_max",)
    agreed = (2, 3)

    def begin(self) -> None:
        self.span_steps = self.shared.span(0.2, 20, 1000)
        self.readings: deque[tuple[int, float]] = deque()

    def check(self, step: int, row: Row) -> Verdict | None:
        value, limit = row["vitals.attention_logit_max"], self.limits.attention_logits
        while self.readings and self.readings[-1][0] >= step:  # the run went back to a checkpoint
            self.readings.pop()
        self.readings.append((step, value))
        while self.readings[0][0] < step - self.span_steps:
            self.readings.popleft()
        began, before = self.readings[0]
        fix = "model.qk_norm true, or a lower lr; with fp16 the softmax overflows next."
        if value > limit:
            return Verdict(WARNING, value, limit, f"The largest attention logit is {value:.1f}.", fix)
        if value > limit / 2 and value > 2 * before:
            text = f"The largest attention logit grew from {before:.1f} at step {began} to {value:.1f}."
            return Verdict(WARNING, value, 2 * before, text, fix)
        return None


class _Vital(Rule):
    """One number of the model that should stay below a line; two of three readings decide."""

    limit: str
    text: str
    fix: str
    agreed = (2, 3)

    def check(self, step: int, row: Row) -> Verdict | None:
        value, limit = row[self.inputs[0]], getattr(self.limits, self.limit)
        if value <= limit:
            return None
        text = f"{self.text} is {value:.2f}, above {limit:g}."
        return Verdict(WARNING, value, limit, text, self.fix.format(phase=self.phase))


class EmbeddingSpread(_Vital):
    """The spread is above the line, and a fifth more than in the weights that the run began with.

    It is that of the output matrix, which may be the embedding: rows of ids that
    pretraining never showed are pushed away in every step. The 209 of a tied run
    end at 2.3 to 2.55 times the median norm, while ids seen a hundred times are
    near 1.3. Those of the chat template are among them and in every batch of
    fine-tuning, which begins with that spread and does not make it.
    """

    first_readings = 5  # the largest of them: batches differ in how many such ids they have
    growth = 1.2

    inputs = ("vitals.embedding_spread",)
    phases = CROSS_ENTROPY  # what it advises, a z_loss, is of cross entropy
    limit = "embedding_spread"
    text = "The spread of the output matrix's row norms"
    fix = "{phase}.lr lower or {phase}.z_loss 1e-4; a smaller tokenizer.vocab_size if many tokens are rare."

    def begin(self) -> None:
        self.first_values: list[float] = []

    def check(self, step: int, row: Row) -> Verdict | None:
        value, limit = row[self.inputs[0]], self.limits.embedding_spread
        if len(self.first_values) < self.first_readings:
            self.first_values.append(min(value, 2 * limit))  # a run that begins still higher is not normal either
        return super().check(step, row) if value > self.growth * max(self.first_values) else None


class FinalNormGain(_Vital):
    inputs = ("vitals.final_norm_gain",)
    phases = CROSS_ENTROPY
    limit = "final_norm_gain"
    text = "The gain of the final norm"
    fix = "{phase}.z_loss 1e-4 or {phase}.lr lower: the logits grow by way of this gain."


RULES = {
    "skipped_steps": SkippedSteps,
    "refused_steps": RefusedSteps,
    "loss_scale": LossScale,
    "gradient_spike": GradientSpike,
    "gradient_band": GradientBand,
    "vanishing_gradient": VanishingGradient,
    "overflow_ahead": OverflowAhead,
    "gradient_underflow": GradientUnderflow,
    "attention_logits": AttentionLogits,
    "embedding_spread": EmbeddingSpread,
    "final_norm_gain": FinalNormGain,
}

"""Rules about training after fine-tuning: GRPO, which draws answers and rewards them, and DPO, which compares pairs.

Most are one class: the median of a column over the last steps against two lines. A median, because a step draws a
few dozen answers or pairs, and what a single step says of them is noise.
"""

from __future__ import annotations

import math
from typing import ClassVar

from athanor.monitor.finding import CRITICAL, WARNING
from athanor.monitor.rule import NO_READING, Row, Rule, Verdict
from athanor.monitor.statistics import MEDIAN_ERROR, Window


class _Level(Rule):
    """The median of the first input, against the thresholds `line`_warning and `line`_critical.

    `of_start` names a threshold: so many times its start the median must have passed as well.
    `silent_at`: an input and the value of it at which a step says nothing.
    `text` may have the words now, start and size.
    """

    phases = ("grpo",)
    line: ClassVar[str]
    text: ClassVar[str]
    fix: ClassVar[str]
    below: ClassVar[bool] = False
    of_start: ClassVar[str | None] = None
    silent_at: ClassVar[tuple[str, float] | None] = None

    def begin(self) -> None:
        self.recent = Window(self.shared.span(0.1, 10, 20))
        self.start = math.nan

    def check(self, step: int, row: Row) -> Verdict | None:
        if self.silent_at is not None and row[self.silent_at[0]] == self.silent_at[1]:
            return NO_READING
        self.recent.add(row[self.inputs[0]])
        if len(self.recent) < self.recent.size:
            return NO_READING
        now = self.recent.median
        if math.isnan(self.start):
            self.start = now
        level, limit = self.judge(now)
        if not level:
            return None
        text = self.text.format(now=now, start=self.start, size=self.recent.size)
        return Verdict(level, now, limit, text, self.fix)

    def judge(self, now: float) -> tuple[int, float]:
        """The level of the median, and the threshold that it broke."""
        level, limit = self.level(self.line, now, self.below)
        if level and self.of_start is not None:
            edge = getattr(self.limits, self.of_start) * self.start
            level = level if (now < edge if self.below else now > edge) else 0
        return level, limit


class RewardFlat(_Level):
    inputs = ("policy.reward",)
    text = "The reward has been 0 for {size} steps: no answer is ever right, or the reward cannot read the answers."
    fix = "easier grpo_data.categories or a larger grpo.max_new_tokens; read some answers beside what was expected."

    def judge(self, now: float) -> tuple[int, float]:
        return (0 if any(self.recent.values) else CRITICAL), 0.0


class RewardFall(_Level):
    """The reward is clearly below its start. One that only does not rise may have reached what the model can do."""

    inputs = ("policy.reward",)
    text = "The reward fell from {start:.3f} to {now:.3f}: training makes the answers worse."
    fix = "grpo.lr lower or grpo.kl_coefficient higher."

    def begin(self) -> None:
        super().begin()
        self.recent = Window(self.shared.span(0.2, 10, 40))
        self.last = self.first_sigma = math.nan

    def check(self, step: int, row: Row) -> Verdict | None:
        # Several steps learn from the answers of one round: its reward counts once, or noise would look small.
        if row["policy.reward"] == self.last:
            return NO_READING
        self.last = row["policy.reward"]
        return super().check(step, row)

    def judge(self, now: float) -> tuple[int, float]:
        sigma, size = self.recent.sigma, self.recent.size
        if math.isnan(self.first_sigma):
            self.first_sigma = sigma
        error = MEDIAN_ERROR * max(sigma, self.first_sigma) * math.sqrt(2 / size)
        limit = self.start - max(self.limits.reward_fall * abs(self.start), self.limits.reward_fall_errors * error)
        return (WARNING if now < limit else 0), limit


class TiedGroups(_Level):
    inputs = ("policy.tied_groups", "policy.reward")
    line = "tied_groups"
    silent_at = ("policy.reward", 0.0)  # told by reward_flat
    text = "In {now:.0%} of the groups all answers have the same reward, and teach nothing (median of {size} steps)."
    fix = "grpo_data.categories that the model solves sometimes, or more grpo.answers_per_question."

    def judge(self, now: float) -> tuple[int, float]:
        level, limit = super().judge(now)
        if level == CRITICAL and min(self.recent.values) <= limit:  # some of the steps did teach
            return WARNING, self.limits.tied_groups_warning
        return level, limit


class RewardSpread(_Level):
    """Groups are not tied, and yet rewards hardly differ: advantages are then noise, or nothing."""

    inputs = ("policy.reward_std", "policy.tied_groups")
    line, below = "reward_spread", True
    silent_at = ("policy.tied_groups", 1.0)  # told by tied_groups
    text = "The rewards of a step differ by {now:.2g} only (median of {size} steps): there is no signal to learn from."
    fix = "grpo_data.categories whose answers can be right or wrong, or more grpo.answers_per_question."


class EntropyCollapse(_Level):
    inputs = ("policy.entropy",)
    line, below, of_start = "entropy_collapse", True, "entropy_fall"
    text = "The entropy of the answers collapsed from {start:.3f} to {now:.3f} nats per token: all answers are alike."
    fix = "grpo.lr lower, grpo.kl_coefficient higher, or more grpo.answers_per_question."


class EntropyGrowth(_Level):
    inputs = ("policy.entropy",)
    line, of_start = "entropy_growth", "entropy_rise"
    text = "The entropy of the answers grew from {start:.3f} to {now:.3f} nats per token: they become random."
    fix = "grpo.lr lower or grpo.kl_coefficient higher."


class PolicyKl(_Level):
    inputs = ("policy.kl",)
    line = "policy_kl"
    text = "The policy is {now:.2f} nats per token away from the reference (median of {size} steps)."
    fix = "grpo.kl_coefficient higher or grpo.lr lower."


class ClipShare(_Level):
    inputs = ("policy.clip_share",)
    line = "clip_share"
    silent_at = ("policy.clip_share", 0.0)  # the first step after answers were drawn has a ratio of 1 everywhere
    text = "The ratio of {now:.0%} of the tokens is clipped (median of {size} steps): the updates are too large."
    fix = "grpo.lr lower, or fewer grpo.steps_per_round."


class SamplerMismatch(_Level):
    """Answers are drawn with other chances than the trainer computes: what they teach belongs to another model."""

    inputs = ("policy.sampler_difference",)
    line = "sampler_mismatch"
    text = "Sampler and trainer disagree by {now:.2f} nats per token (median of {size} steps): other weights draw."
    fix = "fewer grpo.steps_per_round or grpo.lr lower; side.precision fp32 and side.attention eager to find the cause."


class ImportanceRatio(_Level):
    """The smallest ratio of a token's chance in the trainer to that in the sampler."""

    inputs = ("policy.sampler_ratio_min",)
    line, below = "importance_ratio", True
    text = (
        "A token that was drawn is {now:.2g} times as likely to the trainer as to the sampler (median of {size} steps)."
    )
    fix = "fewer grpo.steps_per_round or grpo.lr lower; side.precision fp32 and side.attention eager to find the cause."


class CutAnswers(_Level):
    inputs = ("policy.cut_answers",)
    line = "cut_answers"
    text = "{now:.0%} of the answers reached the limit of length and were cut (median of {size} steps)."
    fix = "grpo.max_new_tokens larger; if answers also become longer, grpo.lr lower."


class AnswerFormat(_Level):
    inputs = ("policy.format_share",)
    line, below, of_start = "answer_format", True, "answer_format_fall"
    text = "The share of answers that end as they must fell from {start:.0%} to {now:.0%}: the model forgets the form."
    fix = "grpo.kl_coefficient higher or grpo.lr lower."

    def judge(self, now: float) -> tuple[int, float]:
        self.start = max(self.start, now)  # it falls from its best
        level, limit = super().judge(now)
        return (level if self.start >= limit else 0), limit


class LengthHacking(Rule):
    """Answers become longer in each of four or more stretches of steps, and the reward does not rise with them."""

    inputs = ("policy.answer_tokens", "policy.reward")
    phases = ("grpo",)

    def begin(self) -> None:
        self.alarm.calm = 3  # stretches
        size = self.shared.span(0.1, 8, 20)
        self.lengths, self.rewards = Window(size), Window(size)
        self.medians: list[tuple[float, float]] = []  # of the stretches since answers last became shorter

    def check(self, step: int, row: Row) -> Verdict | None:
        self.lengths.add(row["policy.answer_tokens"])
        self.rewards.add(row["policy.reward"])
        if len(self.lengths) < self.lengths.size:
            return NO_READING
        if self.medians and self.lengths.median <= self.medians[-1][0]:
            self.medians = []
        self.medians.append((self.lengths.median, self.rewards.median))
        self.lengths.clear()
        self.rewards.clear()
        (first, reward_then), (length, reward) = self.medians[0], self.medians[-1]
        limit = self.limits.length_growth * first
        earned = reward > reward_then + self.limits.length_reward * abs(reward_then)
        if len(self.medians) < 4 or length <= limit or earned:
            return None
        text = f"Answers grew from {first:.0f} to {length:.0f} tokens while the reward went from "
        text += f"{reward_then:.3f} to {reward:.3f}: length is learned, not the task."
        fix = "grpo.rewards.brevity higher, grpo.kl_coefficient higher, or grpo.max_new_tokens smaller."
        return Verdict(WARNING, length, limit, text, fix)


class PolicyGradient(_Level):
    """The norm before clipping, by its level alone: it is 0 where groups tie and jumps where few do not."""

    inputs = ("grad_norm",)
    line = "policy_gradient"
    text = "The median gradient norm of {size} steps is {now:.3g}: the policy's updates are unstable."
    fix = "grpo.lr lower, or more grpo.answers_per_question."


class LikelihoodDisplacement(_Level):
    """Chosen answers become unlikely, and rejected ones even more so (Razin et al. 2024, arXiv:2410.08847)."""

    inputs = ("policy.chosen", "policy.margin")
    phases = ("dpo",)
    line, below = "displacement", True
    text = "The implicit reward of chosen answers fell to {now:.2f} while the margin grew: both sides become unlikely."
    fix = "dpo.beta higher or dpo.lr lower."

    def begin(self) -> None:
        super().begin()
        self.margins = Window(self.recent.size)

    def check(self, step: int, row: Row) -> Verdict | None:
        self.margins.add(row["policy.margin"])
        return super().check(step, row) if self.margins.median > 0 else NO_READING


class PreferenceAccuracy(_Level):
    """The first fifth is left out: the run begins with pairs that are level, and no pair is ahead then."""

    inputs = ("policy.accuracy",)
    phases = ("dpo",)
    line, below = "preference_accuracy", True
    text = "The chosen answer is ahead in {now:.0%} of the pairs (median of {size} steps): no preference is learned."
    fix = "dpo.lr 2-5 times higher where the loss stands at 0.693, lower where it is above; look at some pairs."

    def check(self, step: int, row: Row) -> Verdict | None:
        return super().check(step, row) if step > self.shared.span(0.2, 10, 500) else NO_READING


class PreferenceMargin(_Level):
    inputs = ("policy.margin",)
    phases = ("dpo",)
    line = "preference_margin"
    text = "The margin between chosen and rejected answers is {now:.1f} (median of {size} steps): pairs known by heart."
    fix = "dpo.lr lower, dpo.beta higher, or fewer epochs."


RULES: dict[str, type[Rule]] = {
    "reward_flat": RewardFlat,
    "reward_fall": RewardFall,
    "tied_groups": TiedGroups,
    "reward_spread": RewardSpread,
    "entropy_collapse": EntropyCollapse,
    "entropy_growth": EntropyGrowth,
    "policy_kl": PolicyKl,
    "clip_share": ClipShare,
    "sampler_mismatch": SamplerMismatch,
    "importance_ratio": ImportanceRatio,
    "cut_answers": CutAnswers,
    "answer_format": AnswerFormat,
    "length_hacking": LengthHacking,
    "policy_gradient": PolicyGradient,
    "likelihood_displacement": LikelihoodDisplacement,
    "preference_accuracy": PreferenceAccuracy,
    "preference_margin": PreferenceMargin,
}

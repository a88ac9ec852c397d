"""Where the rules of the health monitor draw their lines; docs/health.md says what each rule means.

An optional `health.yaml` beside params.yaml overrides single values. It is no
dependency of any stage: where a line is drawn cannot change weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from athanor.base.errors import ParamsError
from athanor.base.strict import build, param, read_yaml


@dataclass(frozen=True)
class Thresholds:
    """`_warning` and `_critical` are the two lines of a rule. Shares, factors and relative changes unless said."""

    off: tuple[str, ...] = param(default=())  # rules that stay silent

    initial_loss_warning: float = param(min=0.0, default=0.05)  # distance from ln(vocabulary size)
    initial_loss_critical: float = param(min=0.0, default=0.25)
    not_learning_warning: float = param(min=0.0, default=0.3)  # nats below the start
    not_learning_critical: float = param(min=0.0, default=0.1)
    plateau_improvement: float = param(min=0.0, default=0.002)
    plateau_lr_fraction: float = param(min=0.0, max=1.0, default=0.3)  # of the peak; below, a slow loss is no news
    spike_sigma: float = param(min=1.0, default=6.0)  # robust standard deviations
    spike_rise: float = param(min=0.0, default=0.1)
    spike_critical: float = param(min=1.0, default=1.5)  # times the median, twice in three steps
    spike_single: float = param(min=1.0, default=2.0)  # times the median, once
    spike_single_sigma: float = param(min=1.0, default=12.0)
    divergence_warning: float = param(min=1.0, default=1.03)  # times the best median
    divergence_critical: float = param(min=1.0, default=1.08)
    overfitting_rise: float = param(min=0.0, default=0.005)  # of the validation, over three validations
    overfitting_critical: float = param(min=1.0, default=1.03)  # times the best validation
    resume_warning: float = param(min=1.0, default=5.0)  # standard errors of the difference of two medians
    resume_critical: float = param(min=1.0, default=10.0)
    resume_change: float = param(min=0.0, default=0.02)

    skipped_critical: float = param(min=0.0, max=1.0, default=0.01)  # of the last 1000 steps
    refused_warning: float = param(min=0.0, max=1.0, default=0.01)  # of the last 1000 steps
    gradient_sigma: float = param(min=1.0, default=6.0)  # of the logarithm
    gradient_rise: float = param(min=1.0, default=5.0)  # times the median; what sigma alone finds may be noise
    gradient_warning: float = param(min=1.0, default=10.0)  # times the median
    gradient_critical: float = param(min=1.0, default=50.0)
    gradient_absolute: float = param(min=0.0, default=100.0)  # fine-tuning and dpo
    gradient_low: float = param(min=0.0, default=0.01)  # band of the median norm
    gradient_high: float = param(min=0.0, default=10.0)
    vanishing_norm: float = param(min=0.0, default=1e-6)
    scale_skipped: float = param(min=0.0, max=1.0, default=0.01)  # of the last 1000 steps, fp16
    scale_low: float = param(min=0.0, default=1.0)  # loss scale
    headroom_warning: float = param(min=0.0, default=4.0)  # powers of two below the largest number of the format
    headroom_critical: float = param(min=0.0, default=2.0)
    overflow_steps: float = param(min=0.0, default=100.0)  # until the largest number, at the growth of three readings
    gradient_tiny: float = param(min=0.0, max=1.0, default=0.5)  # of a block's gradients, fp16
    attention_logits: float = param(min=0.0, default=100.0)
    embedding_spread: float = param(min=0.0, default=2.5)
    final_norm_gain: float = param(min=0.0, default=4.0)

    lr_error: float = param(min=0.0, default=1e-3)
    throughput_warning: float = param(min=0.0, max=1.0, default=0.9)  # of the speed at the start
    throughput_cpu_warning: float = param(min=0.0, max=1.0, default=0.7)  # the same on a CPU
    throughput_critical: float = param(min=0.0, max=1.0, default=0.3)
    data_wait_warning: float = param(min=0.0, max=1.0, default=0.1)
    data_wait_critical: float = param(min=0.0, max=1.0, default=0.3)
    memory_growth: float = param(min=0.0, default=0.01)  # device, three windows in a row
    host_memory_growth: float = param(min=0.0, default=0.02)
    host_memory_critical: float = param(min=0.0, max=1.0, default=0.95)  # of the machine's memory
    checkpoint_cost: float = param(min=0.0, max=1.0, default=0.02)

    # Training after fine-tuning, of a small model on short answers that can be checked; medians of some steps. A low
    # reward has no line: such a model may begin at a few right answers in a hundred, and learns from them.
    reward_fall: float = param(min=0.0, default=0.2)  # of the reward at the start
    reward_fall_errors: float = param(min=1.0, default=5.0)  # standard errors of the difference of two medians
    tied_groups_warning: float = param(min=0.0, max=1.0, default=0.8)
    tied_groups_critical: float = param(min=0.0, max=1.0, default=0.999)  # at each of the steps
    reward_spread_warning: float = param(min=0.0, default=0.01)  # standard deviation of a step's rewards
    reward_spread_critical: float = param(min=0.0, default=1e-6)
    # Nats per token. At 0.05 long answers of a large model have collapsed; short ones that are right are as sure as that.
    entropy_collapse_warning: float = param(min=0.0, default=0.03)
    entropy_collapse_critical: float = param(min=0.0, default=0.01)
    entropy_fall: float = param(min=0.0, max=1.0, default=0.2)  # of its start; to fall slowly is what the method does
    entropy_growth_warning: float = param(min=0.0, default=0.5)
    entropy_growth_critical: float = param(min=0.0, default=1.0)
    entropy_rise: float = param(min=1.0, default=2.0)  # times its start
    policy_kl_warning: float = param(min=0.0, default=0.5)  # nats per token
    policy_kl_critical: float = param(min=0.0, default=2.0)
    clip_share_warning: float = param(min=0.0, max=1.0, default=0.1)
    clip_share_critical: float = param(min=0.0, max=1.0, default=0.3)
    sampler_mismatch_warning: float = param(min=0.0, default=0.1)  # nats per token, of either sign
    sampler_mismatch_critical: float = param(min=0.0, default=1.0)
    importance_ratio_warning: float = param(min=0.0, default=0.1)  # the smallest of a step's tokens
    importance_ratio_critical: float = param(min=0.0, default=0.001)
    cut_answers_warning: float = param(min=0.0, max=1.0, default=0.3)
    cut_answers_critical: float = param(min=0.0, max=1.0, default=0.8)
    answer_format_warning: float = param(min=0.0, max=1.0, default=0.9)
    answer_format_critical: float = param(min=0.0, max=1.0, default=0.5)
    answer_format_fall: float = param(min=0.0, max=1.0, default=0.9)  # of its best: noise near a line is no fall
    length_growth: float = param(min=1.0, default=1.5)  # times, over four or more stretches of a tenth of the run
    length_reward: float = param(min=0.0, default=0.05)  # a rise of the reward that longer answers may have earned
    policy_gradient_warning: float = param(min=0.0, default=5.0)
    policy_gradient_critical: float = param(min=0.0, default=10.0)
    # The implicit reward, beta times the nats that a whole answer lost against the reference: 30 and 100 at beta 0.1.
    displacement_warning: float = param(max=0.0, default=-3.0)
    displacement_critical: float = param(max=0.0, default=-10.0)
    preference_accuracy_warning: float = param(min=0.0, max=1.0, default=0.5)
    preference_accuracy_critical: float = param(min=0.0, max=1.0, default=0.4)
    # A pair of margin 10 has a loss of 5e-5 and nothing left to teach.
    preference_margin_warning: float = param(min=0.0, default=10.0)
    preference_margin_critical: float = param(min=0.0, default=30.0)

    def __post_init__(self) -> None:
        from athanor.monitor.monitor import RULES

        for rule in self.off:
            if rule not in RULES:
                raise ParamsError(f"there is no rule '{rule}'", where="off", fix=f"one of {', '.join(RULES)}")


def load(*folders: Path) -> Thresholds:
    """The defaults, with what the first health.yaml in `folders` says instead."""
    for path in (folder / "health.yaml" for folder in folders):
        if path.is_file():
            return build(Thresholds, read_yaml(path), "health")
    return Thresholds()

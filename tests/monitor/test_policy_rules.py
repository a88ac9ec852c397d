"""GRPO and DPO: each rule finds its planted fault and nothing else does; healthy runs are left in peace. About 5 s."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from athanor.monitor.policy_rules import RULES
from tests.monitor import test_rules as general
from tests.monitor.curves import Rows, change, findings, trouble
from tests.monitor.policy_curves import policy_run
from tests.monitor.test_rules import check_sentences, names

Fault = Callable[[Rows, int], Rows]  # the rows of a healthy run and the step of its first third


def policy(name: str, how: Callable[[float], float]) -> Fault:
    return lambda rows, at: change(rows, f"policy.{name}", lambda step, value: how(value), at)


def at_once(*faults: Fault) -> Fault:
    def plant(rows: Rows, at: int) -> Rows:
        for fault in faults:
            rows = fault(rows, at)
        return rows

    return plant


def step_to(name: str, before: float, after: float) -> Fault:
    """About `before` until the fault begins, about `after` from then on."""

    def plant(rows: Rows, at: int) -> Rows:
        def level(step: int, value: float) -> float:
            return (after if step >= at else before) * (1 + 0.03 * math.sin(step**2))

        return change(rows, f"policy.{name}", level)

    return plant


def whole_run(fault: Fault) -> Fault:
    return lambda rows, at: fault(rows, 0)


nothing_earned = at_once(*(policy(name, lambda value: 0.0) for name in ("reward", "reward_std")))
all_tied = at_once(
    policy("tied_groups", lambda value: 1.0),
    policy("reward_std", lambda value: 0.0),
    lambda rows, at: change(rows, "grad_norm", lambda step, value: 0.0, at),
)


def longer(rows: Rows, at: int) -> Rows:
    """Answers grow to three times their length, and rewards stay what they were around the first third."""
    last = rows[-1]["step"]
    rows = change(rows, "policy.answer_tokens", lambda step, value: 40 * (1 + 2 * (step - at) / last), at)
    return change(rows, "policy.reward", lambda step, value: 0.4 + 0.01 * math.sin(step**2))


# Phase, rule, the worst level, fault.
FAULTS = [
    ("grpo", "reward_flat", "critical", whole_run(at_once(nothing_earned, all_tied))),
    ("grpo", "reward_fall", "warning", step_to("reward", 0.4, 0.2)),
    ("grpo", "tied_groups", "warning", policy("tied_groups", lambda value: 0.85 + 0.1 * value)),
    ("grpo", "tied_groups", "critical", all_tied),
    ("grpo", "reward_spread", "warning", policy("reward_std", lambda value: 0.02 * value)),
    ("grpo", "reward_spread", "critical", policy("reward_std", lambda value: 0.0)),
    ("grpo", "entropy_collapse", "warning", step_to("entropy", 0.2, 0.02)),
    ("grpo", "entropy_collapse", "critical", step_to("entropy", 0.2, 0.005)),
    ("grpo", "entropy_growth", "warning", step_to("entropy", 0.2, 0.7)),
    ("grpo", "entropy_growth", "critical", step_to("entropy", 0.4, 1.3)),
    ("grpo", "policy_kl", "warning", policy("kl", lambda value: 0.6 + value)),
    ("grpo", "policy_kl", "critical", policy("kl", lambda value: 3.0 + value)),
    ("grpo", "clip_share", "warning", policy("clip_share", lambda value: 8 * value)),
    ("grpo", "clip_share", "critical", policy("clip_share", lambda value: 25 * value)),
    ("grpo", "sampler_mismatch", "warning", policy("sampler_difference", lambda value: 0.2 + value)),
    ("grpo", "sampler_mismatch", "critical", policy("sampler_difference", lambda value: 1.5 + value)),
    ("grpo", "importance_ratio", "warning", policy("sampler_ratio_min", lambda value: 0.05 * value)),
    ("grpo", "importance_ratio", "critical", policy("sampler_ratio_min", lambda value: 1e-4 * value)),
    ("grpo", "cut_answers", "warning", policy("cut_answers", lambda value: 0.4 + value)),
    ("grpo", "cut_answers", "critical", policy("cut_answers", lambda value: 0.85 + 0.1 * value)),
    ("grpo", "answer_format", "warning", step_to("format_share", 0.95, 0.8)),
    ("grpo", "answer_format", "critical", step_to("format_share", 0.95, 0.4)),
    ("grpo", "length_hacking", "warning", longer),
    ("grpo", "policy_gradient", "warning", lambda rows, at: change(rows, "grad_norm", lambda s, v: 6 + v, at)),
    ("grpo", "policy_gradient", "critical", lambda rows, at: change(rows, "grad_norm", lambda s, v: 12 + v, at)),
    ("dpo", "likelihood_displacement", "warning", policy("chosen", lambda value: -5.0)),
    ("dpo", "likelihood_displacement", "critical", policy("chosen", lambda value: value - 20)),
    ("dpo", "preference_accuracy", "warning", policy("accuracy", lambda value: 0.45)),
    ("dpo", "preference_accuracy", "critical", policy("accuracy", lambda value: 0.3 * value)),
    ("dpo", "preference_margin", "warning", policy("margin", lambda value: 15 + value)),
    ("dpo", "preference_margin", "critical", policy("margin", lambda value: 40 + value)),
]
SEED = 19  # of runs whose reward begins well above 0, with two steps in a round


@pytest.mark.parametrize("steps", [80, 300])
@pytest.mark.parametrize(("phase", "rule", "level", "fault"), FAULTS)
def test_planted_fault_is_found_by_its_rule_alone(phase, rule, level, fault, steps):
    found = trouble(findings(fault(policy_run(phase, steps, SEED), steps // 3), steps, phase))
    assert set(names(found)) == {rule}, "\n".join(map(str, found))
    assert found[-1].level == level and len(found) <= 2
    check_sentences([text for each in found for text in (each.diagnosis, each.fix)])


def test_every_rule_has_a_planted_fault():
    assert {rule for _, rule, _, _ in FAULTS} == set(RULES)


@pytest.mark.parametrize("phase", ["grpo", "dpo"])
@pytest.mark.parametrize("seed", range(10))
def test_healthy_runs_have_no_finding(phase, seed):
    steps = (60, 80, 100, 120, 150, 180, 200, 240, 270, 300)[seed]
    rows = policy_run(phase, steps, seed)
    assert findings(rows, steps, phase) == []
    assert findings(rows, steps, phase, resumes=(steps // 3, steps // 2)) == []
    back = [row for row in rows if row["step"] <= steps // 2] + [row for row in rows if row["step"] > steps // 3]
    assert findings(back, steps, phase) == []  # the run went back to a checkpoint


@pytest.mark.parametrize("phase", ["grpo", "dpo"])
def test_one_noisy_step_raises_nothing(phase):
    rows = policy_run(phase, 120, SEED)
    columns = [name for row in rows for name in row if name.startswith("policy.")]
    for name in dict.fromkeys(columns):
        for wild in (0.0, -50.0, 50.0):
            assert findings(change(rows, name, lambda step, value: wild, 61, 61), 120, phase) == [], (name, wild)
    assert findings(change(rows, "loss", lambda step, value: 30 * value, 61, 61), 120, phase) == []


def test_a_loss_of_grpo_may_be_anything_finite():
    rows = policy_run("grpo", 120, SEED)
    for how in (lambda step, value: 0.0, lambda step, value: -2.0 + value, lambda step, value: 0.001 * step):
        assert findings(change(rows, "loss", how), 120, "grpo") == []


def test_a_reward_that_does_not_rise_is_no_fault_and_one_that_ends_is():
    rows = policy_run("grpo", 300, SEED)
    flat = change(rows, "policy.reward", lambda step, value: 0.3 + 0.05 * math.sin(step**2))
    assert findings(flat, 300, "grpo") == []
    ends = at_once(nothing_earned, all_tied)(rows, 150)
    assert names(findings(ends, 300, "grpo")) == ["reward_flat"]


def test_a_gradient_of_zero_is_told_where_groups_differ():
    rows = change(policy_run("grpo", 300, SEED), "grad_norm", lambda step, value: 0.0, 100)
    assert set(names(findings(rows, 300, "grpo"))) == {"vanishing_gradient"}


@pytest.mark.parametrize("phase", ["grpo", "dpo"])
@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        (general.nan_loss, "nan_loss"),
        (general.skipped_once, "skipped_steps"),
        (general.logits_large, "attention_logits"),
        (general.half_rate, "learning_rate"),
        (general.leak("memory.bytes", 0.5), "device_memory"),
        (general.disk_full, "disk_runway"),
    ],
)
def test_rules_of_every_training_hold(phase, fault, rule):
    assert set(names(trouble(findings(fault(policy_run(phase, 300, SEED), 75), 300, phase)))) == {rule}


@pytest.mark.parametrize(
    ("name", "how", "rule"),
    [
        ("loss", lambda step, value: math.log(2), "constant_loss"),
        ("loss", lambda step, value: value + max(0, step - 100) / 300, "divergence"),
        ("grad_norm", lambda step, value: 150.0 if step == 200 else value, "gradient_spike"),
    ],
)
def test_rules_that_dpo_shares_with_fine_tuning(name, how, rule):
    rows = change(policy_run("dpo", 300, SEED), name, how)
    assert set(names(findings(rows, 300, "dpo"))) == {rule}

"""Guard, rules and ledger as pure functions: what they find, and what they leave alone. About 4 s."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from athanor.training import skipped_ranges
from athanor.training.guard import Rules, SpikeGuard, detect_divergence, median_and_noise

RULES = Rules()
CPU = torch.device("cpu")


def curve(seed, steps, noise=0.04, tail=False):
    """A loss like a language model's: a power law with noise; gradient norms that fall and spread."""
    draw = np.random.Generator(np.random.PCG64(seed))
    shape = draw.standard_t(4, steps) if tail else draw.standard_normal(steps)
    loss = (2.6 + 8.3 * np.arange(1, steps + 1) ** -0.28) * (1 + noise * shape)
    norm = (0.3 + 2 * np.arange(1, steps + 1) ** -0.3) * np.exp(0.25 * draw.standard_normal(steps))
    return loss, norm


def first_trouble(loss, skipped=None, rules=RULES):
    """The first step at which the rules speak, and what they say."""
    rows = [(float(value), 1.0, float(skipped[i]) if skipped is not None else 0.0) for i, value in enumerate(loss)]
    for step in range(1, len(rows) + 1):
        base = max(0, step - rules.reach)
        found = detect_divergence(rows[base:step], rules, step)
        if found:
            return step, base + found.onset, found.reason
    return None


def judged(loss, norm, guard=None):
    guard = guard or SpikeGuard(RULES, CPU, active=True)
    loss, norm = torch.tensor(np.asarray(loss)).float(), torch.tensor(np.asarray(norm)).float()
    flags = []
    for pair in zip(loss, norm, strict=True):
        broken = ~(torch.isfinite(pair[0]) & torch.isfinite(pair[1]))
        flags.append(bool(guard.refuses(*pair, broken)))
    return flags


@pytest.mark.parametrize("noise", [0.01, 0.04, 0.4])
def test_healthy_curves_raise_no_alarm(noise):
    for seed in range(3):
        loss, norm = curve(seed, 700, noise)
        loss = np.abs(loss)
        assert first_trouble(loss) is None
        assert noise == 0.4 or not any(judged(loss, norm))


def test_heavy_tails_raise_no_alarm():
    loss, norm = curve(5, 1500, tail=True)
    assert first_trouble(loss) is None and not any(judged(loss, norm))


@pytest.mark.parametrize("height", [1.45, 1.6, 3.0])
def test_a_spike_that_stays_is_found_from_its_first_step_on(height):
    loss, _ = curve(1, 700)
    loss[500:] *= height
    step, onset, reason = first_trouble(loss)
    assert onset == 500 and step - onset <= RULES.spike_steps and "does not recover" in reason


def test_a_spike_that_recovers_is_left_alone():
    loss, _ = curve(1, 700)
    loss[500:520] *= 2
    assert first_trouble(loss) is None
    loss[500:530] *= 2
    assert first_trouble(loss) is not None


def test_a_rise_without_a_spike_is_found_and_its_beginning_lies_within_reach():
    loss, _ = curve(2, 900, 0.02)
    loss[500:] *= np.minimum(1.26, 1 + 0.26 * np.arange(400) / 150)  # never 1.3 times the median
    step, onset, reason = first_trouble(loss)
    assert "without a spike" in reason and 460 <= onset <= 540
    assert step - onset + RULES.margin <= RULES.anchor_every


def test_skipped_steps_are_trouble_only_in_a_row():
    loss, _ = curve(3, 400)
    skipped = np.zeros(400)
    skipped[200:223] = 1
    skipped[300:399:2] = 1
    spiky = loss.copy()
    spiky[200:223] *= 4
    spiky[300:399:2] = math.nan
    assert first_trouble(spiky, skipped) is None
    skipped[223] = 1
    assert first_trouble(spiky, skipped)[:2] == (224, 200)


def test_the_band_knows_a_slope_from_noise():
    assert median_and_noise(list(np.linspace(4, 2, 101))) == pytest.approx((3.0, 1.4826 * 0.02 / math.sqrt(2)))
    draw = np.random.Generator(np.random.PCG64(0))
    assert median_and_noise(list(3 + 0.1 * draw.standard_normal(4000)))[1] == pytest.approx(0.1, rel=0.1)


def test_the_guard_refuses_what_is_far_out_and_nothing_else():
    loss, norm = curve(0, 400)
    loss[40] *= 3  # too early to say
    loss[300], norm[310], norm[320] = loss[300] * 1.8, norm[310] * 40, norm[320] * 4
    loss[350], norm[360] = math.nan, math.inf
    assert [step for step, flag in enumerate(judged(loss, norm)) if flag] == [300, 310, 350, 360]
    off = SpikeGuard(RULES, CPU, active=False)
    assert [step for step, flag in enumerate(judged(loss, norm, off)) if flag] == [350, 360]


def test_a_refused_step_does_not_enter_the_window():
    loss, norm = curve(0, 300)
    loss[150:170] *= 2
    assert [step for step, flag in enumerate(judged(loss, norm)) if flag] == list(range(150, 170))


def test_a_batch_without_targets_tells_the_guard_nothing():
    loss, norm = curve(0, 200)
    loss[90:120:3] = norm[90:120:3] = 0.0
    guard = SpikeGuard(RULES, CPU, active=True)
    assert not any(judged(loss, norm, guard)) and int(guard.count) == 190
    assert bool(torch.isfinite(guard.seen_2W).all())


def test_the_guard_goes_on_from_its_tensors_and_can_forget():
    loss, norm = curve(0, 300)
    loss[290] *= 2
    first, second = (SpikeGuard(RULES, CPU, active=True) for _ in range(2))
    whole = judged(loss, norm)
    judged(loss[:200], norm[:200], first)
    second.load(first.tensors())
    assert judged(loss[200:], norm[200:], second) == whole[200:] and whole[290]
    first.reset()
    assert not any(judged(loss[240:], norm[240:], first))  # too few steps since


def test_ranges_of_the_ledger_shift_what_comes_after_them():
    rows = [skipped_ranges.entry(9, 4, 300, 500, "a"), skipped_ranges.entry(12, 7, 800, 900, "b")]
    skipped = {0: 0, 200: 0, 300: 200, 500: 200, 599: 200, 600: 300, 700: 300}
    assert {at: skipped_ranges.skipped_before(rows, at) for at in skipped} == skipped
    assert (
        skipped_ranges.known_at(rows, 12) and not skipped_ranges.known_at(rows, 11) and skipped_ranges.known_at([], 0)
    )


def test_overlapping_ranges_leave_every_token_out_once():
    draw = np.random.Generator(np.random.PCG64(3))
    for _ in range(200):
        rows = []
        for _ in range(int(draw.integers(1, 4))):
            start = int(draw.integers(0, 30))
            rows.append(skipped_ranges.entry(1, 1, start, start + int(draw.integers(1, 12)), ""))
        left = [at for at in range(200) if not any(row["from"] <= at < row["to"] for row in rows)]
        assert [at + skipped_ranges.skipped_before(rows, at) for at in range(100)] == left[:100]

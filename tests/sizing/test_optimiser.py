"""A recipe's numbers in tokens: relations that hold exactly, warnings that can be wrong in both directions."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from athanor.cli.probe import recipe_of
from athanor.runtime import presets
from athanor.runtime.schema import check_values
from athanor.sizing.optimiser import Recipe, beta_for, check, derive, half_life, measures, timescale

ROOT = Path(__file__).resolve().parents[2]
GOOD = Recipe(1_000_000, 2048, 0.004, 0.9, 0.97, 0.4, 60_000, 2_750_000)


def test_a_half_life_is_where_half_is_left():
    assert 0.97 ** (half_life(0.97, 2048) / 2048) == pytest.approx(0.5)
    assert half_life(0.95, 32768) == pytest.approx(442_807, rel=1e-5)  # 13.5 steps
    assert half_life(0.0, 2048) == 0.0 and half_life(1.0, 2048) == math.inf
    for beta in (0.5, 0.9, 0.999):
        assert beta_for(half_life(beta, 4096), 4096) == pytest.approx(beta, rel=1e-12)


def test_weights_forget_at_the_timescale():
    steps = timescale(0.001, 0.1, 4096) / 4096
    assert (1 - 0.001 * 0.1) ** steps == pytest.approx(math.exp(-1), rel=1e-3)
    assert timescale(0.001, 0.0, 4096) == math.inf


def test_measures_are_tokens_and_shares_of_the_run():
    told = measures(GOOD)
    assert told.steps == 488
    assert told.beta2_half_life == pytest.approx(46_604, rel=1e-4)
    assert told.beta2_share == pytest.approx(0.0466, rel=1e-3)
    assert told.tau_share == pytest.approx(1.28) and told.warmup_share == pytest.approx(0.06)


def test_a_recipe_in_line_has_no_warning():
    assert check(GOOD) == []
    # A weak decay does no harm, and a short run is what a little text allows.
    assert check(dataclasses.replace(GOOD, weight_decay=0.01)) == check(dataclasses.replace(GOOD, tokens=150_000)) == []
    large = Recipe(10_000_000_000, 524_288, 1e-3, 0.9, 0.98, 0.1, 100_000_000, 500_000_000)
    assert check(large) == []
    # 0.95 at a large batch is usual, and no warning even where the run is short for it.
    assert check(dataclasses.replace(GOOD, tokens=2048 * 120, beta2=0.95, weight_decay=1.0, warmup_tokens=28_000)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"beta2": 0.6}, "short"),
        ({"beta2": 0.9999}, "long"),
        ({"weight_decay": 0.9, "lr": 0.1}, "forgets most of the run"),
        ({"warmup_tokens": 300_000}, "more than 20%"),
        ({"warmup_tokens": 20_000}, "before the second moment has settled"),
        # 32k-token batches with 0.95 for billions of tokens: a memory of 13 steps.
        ({"tokens": 10**10, "batch_tokens": 32768, "beta2": 0.95, "warmup_tokens": 10**8, "parameters": 5 * 10**8,
          "lr": 6e-4, "weight_decay": 0.02}, "short"),
    ],
)  # fmt: skip
def test_each_rule_can_fail(changes, words):
    found = check(dataclasses.replace(GOOD, **changes))
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize("changes", [{"beta2": 0.6}, {"tokens": 10**9, "warmup_tokens": 10**8, "weight_decay": 0.001}])
def test_the_beta2_that_a_warning_names_has_no_warning(changes):
    recipe = dataclasses.replace(GOOD, **changes)
    (warning,) = [line for line in check(recipe) if line.startswith("beta2")]
    named = float(warning.split("beta2 ")[-1].split()[0])
    assert not [line for line in check(dataclasses.replace(recipe, beta2=named)) if line.startswith("beta2")]


@pytest.mark.parametrize("changes", [{"weight_decay": 0.9, "lr": 0.1}])
def test_the_weight_decay_that_a_warning_names_has_no_warning(changes):
    recipe = dataclasses.replace(GOOD, **changes)
    (warning,) = check(recipe)
    named = float(warning.split()[-1])
    # Named to two digits: a little to the safe side of it.
    nudged = named * 0.97
    assert check(dataclasses.replace(recipe, weight_decay=nudged)) == []


def test_weight_decay_may_act_longer_where_a_parameter_sees_more_tokens():
    """Best timescales fall with tokens per parameter: 0.05 of the run is short at 10 and usual at 100 or more."""
    recipe = Recipe(10**10, 524_288, 1e-3, 0.9, 0.98, 1.05, 10**8, 10**9)
    assert [line for line in check(recipe) if "forgets" in line]
    assert not check(dataclasses.replace(recipe, parameters=10**8))


def test_another_batch_keeps_what_the_optimiser_remembers():
    other = derive(GOOD, batch_tokens=4 * GOOD.batch_tokens)
    old, new = measures(GOOD), measures(other)
    assert other.lr == pytest.approx(2 * GOOD.lr) and other.beta1 == GOOD.beta1
    assert new.beta2_half_life == pytest.approx(old.beta2_half_life) and new.tau == pytest.approx(old.tau)
    assert other.weight_decay == pytest.approx(2 * GOOD.weight_decay) and other.warmup_tokens == GOOD.warmup_tokens
    back = dataclasses.asdict(derive(other, batch_tokens=GOOD.batch_tokens))
    assert back == pytest.approx(dataclasses.asdict(GOOD), rel=1e-9)
    assert derive(GOOD) == dataclasses.replace(GOOD, beta2=pytest.approx(0.97), weight_decay=pytest.approx(0.4))


def test_a_longer_run_wants_a_lower_rate():
    longer = derive(GOOD, tokens=8 * GOOD.tokens)
    assert longer.lr == pytest.approx(GOOD.lr * 8**-0.32)
    assert measures(longer).tau_share == pytest.approx(measures(GOOD).tau_share)
    assert measures(longer).warmup_share == pytest.approx(0.06)
    # 46.6 k tokens are still within half a percent and a tenth of the longer run, so they stay.
    assert measures(longer).beta2_half_life == pytest.approx(measures(GOOD).beta2_half_life)
    assert measures(derive(GOOD, tokens=10**9)).beta2_half_life == pytest.approx(5_000_000)


@pytest.mark.parametrize("path", sorted((ROOT / "presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_has_measures(path):
    recipe = recipe_of(check_values(presets.values(path)))
    assert recipe.parameters > 0
    assert all(math.isfinite(value) for value in dataclasses.astuple(measures(recipe)))

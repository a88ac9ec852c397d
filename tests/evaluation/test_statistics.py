"""Intervals, paired comparison and power: against closed forms and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from athanor.evaluation import statistics
from athanor.evaluation.statistics import interval, mcnemar, paired, resolvable


def marks(right: int, count: int) -> list[bool]:
    return [True] * right + [False] * (count - right)


def test_the_interval_of_one_group_is_that_of_the_binomial() -> None:
    low, high = interval({"a": marks(120, 400)}, 1)
    spread = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert low == pytest.approx(0.3 - spread, abs=0.008) and high == pytest.approx(0.3 + spread, abs=0.008)
    values = np.random.default_rng(1).random(50).tolist()
    assert interval({"a": values}, 1) == interval({"a": values}, 1) != interval({"a": values}, 2)


def test_items_are_resampled_within_their_group() -> None:
    """Groups that are all right and all wrong leave less to chance than the same marks mixed, but not nothing."""
    apart = interval({"a": marks(50, 50), "b": marks(0, 50)}, 1)
    mixed = interval({"a": marks(25, 50), "b": marks(25, 50)}, 1)
    assert apart[0] < 0.49 and apart[1] > 0.51 and apart[1] - apart[0] < 0.5 * (mixed[1] - mixed[0])


def test_nothing_looks_certain() -> None:
    assert interval({"a": marks(0, 48)}, 1) == pytest.approx((0.0, 1 - 0.025 ** (1 / 48)))
    assert interval({"a": marks(48, 48)}, 1) == pytest.approx((0.025 ** (1 / 48), 1.0))
    low, high = interval({"a": [0, 0, 0]}, 1, bounds=(-1.0, 1.0))
    assert low == -high and high > 0.5
    assert interval({"a": [1]}, 1)[0] < 0.05


def test_large_groups_are_drawn_in_pieces_of_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(300.0)
    whole = statistics.resampled_sums(values, "s", 50)
    monkeypatch.setattr(statistics, "CHUNK", 1000)
    assert (statistics.resampled_sums(values, "s", 50) == whole).all()


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (10, 2, 0.0385742), (8, 8, 1.0), (3, 12, 0.0351562)],
)
def test_mcnemar_is_the_exact_sign_test(wins: int, losses: int, p: float) -> None:
    assert mcnemar(wins, losses) == pytest.approx(p, rel=1e-4)


def test_paired_counts_and_compares() -> None:
    first = {"a": marks(10, 40), "b": marks(0, 20)}
    second = {"a": marks(22, 40), "b": [False] * 19 + [True]}
    row = paired(first, second, 1)
    assert (row["n"], row["wins"], row["losses"]) == (60, 13, 0)
    assert row["difference"] == pytest.approx(13 / 60) and row["low"] < 13 / 60 < row["high"] and row["low"] > 0
    assert row["p"] == mcnemar(13, 0) and row["discordance"] == pytest.approx(13 / 60)
    back = paired(second, first, 1)
    assert (back["difference"], back["wins"], back["losses"]) == (-row["difference"], 0, 13)
    assert back["low"] == pytest.approx(-row["high"], abs=0.02)
    same = paired(first, first, 1)
    assert (same["difference"], same["p"]) == (0, 1.0) and same["low"] == -same["high"] < 0
    with pytest.raises(ValueError):
        paired(first, {"a": marks(1, 39), "b": marks(0, 20)}, 1)


@pytest.mark.parametrize(("count", "discordance"), [(200, 0.2), (600, 0.1), (120, 0.4)])
def test_the_resolution_is_found_eight_times_in_ten(count: int, discordance: float) -> None:
    """Two models that differ by just what is said to be resolvable: simulated, and tested as McNemar's z."""
    d = resolvable(count, discordance)
    rng = np.random.default_rng(7)
    drawn = rng.multinomial(count, [(discordance + d) / 2, (discordance - d) / 2, 1 - discordance], size=4000)
    z = (drawn[:, 0] - drawn[:, 1]) / np.sqrt(np.maximum(drawn[:, 0] + drawn[:, 1], 1))
    assert float((z > 1.96).mean()) == pytest.approx(0.8, abs=0.04)


def test_more_items_resolve_less() -> None:
    found = [resolvable(count, 0.1) for count in (50, 200, 800, 3200)]
    assert found == sorted(found, reverse=True) and found[2] == pytest.approx(0.031, abs=0.001)
    assert resolvable(3, 0.1) is None and resolvable(0, 0.1) is None
    # No disagreement seen: what differs would all differ one way.
    assert resolvable(100, 0.0) == pytest.approx(0.0764, abs=0.002)


def test_categories_that_are_all_right_or_all_wrong_do_not_make_the_whole_certain():
    groups = {"easy": [1.0] * 12, "hard": [0.0] * 12, "harder": [0.0] * 12}
    low, high = interval(groups, 1)
    assert 0.2 < low < 1 / 3 - 0.005 and 1 / 3 + 0.01 < high < 0.5
    # One category that varies does not hide what the others may hold.
    mixed = interval({**groups, "middle": [1.0, 0.0] * 6}, 1)
    alone = interval({"middle": [1.0, 0.0] * 6}, 1)
    assert mixed[1] - mixed[0] > (alone[1] - alone[0]) * 12 / 48


def test_the_interval_covers_a_known_score_also_near_its_ends():
    """Share of intervals that hold the true mean, over 300 draws of three categories of which two are almost settled."""
    draw, truth, held = np.random.default_rng(3), (0.99, 0.02, 0.6), 0
    for number in range(300):
        groups = {str(p): (draw.random(40) < p).astype(float).tolist() for p in truth}
        low, high = interval(groups, number)
        held += low <= sum(truth) / 3 <= high
    assert held / 300 > 0.92

"""The fit of a learning-rate probe on losses that are known, and the grid it is made on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from athanor.training.probe import Point, beyond, diverged, fit, grid, lattice, search, shortened


def bowl(optimum: float, depth: float = 2.0, width: float = 0.05) -> Callable[[float], Point]:
    """Losses on a parabola in the logarithm of the rate."""
    return lambda lr: Point(lr, depth + width * math.log(lr / optimum) ** 2)


def cliff(optimum: float, edge: float) -> Callable[[float], Point]:
    return lambda lr: Point(lr, None, "broke") if lr > edge else bowl(optimum)(lr)


@pytest.mark.parametrize("optimum", [0.0013, 0.002, 0.0031, 0.0049])
def test_a_parabola_gives_its_optimum_back(optimum):
    found = fit([bowl(optimum)(lr) for lr in grid(0.002, 2.0, 5)])
    assert found.inside and found.extend == "" and found.optimum == pytest.approx(optimum, rel=1e-9)
    assert found.at(optimum) == pytest.approx(2.0) and found.tolerance == pytest.approx(0.002 * found.best.cost)
    half = math.sqrt(found.tolerance / 0.05)
    assert found.highest == pytest.approx(max(optimum * math.exp(half), found.best.lr))
    assert found.lowest == pytest.approx(min(optimum * math.exp(-half), found.best.lr))


def test_a_steeper_right_side_moves_the_optimum_by_less_than_a_grid_step():
    """Losses rise faster to the right: far points on that side must not draw the parabola away from the best ones."""

    def lopsided(lr):
        x = math.log(lr / 0.004)
        return Point(lr, 2 + (0.05 if x < 0 else 0.3) * x * x)

    found = fit([lopsided(lr) for lr in grid(0.004, 2.0, 7)])
    assert found.inside and 0.004 / 1.6 < found.optimum < 0.004 * 1.2
    assert found.lowest <= 0.004 <= found.highest  # the best point is as good as the optimum


def test_the_grid_lies_on_one_lattice():
    assert grid(0.004, 2.0, 5) == [0.001, 0.002, 0.004, 0.008, 0.016] == grid(0.0033, 2.0, 5)
    assert set(grid(0.0033, 2.0, 5)) & set(grid(0.008, 2.0, 5)) == {0.002, 0.004, 0.008, 0.016}
    assert grid(0.05, 2.0, 5) == [0.016, 0.032, 0.064]  # pretrain.lr may be 0.1 at most
    for ratio in (1.1, 2.0, 3.0):
        rates = grid(0.004, ratio, 5)
        assert lattice(0.004, ratio) == rates[2] and beyond(rates[1], ratio, "higher") == rates[2]
        assert beyond(rates[1], ratio, "lower") == rates[0]
    assert beyond(0.064, 2.0, "higher") is None


@pytest.mark.parametrize(("optimum", "extend"), [(0.0003, "lower"), (0.03, "higher")])
def test_a_minimum_at_the_edge_adds_points_on_that_side(optimum, extend):
    five = [bowl(optimum)(lr) for lr in grid(0.003, 2.0, 5)]
    assert not fit(five).inside and fit(five).extend == extend
    points = search(bowl(optimum), 0.003, 2.0, 5, 9)
    assert 5 < len(points) <= 9 and fit(points).inside
    assert fit(points).optimum == pytest.approx(optimum, rel=1e-6)
    assert [point.lr for point in points] == sorted({point.lr for point in points})


def test_a_minimum_that_is_not_reached_is_said_so_and_the_bound_kept():
    points = search(bowl(1e-6), 0.004, 2.0, 5, 7)
    found = fit(points)
    assert len(points) == 7 and not found.inside and found.extend == "lower" and found.optimum == points[0].lr
    high = search(bowl(1.0), 0.05, 2.0, 5, 9)  # no rate above 0.1 may be used
    assert high[-1].lr == 0.064 and fit(high).extend == "higher"


def test_a_point_that_diverged_is_the_worst_and_bounds_the_optimum():
    points = [cliff(0.01, 0.005)(lr) for lr in grid(0.002, 2.0, 5)]
    found = fit(points)
    assert [point.bpb is None for point in points] == [False] * 4 + [True]
    assert found.inside and found.best.lr == 0.004
    assert found.optimum == 0.004 and found.highest == 0.004  # the parabola would say 0.01, beyond the cliff
    assert found.lowest < 0.004


def test_a_search_goes_lower_while_everything_diverges():
    points = search(cliff(0.0001, 0.0002), 0.004, 2.0, 5, 12)
    assert fit(points).inside and 0.00005 < fit(points).optimum <= 0.000125
    assert not fit(search(cliff(1e-6, 1e-6), 0.004, 2.0, 5, 6)).inside


def test_losses_without_a_bowl_give_the_best_point():
    points = [Point(lr, 2.0 + (lr != 0.002) * 0.1) for lr in grid(0.002, 2.0, 5)]
    assert fit(points).optimum == pytest.approx(0.002)
    flat = [Point(lr, 2.0) for lr in grid(0.002, 2.0, 5)]
    assert not fit(flat).inside  # the first of equals: nothing says that it is the minimum


def test_what_counts_as_diverged():
    assert diverged(5.0, 3.0, 2.0, 0.0) == "" and diverged(5.0, 5.5, 2.0, 0.1) == ""
    assert "not finite" in diverged(5.0, None, 2.0, 0.0) and "not finite" in diverged(5.0, 3.0, None, 0.0)
    assert "not finite" in diverged(5.0, 3.0, math.inf, 0.0)
    assert "above" in diverged(5.0, 9.0, 2.0, 0.0) and "30%" in diverged(5.0, 3.0, 2.0, 0.3)


def test_a_short_run_keeps_the_share_of_warmup():
    assert shortened(300_000, 1_000_000, 2048, 60_000) == (299_008, 17_940)
    assert shortened(10**9, 1_000_000, 2048, 60_000) == (999_424, 59_965)  # never longer than the run itself

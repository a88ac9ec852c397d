"""Finds the learning rate from short runs: which rates to try, and what their losses say.

Pure functions: a grid on a fixed lattice, a parabola through the best points
in the logarithm of the rate, and whether the minimum lies inside the grid.
The runs themselves are of the recipe as it is, warmup and cooldown included
and only shorter: without the cooldown a high rate looks worse than it is
(Hägele et al. 2024, arXiv:2405.18392).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ANCHOR = 1e-3  # every lattice has it, so that the grids around 0.003 and 0.004 share their runs
SPIKE = 1.2  # the last loss over the first one that counts as diverged, whatever came between
SKIPPED = 0.2  # of the steps; fp16 skips a few at the start of any run
NEIGHBOURS = 2  # on each side of the best point take part in the fit,
FARTHER = 0.1  # those not next to it with this weight: they steady the fit and must not bend it
FLAT = 0.002  # of the bits per byte: a difference that another seed would outweigh
LOWEST, HIGHEST = 1e-7, 0.1  # what pretrain.lr may be


@dataclass(frozen=True)
class Point:
    """One short run. `bpb` is of held-out text after the cooldown, None for a run that diverged."""

    lr: float
    bpb: float | None
    diverged: str = ""  # why, in words

    @property
    def cost(self) -> float:
        return math.inf if self.bpb is None else self.bpb


@dataclass(frozen=True)
class Fit:
    """`optimum` with the range of rates that are as good up to `tolerance` bits per byte.

    `inside` when rates were tried on both sides of the best one and were worse.
    `a`, `b`, `c`: the parabola a x² + b x + c in x = ln(lr / best); a is 0 where
    there is none, and then the optimum is the best point itself.
    """

    best: Point
    optimum: float
    lowest: float
    highest: float
    inside: bool
    extend: str  # "", "lower" or "higher"
    tolerance: float
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0

    def at(self, lr: float) -> float:
        """Bits per byte on the parabola."""
        x = math.log(lr / self.best.lr)
        return self.a * x * x + self.b * x + self.c


def lattice(lr: float, ratio: float) -> float:
    """The nearest rate of 1e-3 · ratio^k to three digits: grids of neighbouring recipes share their points."""
    return _lattice_lr(round(math.log(lr / ANCHOR) / math.log(ratio)), ratio)


def grid(lr: float, ratio: float, points: int) -> list[float]:
    """`points` rates around `lr`, ascending, each `ratio` times the one before; no rate out of range."""
    center = round(math.log(lr / ANCHOR) / math.log(ratio))
    first = center - (points - 1) // 2
    rates = [_lattice_lr(number, ratio) for number in range(first, first + points)]
    return [candidate for candidate in rates if LOWEST <= candidate <= HIGHEST]


def beyond(lr: float, ratio: float, direction: str) -> float | None:
    """The next rate of the lattice, `lower` or `higher`; None where the range ends."""
    number = round(math.log(lr / ANCHOR) / math.log(ratio)) + (1 if direction == "higher" else -1)
    candidate = _lattice_lr(number, ratio)
    return candidate if LOWEST <= candidate <= HIGHEST else None


def _lattice_lr(number: int, ratio: float) -> float:
    return float(f"{ANCHOR * ratio**number:.3g}")


def search(measure: Callable[[float], Point], lr: float, ratio: float, points: int, max_points: int) -> list[Point]:
    """Measure the grid, then one rate more at a time beyond the end at which the best one is; ascending."""
    measured = [measure(candidate) for candidate in grid(lr, ratio, points)]
    while len(measured) < max_points:
        fitted = fit(measured)
        end = {"lower": measured[0].lr, "higher": measured[-1].lr}.get(fitted.extend)
        candidate = None if end is None else beyond(end, ratio, fitted.extend)
        if candidate is None:
            break
        measured = sorted([*measured, measure(candidate)], key=lambda point: point.lr)
    return measured


def diverged(first_loss: float | None, last_loss: float | None, bpb: float | None, skipped_share: float) -> str:
    """Why a finished run counts as diverged; "" for one that learned. None stands for a number that is not finite."""
    if first_loss is None or last_loss is None or bpb is None or not math.isfinite(bpb):
        return "the loss is not finite"
    if skipped_share > SKIPPED:
        return f"{skipped_share:.0%} of the steps had a gradient that is not finite"
    if last_loss > SPIKE * first_loss:
        return f"the loss ended at {last_loss:.3g}, above {first_loss:.3g} at the start"
    return ""


def fit(points: Sequence[Point]) -> Fit:
    """The parabola through the best point and its neighbours, weighted towards low loss.

    To the right of the optimum a loss rises faster than to its left, and a
    parabola holds near the minimum only: a point counts less the more it is
    worse than the best, by 1 / (1 + (excess / s)²), s the mean excess of the
    two points next to it, and FARTHER if it is none of them. The optimum stays
    between those two, and on the side of one that diverged at the best point.
    """
    points = sorted(points, key=lambda point: point.lr)
    best_index = min(range(len(points)), key=lambda number: (points[number].cost, number))
    best = points[best_index]
    last = len(points) - 1
    inside = 0 < best_index < last and best.bpb is not None
    extend = "" if inside else "higher" if best_index == last and best.bpb is not None else "lower"
    tolerance = FLAT * (best.bpb or 0.0)
    left, right = points[max(0, best_index - 1)], points[min(last, best_index + 1)]
    near = [
        point
        for point in points[max(0, best_index - NEIGHBOURS) : best_index + NEIGHBOURS + 1]
        if point.bpb is not None
    ]
    flat = Fit(best, best.lr, left.lr, right.lr, inside, extend, tolerance)
    if not inside or len(near) < 3:
        return flat
    x_P = np.log([point.lr / best.lr for point in near])
    y_P = np.array([point.cost for point in near])
    excess_P = y_P - best.cost
    scale = float(np.mean([point.cost - best.cost for point in (left, right) if point.bpb is not None])) or 1.0
    far_P = np.array([not left.lr <= point.lr <= right.lr for point in near])
    weight_P = np.where(far_P, FARTHER, 1.0) / (1 + (excess_P / scale) ** 2)
    a, b, c = (float(value) for value in np.polyfit(x_P, y_P, 2, w=np.sqrt(weight_P)))
    if a <= 0:
        return flat
    residual = math.sqrt(float(np.sum(weight_P * (np.polyval((a, b, c), x_P) - y_P) ** 2) / np.sum(weight_P)))
    tolerance = max(tolerance, residual)
    # Nothing is known beyond the rates that were tried and learned.
    ends = [math.log((best if side.bpb is None else side).lr / best.lr) for side in (left, right)]
    log_optimum = min(max(-b / (2 * a), ends[0]), ends[1])
    half_width = math.sqrt(tolerance / a)
    floor = best.lr if left.bpb is None else points[0].lr
    ceiling = best.lr if right.bpb is None else max(point.lr for point in points if point.bpb is not None)
    # The best point is as good as the optimum whatever the parabola makes of it.
    low = min(max(best.lr * math.exp(log_optimum - half_width), floor), best.lr)
    high = max(min(best.lr * math.exp(log_optimum + half_width), ceiling), best.lr)
    return Fit(best, best.lr * math.exp(log_optimum), low, high, inside, extend, tolerance, a, b, c)


def shortened(tokens: int, run_tokens: int, batch_tokens: int, warmup_tokens: int) -> tuple[int, int]:
    """Tokens and warmup of a short run: whole steps, and the same share of warmup (the cooldown is a share anyway)."""
    short = max(1, min(tokens, run_tokens) // batch_tokens) * batch_tokens
    return short, round(warmup_tokens * short / run_tokens)

"""What a number of items can say: bootstrap intervals, paired comparison of two models, and the smallest difference
that so many items resolve. Marks are 0 or 1 per item; groups (categories) are resampled each on its own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
POWER = 0.8
TYPICAL_DISCORDANCE = 0.1  # share of items on which two versions of one model commonly disagree
CHUNK = 1 << 20  # positions drawn at once: 8 MiB


def standard_error(right: int, count: int) -> float:
    """Standard error of a share, from the Wilson centre so that 0 of n and n of n do not claim certainty."""
    share = (right + 2) / (count + 4)
    return math.sqrt(share * (1 - share) / (count + 4))


def resampled_sums(values_N: np.ndarray, seed: str, resamples: int = RESAMPLES) -> np.ndarray:
    """Sums of `values_N` drawn with replacement, float64 [resamples]; equal seeds draw equal positions."""
    n = len(values_N)
    rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "big"))
    sums_R, chunk_rows = np.empty(resamples), max(1, CHUNK // n)
    for start in range(0, resamples, chunk_rows):
        rows = min(chunk_rows, resamples - start)
        sums_R[start : start + rows] = values_N[rng.integers(0, n, size=(rows, n))].sum(axis=1)
    return sums_R


def interval(
    groups: Mapping[str, Sequence[float]], seed: int, level: float = LEVEL, bounds: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float]:
    """Percentile bootstrap of the mean over all items, items resampled within each group (Efron 1979).

    A group whose values are all equal gives resampling nothing to vary, and
    would look certain. So the ends also cover what such groups may hide: for
    each a share of items with another value, drawn from Jeffreys' posterior of
    0 of n (Brown, Cai and DasGupta 2001). If all values are equal, the ends are as far off
    as the exact binomial bound of 0 of n. All stays within `bounds`.
    """
    count = sum(len(values) for values in groups.values())
    tail = (1 - level) / 2
    sums_R, hidden_R = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for name, values in sorted(groups.items()):
        sums_R += resampled_sums(np.asarray(values, np.float64), f"{seed}/{name}")
        if len(set(values)) == 1:
            hidden_R += _hidden(float(values[0]), len(values), f"{seed}/{name}/hidden", bounds)
    ends = np.quantile(np.stack([sums_R, sums_R + hidden_R]) / count, (tail, 1 - tail), axis=1)
    low, high = float(ends[0].min()), float(ends[1].max())
    distinct = {value for values in groups.values() for value in values}
    if len(distinct) == 1:
        slack, value = 1 - tail ** (1 / count), distinct.pop()
        low, high = min(low, value - slack), max(high, value + slack)
    return max(low, bounds[0]), min(high, bounds[1])


def _hidden(value: float, n: int, seed: str, bounds: tuple[float, float]) -> np.ndarray:
    """How far the sum of n equal values may be off, float64 [resamples]: away from a bound, else either way."""
    rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "big"))
    size_R = n * rng.beta(0.5, n + 0.5, RESAMPLES)
    if value in bounds:
        return size_R if value == bounds[0] else -size_R
    return size_R * rng.choice((-1.0, 1.0), RESAMPLES)


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p: how often a fair coin divides the disagreements at least as unevenly (McNemar 1947)."""
    n = wins + losses
    below = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * below / 2**n)


def resolvable(count: int, discordance: float, power: float = POWER, level: float = LEVEL) -> float | None:
    """The smallest difference of two shares that `count` paired items show with this power; None if there is none.

    From the sample size of McNemar's test (Miettinen 1968), n d^2 = (z_a
    sqrt(p) + z_b sqrt(p - d^2))^2 with the share p of discordant items, which
    is at least the difference d itself.
    """
    alpha, beta = NormalDist().inv_cdf(0.5 + level / 2), NormalDist().inv_cdf(power)

    def needed(d: float) -> float:
        p = max(discordance, d)
        return ((alpha * math.sqrt(p) + beta * math.sqrt(max(p - d * d, 0.0))) / d) ** 2

    if count < 1 or needed(1.0) > count:
        return None
    low, high = 0.0, 1.0  # `needed` falls as d grows
    for _ in range(50):
        midpoint = (low + high) / 2
        low, high = (low, midpoint) if needed(midpoint) <= count else (midpoint, high)
    return high


def paired(first: Mapping[str, Sequence[bool]], second: Mapping[str, Sequence[bool]], seed: int) -> dict[str, Any]:
    """second - first on the same items, by group: difference with its interval, wins, losses, p and resolution."""
    changes = {
        name: [int(b) - int(a) for a, b in zip(marks, second[name], strict=True)] for name, marks in first.items()
    }
    flat = [change for group in changes.values() for change in group]
    n, wins, losses = len(flat), flat.count(1), flat.count(-1)
    difference, discordance = (wins - losses) / n, (wins + losses) / n
    low, high = interval(changes, seed, bounds=(-1.0, 1.0))
    return {
        "n": n,
        "difference": difference,
        "stderr": math.sqrt(max(discordance - difference**2, 0.0) / n),
        "low": low,
        "high": high,
        "wins": wins,
        "losses": losses,
        "p": mcnemar(wins, losses),
        "discordance": discordance,
        "resolves": resolvable(n, discordance),
        "resolves_similar": resolvable(n, TYPICAL_DISCORDANCE),
    }

"""Fixed pseudo-random orders, from an integer hash of our own.

A library's random stream may change between versions; these orders decide what
a cached result contains, so they must not.
"""

from __future__ import annotations

import numpy as np

from athanor.base.artifacts import digest


def permutation(n: int, *key: int | str) -> np.ndarray:
    """An order of range(n) as int64, a pure function of n and `key`: ranks of splitmix64 hashes."""
    salt = int(digest(list(key))[:16], 16)
    with np.errstate(over="ignore"):
        x = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.argsort(x, kind="stable")

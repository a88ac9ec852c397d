"""A training curve of bounded length that is the same after any number of resumes."""

from __future__ import annotations

import math
from typing import Any

MAX_ROWS = 2000
KEYS = ("tokens", "loss", "lr", "grad_norm")


class Curve:
    """Means over `every` steps, so that a run of any length has at most 2000 rows.

    Steps whose loss or norm is not finite were skipped in training and do not
    enter the means; a row of nothing but them holds None.
    """

    def __init__(self, steps: int) -> None:
        self.every = max(1, math.ceil(steps / MAX_ROWS))
        self._rows: list[list[float | None]] = []
        self._steps = 0
        self._finite = 0
        self._sums = [0.0, 0.0]
        self._last = [0.0, 0.0]

    def add(self, tokens: int, loss: float, rate: float, norm: float) -> None:
        self._steps += 1
        self._last = [tokens, rate]
        if math.isfinite(loss) and math.isfinite(norm):
            self._finite += 1
            self._sums = [self._sums[0] + loss, self._sums[1] + norm]
        if self._steps == self.every:
            self._rows.append(self._mean())
            self._steps, self._finite, self._sums = 0, 0, [0.0, 0.0]

    def rows(self) -> list[dict[str, float | None]]:
        """Rows of `KEYS`: tokens and lr at the end of a row's steps, means of loss and gradient norm."""
        rows = [*self._rows, self._mean()] if self._steps else self._rows
        return [dict(zip(KEYS, row, strict=True)) for row in rows]

    def _mean(self) -> list[float | None]:
        loss, norm = (total / self._finite if self._finite else None for total in self._sums)
        return [self._last[0], loss, self._last[1], norm]

    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def load(cls, state: dict[str, Any]) -> Curve:
        curve = cls(1)
        vars(curve).update(state)
        return curve

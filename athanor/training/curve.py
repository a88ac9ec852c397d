"""The history of every step of a run, and the learning curve that is made from it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

MAX_ROWS = 200  # more would be a solid block of noise in a plot; the tracking UI has every step
FIELDS = ("loss", "grad_norm", "skipped")


class History:
    """Loss, gradient norm and whether it was skipped, of each step so far: 12 bytes a step.

    Kept whole, and not as a running curve, because the rows of a curve depend
    on the length of the run, and a run of another length may go on from here.
    """

    def __init__(self) -> None:
        self._columns = [array("f") for _ in FIELDS]

    def add(self, loss: float, norm: float, skipped: float) -> None:
        for column, value in zip(self._columns, (loss, norm, skipped), strict=True):
            column.append(value)

    def steps(self) -> Iterator[tuple[float, float, float]]:
        return zip(*self._columns, strict=True)

    def __len__(self) -> int:
        return len(self._columns[0])

    def rows(self, start: int, end: int) -> list[tuple[float, float, float]]:
        """Rows of the steps after `start`, up to `end`."""
        return list(zip(*(column[start:end] for column in self._columns), strict=True))

    def begins_with(self, other: History) -> bool:
        """Whether the steps of `other` are the first of these, bit for bit: both then went the same way."""
        pairs = zip(self._columns, other._columns, strict=True)
        return all(mine[: len(theirs)].tobytes() == theirs.tobytes() for mine, theirs in pairs)

    def curve(self, batch_tokens: int, lr_at: Callable[[int], float]) -> list[dict[str, float | None]]:
        """At most 200 rows: tokens and learning rate at a row's end, means of loss and gradient norm.

        Steps that were skipped in training (not finite, or far out) do not
        enter the means; a row of nothing but them holds None.
        """
        loss, norm, skipped = self._columns
        steps_per_row = max(1, math.ceil(len(loss) / MAX_ROWS))
        rows: list[dict[str, float | None]] = []
        for start in range(0, len(loss), steps_per_row):
            end = min(start + steps_per_row, len(loss))
            accepted = [i for i in range(start, end) if not skipped[i]]
            tokens = end * batch_tokens
            means = [sum(column[i] for i in accepted) / len(accepted) if accepted else None for column in (loss, norm)]
            rows.append({"tokens": tokens, "loss": means[0], "lr": lr_at(tokens), "grad_norm": means[1]})
        return rows

    def tensors(self) -> dict[str, Tensor]:
        """FIELDS as float32 [steps]."""
        return {
            name: torch.tensor(column, dtype=torch.float32) for name, column in zip(FIELDS, self._columns, strict=True)
        }

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> History:
        history = cls()
        history._columns = [array("f", tensors[name].tolist()) for name in FIELDS]
        return history

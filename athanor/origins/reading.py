"""At which steps a training read a place of its data: the samplers of athanor/data, backwards."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from athanor.data.order import permutation
from athanor.training.skipped_ranges import SkippedRanges, skipped_before


@dataclass
class Reading:
    """A training's way through `samples` windows or rows of `context_tokens`, each once in an epoch.

    It read them in the steps that begin between `begin` and `end`, in tokens of the training.
    """

    samples: int
    context_tokens: int
    seed: int
    batch_tokens: int
    end: int
    begin: int = 0
    skipped_ranges: SkippedRanges = ()
    _ranks: list[np.ndarray] = field(default_factory=list)  # of each sample, for each epoch that was begun

    def steps(self, samples: Iterable[int]) -> list[int]:
        """Numbers of the steps that read one of these samples, ascending, from 1."""
        found = set()
        numbers = np.array([sample for sample in samples if 0 <= sample < self.samples], np.int64)
        for epoch in range(-(-self._data(self.end) // (self.samples * self.context_tokens))):
            if epoch == len(self._ranks):
                order = permutation(self.samples, self.seed, epoch)
                self._ranks.append(np.empty_like(order))
                self._ranks[epoch][order] = np.arange(self.samples)
            for rank in self._ranks[epoch][numbers].tolist():
                if step := self._step((epoch * self.samples + rank) * self.context_tokens):
                    found.add(step)
        return sorted(found)

    def _data(self, position: int) -> int:
        """The token of the data at which the step reads that begins at this position of training."""
        return position - self.begin + skipped_before(self.skipped_ranges, position)

    def _step(self, token: int) -> int | None:
        """The step that read this token of the data; None if none did."""
        steps = range(self.begin // self.batch_tokens, self.end // self.batch_tokens)
        at = bisect.bisect_right(steps, token, key=lambda step: self._data(step * self.batch_tokens)) - 1
        if at < 0 or token >= self._data(steps[at] * self.batch_tokens) + self.batch_tokens:
            return None  # left out after a spike, or behind the end
        return steps[at] + 1

"""The best of a run's validations, and its weights.

A fine-tuning that goes on for too long learns its conversations by heart, and
the last weights need not be the ones to keep. Which validation is the best is
said by a selection key that the caller makes of its scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from athanor.model.transformer import Transformer

# A larger one is better; as for tuples, the first number that differs decides.
SelectionKey = Callable[[Mapping[str, Any]], Sequence[float]]


class Best:
    """Holds the step with the highest key so far (the later of equal ones), and a copy of its weights on the host."""

    def __init__(self, step: int = 0, key: Sequence[float] = (), weights: Mapping[str, Tensor] | None = None) -> None:
        self.step, self.key, self.weights = step, list(key), dict(weights or {})

    def update(self, step: int, key: Sequence[float], model: Transformer, keep: bool) -> None:
        """Replace the best step by this one if its key is as high; a process that has to `keep` the weights copies them."""
        if self.step and list(key) < self.key:
            return
        self.step, self.key = step, list(key)
        if keep:
            self.weights = {name: weight.detach().to("cpu", copy=True) for name, weight in model.named_parameters()}

    @torch.no_grad()
    def restore_into(self, model: Transformer) -> None:
        """Give the model the weights of the best step."""
        for name, weight in model.named_parameters():
            weight.copy_(self.weights[name])


def by_stops_and_loss(min_stop_rate: float) -> SelectionKey:
    """A key that compares the rate of answers that stop where they should first, then the held-out loss.

    Below `min_stop_rate` a higher rate is better, whatever the loss: a model that does not stop is no use.
    """

    def key(scores: Mapping[str, Any]) -> Sequence[float]:
        loss = scores["loss"]
        if loss is None:  # not finite
            return [-1.0, 0.0]
        return [min(scores["stop_rate"], min_stop_rate), -loss]

    return key

"""Learning-rate schedules: pure functions of the tokens trained on, so a resume cannot shift them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warmup to `peak`, then by `shape`:

    wsd: constant until `cooldown_tokens` before the end, then
         final + (peak - final) · (1 - sqrt(share of the cooldown done)),
         or 1 - that share with `cooldown_shape` linear.
    cosine: half a cosine from peak to `final`.

    A step is given the rate at its end, so the first step already learns and
    the last one uses `final` exactly. Until the cooldown, wsd does not look at
    `total_tokens`: a longer run has the same trunk.
    """

    shape: str
    peak: float
    final: float
    warmup_tokens: int
    cooldown_tokens: int
    total_tokens: int
    cooldown_shape: str = "sqrt"

    @property
    def cooldown_start(self) -> int:
        """Tokens at which the rate begins to fall: the last moment from which a longer run can continue."""
        return self.total_tokens - self.cooldown_tokens if self.shape == "wsd" else self.warmup_tokens

    def lr_at(self, tokens: int) -> float:
        """Learning rate of the step that ends at `tokens`."""
        if tokens <= self.warmup_tokens:
            return self.peak * tokens / self.warmup_tokens
        if tokens <= self.cooldown_start:
            return self.peak
        progress = min(1.0, (tokens - self.cooldown_start) / (self.total_tokens - self.cooldown_start))
        if self.shape == "wsd":
            remaining = 1 - (progress if self.cooldown_shape == "linear" else math.sqrt(progress))
        else:
            remaining = (1 + math.cos(math.pi * progress)) / 2
        return self.final + (self.peak - self.final) * remaining


def round_down_to_steps(tokens: int, batch_tokens: int) -> int:
    """`tokens` rounded down to whole steps, at least one."""
    return max(1, tokens // batch_tokens) * batch_tokens

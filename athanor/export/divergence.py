"""How far a file's probabilities are from the model's: divergence and agreement on the best id, per position."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from athanor.artifacts import rounded

# llama.cpp takes the logarithm of an fp32 probability, which has no digits left below this.
FLOOR = -60.0
KL_FLOOR = 1e-7  # nats; below it is the noise of fp32 logarithms


def spread(length: int, positions: int) -> list[int]:
    """At most so many prefix lengths of a window, evenly spread, the whole window always among them."""
    count = min(length, positions)
    return [(number + 1) * length // count for number in range(count)]


@dataclass
class Divergence:
    """KL(model || file) in nats and whether both put the same id first, over positions."""

    nats: list[float] = field(default_factory=list)
    same: int = 0

    def add(self, model_NV: Tensor, file_NV: Tensor) -> None:
        """Log probabilities of some positions.

        Summed to one again: an error in fp32 of that sum would count in full, all others only by their square.
        """
        model_NV, file_NV = (logprobs.double().clamp(min=FLOOR).log_softmax(-1) for logprobs in (model_NV, file_NV))
        self.nats += (model_NV.exp() * (model_NV - file_NV)).sum(-1).clamp(min=0).tolist()
        self.same += int((model_NV.argmax(-1) == file_NV.argmax(-1)).sum())

    @property
    def mean(self) -> float:
        return math.fsum(self.nats) / len(self.nats)

    def facts(self) -> dict[str, Any]:
        """Two digits, and nothing below the floor: what repeats, also where the last bits do not."""
        mean, most = (rounded(value, 2) if value > KL_FLOOR else 0.0 for value in (self.mean, max(self.nats)))
        share = self.same / len(self.nats)
        return {"positions": len(self.nats), "kl_mean": mean, "kl_max": most, "same_best": rounded(share)}

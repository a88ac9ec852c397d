"""What training after fine-tuning makes smaller: token-level GRPO, and DPO. Both are told the reference's log probabilities.

GRPO: Shao et al. 2024 (arXiv:2402.03300), with the mean over all tokens of a step, two clipping bounds and
questions left out whose answers all earn the same of DAPO (Yu et al. 2025, arXiv:2503.14476). DPO: Rafailov et al. 2023
(arXiv:2305.18290), with log ratios per token, as Lambert et al. 2024 do (arXiv:2411.15124), where `normalised`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from athanor.model.loss import Targets, log_probs_and_entropies
from athanor.model.transformer import Transformer
from athanor.training.step import Readings, Rows


@dataclass(frozen=True)
class Grpo:
    """Values of a target: advantage of its answer, log probability when it was drawn and by the reference, weight.

    The weights of a step add up to the number of its targets.
    """

    kl_coefficient: float
    clip_low: float
    clip_high: float

    def readings(self, rows: Rows, supervised_BT: np.ndarray) -> Readings:
        divisor = max(1, int(supervised_BT.sum()))
        known = dict(sorted(getattr(rows, "known", {}).items()))  # in one order, drawn or read from a file
        return Readings(divisor, dict.fromkeys(("policy.kl", "policy.entropy", "policy.clip_share"), divisor), known)

    def loss(self, model: Transformer, batch: Targets, divisor: int, sums_K: Tensor) -> Tensor:
        assert batch.values_NK is not None
        advantage_N, drawn_N, reference_N, weight_N = batch.values_NK.unbind(1)
        logp_N, entropy_N = log_probs_and_entropies(model, batch)
        ratio_N = (logp_N - drawn_N).exp()
        clipped_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain_N = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
        # Schulman 2020, http://joschu.net/blog/kl-approx.html: unbiased, and never negative.
        difference_N = reference_N - logp_N
        kl_N = difference_N.exp() - difference_N - 1
        with torch.no_grad():
            bound_N = gain_N < ratio_N * advantage_N
            sums_K += torch.stack((kl_N.sum(), entropy_N.sum(), bound_N.float().sum()))
        return (weight_N * (self.kl_coefficient * kl_N - gain_N)).sum() / divisor


@dataclass(frozen=True)
class Dpo:
    """Values of a target: number of its pair in the batch, +1 in the chosen answer and -1 in the other, 1 / answer's
    targets, log probability by the reference."""

    beta: float
    normalised: bool
    names: tuple[str, ...] = field(
        default=("policy.margin", "policy.accuracy", "policy.chosen", "policy.rejected"), init=False
    )

    def readings(self, rows: Rows, supervised_BT: np.ndarray) -> Readings:
        pairs = max(1, int(getattr(rows, "pairs", 0)))
        return Readings(pairs, dict.fromkeys(self.names, pairs))

    def loss(self, model: Transformer, batch: Targets, divisor: int, sums_K: Tensor) -> Tensor:
        assert batch.values_NK is not None
        pair_N, side_N, share_N, reference_N = batch.values_NK.unbind(1)
        pair_N = pair_N.long()
        ratio_N = log_probs_and_entropies(model, batch)[0] - reference_N

        def by_pair(values_N: Tensor) -> Tensor:
            return torch.zeros(divisor, device=values_N.device).index_add(0, pair_N, values_N)

        weight_N = side_N * share_N if self.normalised else side_N
        margin_P = self.beta * by_pair(weight_N * ratio_N)
        here_P = by_pair(share_N) > 0  # pairs of this micro-batch
        with torch.no_grad():
            chosen_P, rejected_P = (by_pair((side_N == side) * share_N * ratio_N) for side in (1, -1))
            ahead_P = (margin_P > 0) & here_P
            sums_K += torch.stack([each.sum() for each in (margin_P, ahead_P.float(), chosen_P, rejected_P)])
        return (-F.logsigmoid(margin_P) * here_P).sum() / divisor

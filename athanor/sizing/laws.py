"""Laws that say what a size, a length and a batch are worth, in numbers that others published and ours.

Pure functions. "Weights" are those of matrix products: all of a model but the
embedding, which is only looked up. They decide time and quality alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from athanor.model.config import ModelConfig
from athanor.model.flops import block_weights

# Repeated text: what further epochs are worth decays with this many (Muennighoff et al. 2023, arXiv:2305.16264, R*_D).
EPOCHS_DECAY = 15.39
OVERFIT_PASSES, MAX_PASSES = 1.5, 17
# Hoffmann et al. 2022, arXiv:2203.15556, table A9's approach 3 with the exponents of Besiroglu et al. 2024,
# arXiv:2404.10102: at a given effort both grow with about its square root, near twenty tokens for each weight.
TOKENS_PER_WEIGHT = 20
# Best batch and rate of AdamW by tokens and parameters without embeddings (Li et al. 2025, arXiv:2503.04715).
BATCH_FACTOR, BATCH_TOKENS = 0.58, 0.571
LR_WEIGHTS, LR_TOKENS = -0.713, 0.307
# Ours with Muon, anchored where it was measured: the default (docs/decisions.md).
LR_ANCHOR, ANCHOR_WEIGHTS, ANCHOR_TOKENS = 0.004, 2_853_000, 1_000_000
MAX_LR = 0.0067


@dataclass(frozen=True)
class LossLaw:
    """Bits per byte of held-out text: floor + size · weights^-alpha + data · tokens^-beta, weights and tokens in millions.

    The form is that of Hoffmann et al. 2022; `source` says what it was fitted to. Where a small text is read again and
    again, a model learns it by heart: overfit · weights / different tokens · (passes - 1)^1.5 more.
    """

    floor: float
    size: float
    alpha: float
    data: float
    beta: float
    source: str
    overfit: float = 0.0
    most_weights: float = math.inf  # for each different token; nothing larger was measured

    def bits_per_byte(self, weights: float, tokens: float, unique_tokens: float = math.inf) -> float:
        fresh = effective_tokens(tokens, unique_tokens)
        learned = self.floor + self.size * (weights / 1e6) ** -self.alpha + self.data * (fresh / 1e6) ** -self.beta
        again = max(0.0, tokens / unique_tokens - 1)
        return learned + self.overfit * weights / unique_tokens * again**OVERFIT_PASSES

    def most_tokens(self, weights: float, unique_tokens: float) -> float:
        """The longest training that gains anything: from here on it is learned by heart."""
        lengths = [unique_tokens * passes / 20 for passes in range(20, 20 * MAX_PASSES)]
        best = min(lengths, key=lambda tokens: self.bits_per_byte(weights, tokens, unique_tokens))
        return math.inf if best == lengths[-1] else best


def matrix_weights(config: ModelConfig) -> int:
    """Weights that a token is multiplied with: the blocks' and the output matrix."""
    return block_weights(config) + config.vocab_size * config.dim


def effective_tokens(tokens: float, unique_tokens: float) -> float:
    """How many fresh tokens are worth as much as these, when `unique_tokens` of them are different."""
    if tokens <= unique_tokens:
        return tokens
    return unique_tokens * (1 + EPOCHS_DECAY * (1 - math.exp(-(tokens / unique_tokens - 1) / EPOCHS_DECAY)))


def batch_tokens(tokens: float, context_tokens: int) -> int:
    """Tokens of a step for a run of this length: a power of two, or one and a half, of whole rows."""
    wanted = BATCH_FACTOR * tokens**BATCH_TOKENS / context_tokens
    sizes = [rows for power in range(24) for rows in (1 << power, 3 << power)]
    return context_tokens * min(sizes, key=lambda rows: abs(math.log(rows / max(wanted, 1.0))))


def learning_rate(weights: float, tokens: float) -> float:
    """The best rate at that batch, two digits: the published exponents through our own measured point."""
    rate = LR_ANCHOR * (weights / ANCHOR_WEIGHTS) ** LR_WEIGHTS * (tokens / ANCHOR_TOKENS) ** LR_TOKENS
    return float(f"{min(rate, MAX_LR):.2g}")


# Of web text with 4.67 bytes in a token: the fit of Besiroglu et al. 2024 (arXiv:2404.10102) to Hoffmann et al.'s runs,
# 1.8172 + 482.01 N^-0.3478 + 2085.43 D^-0.3658 in nats for a token. nanochat's d20 (561M, 11.2B tokens) ended near 0.81.
_BITS = 1 / (math.log(2) * 4.67)
WEB = LossLaw(
    1.8172 * _BITS,
    482.01 * _BITS * 1e6**-0.3478,
    0.3478,
    2085.43 * _BITS * 1e6**-0.3658,
    0.3658,
    "a published law of web text, not tried here",
)
# Of the default's text with its recipe: seven runs of 1.2M to 5.6M weights on 0.5M to 3M tokens, each met within 0.7 %
# (docs/recipe.md). Smaller exponents are not excluded by so few. `overfit` is from two runs of 2.9M weights on 2.5M different
# tokens, 0.028 bits per byte above the rest after 2.3 passes and 0.29 after 7; one of 1.2M weights met the law after 1.9.
PYTHON = LossLaw(
    0.943, 0.254, 0.341, 0.336, 0.572, "± 5 % for the default's text, to whose runs this is fitted", 0.017, 4.5
)

"""Arithmetic of a model, counted: floating-point operations (a multiply-add is two).

Matrix products only, as is usual: norms, rotary positions, softmax and the
look-up in the embedding are below one per cent. Attention counts the pairs of
query and key that the mask allows. Kernels that compute forbidden pairs too,
as dense ones do, get no credit for them; so torch's counter, which knows
nothing of masks, agrees where all pairs are allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from athanor.model.config import ModelConfig

if TYPE_CHECKING:  # `athanor plan` counts without loading numpy
    import numpy as np

BACKWARD = 2  # times the forward: a product for the inputs, one for the weights


def block_weights(config: ModelConfig) -> int:
    """Weights of all blocks' matrices; each is one multiply-add per token."""
    attention = config.dim * config.head_dim * 2 * (config.heads + config.kv_heads)
    return config.layers * (attention + 3 * config.dim * config.ffn_dim)


def pass_flops(config: ModelConfig, tokens: float, pairs: float, targets: float) -> float:
    """Operations of a forward pass: `tokens` through the blocks, `pairs` of query and key, `targets` through the head."""
    scores = config.layers * 2 * config.heads * config.head_dim * pairs
    return 2 * (block_weights(config) * tokens + scores + config.vocab_size * config.dim * targets)


def run_flops(config: ModelConfig, tokens: float, pairs: float, targets: float) -> float:
    """Operations of training on them: forward and backward. Weights that stay have no product of their own."""
    if config.adapters:
        return 2 * pass_flops(config, tokens, pairs, targets) + (1 + BACKWARD) * 2 * config.adapters * tokens
    return (1 + BACKWARD) * pass_flops(config, tokens, pairs, targets)


def forward_flops(config: ModelConfig, row_tokens: int, *, causal: bool = True) -> float:
    """Operations of a forward pass per token, in rows of `row_tokens` that are one document and all targets.

    Without `causal`, all pairs count: what a dense kernel does and torch's counter sees.
    """
    return pass_flops(config, 1, (row_tokens + 1) / 2 if causal else row_tokens, 1)


def training_flops(config: ModelConfig, row_tokens: int, *, causal: bool = True) -> float:
    """Operations of forward and backward per token, in such rows."""
    return run_flops(config, 1, (row_tokens + 1) / 2 if causal else row_tokens, 1)


def allowed_pairs(document_BT: np.ndarray, *, document_mask: bool) -> int:
    """Pairs of query and key that causal attention may use, in rows with these document numbers.

    A document of n positions has n (n + 1) / 2 of them; without `document_mask` a row counts as one document.
    Padding has a number as well, so its pairs count: they are computed.
    """
    import numpy as np

    B, T = document_BT.shape
    if not document_mask:
        return B * (T * (T + 1) // 2)
    sorted_BT = np.sort(document_BT, axis=1)
    starts_BT = np.ones((B, T), dtype=bool)
    starts_BT[:, 1:] = sorted_BT[:, 1:] != sorted_BT[:, :-1]
    lengths = np.diff(np.flatnonzero(starts_BT), append=B * T)
    return int((lengths * (lengths + 1) // 2).sum())

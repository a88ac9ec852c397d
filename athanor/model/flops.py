"""Arithmetic of a model, counted: floating-point operations per token."""

from __future__ import annotations

from athanor.model.config import ModelConfig


def forward_flops(config: ModelConfig, row_tokens: int, *, causal: bool = True) -> float:
    """Operations of one forward pass per token, in rows of `row_tokens` (a multiply-add is two).

    Matrix products only, as is usual; embedding look-up, norms and rotary
    positions are below one per cent. With `causal`, attention counts the pairs
    that the causal mask allows, else all pairs, which is what dense kernels do.
    """
    attention = config.dim * config.head_dim * 2 * (config.heads + config.kv_heads)
    matrices = config.layers * (attention + 3 * config.dim * config.ffn_dim) + config.vocab_size * config.dim
    pairs = (row_tokens + 1) / 2 if causal else row_tokens
    scores = config.layers * 2 * config.heads * config.head_dim * pairs
    return 2 * (matrices + scores)


def training_flops(config: ModelConfig, row_tokens: int, *, causal: bool = True) -> float:
    """Operations of forward and backward per token; backward costs twice the forward."""
    return 3 * forward_flops(config, row_tokens, causal=causal)

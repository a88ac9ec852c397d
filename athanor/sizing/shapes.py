"""The ladder of model shapes that a recipe chooses from: heads of 64, widths that are multiples of it.

Layers follow the width about as in nanochat's dial (a layer for each 64 of
width), with a layer more where models are narrow, which is what our own
smallest models gained by. An MLP is 10/3 of the width, in multiples of 64.
"""

from __future__ import annotations

from typing import NamedTuple

from athanor.hardware.shape import round_up
from athanor.model.config import ModelConfig

HEAD = 64
WIDTHS = {
    128: 3, 192: 4, 256: 5, 320: 6, 384: 7, 448: 8, 512: 9, 640: 10, 768: 12, 896: 14, 1024: 16, 1280: 20, 1536: 24, 2048: 28
}  # fmt: skip
# Contexts and vocabularies by weights: a short row wastes attention on nobody, a small vocabulary leaves room for blocks.
CONTEXTS = ((15e6, 256), (60e6, 512), (200e6, 1024), (float("inf"), 2048))
VOCABULARIES = ((10e6, 8192), (40e6, 16_384), (300e6, 32_768), (float("inf"), 48_000))
GROUPED_FROM = 768  # width, from which three query heads share keys: smaller caches in chat, no loss seen by others
THETAS = {256: 10_000.0, 512: 10_000.0, 1024: 10_000.0, 2048: 50_000.0}


class Shape(NamedTuple):
    """A rung of the ladder, without its vocabulary."""

    dim: int
    layers: int

    @property
    def heads(self) -> int:
        return self.dim // HEAD

    @property
    def kv_heads(self) -> int:
        if self.dim < GROUPED_FROM:
            return self.heads
        return max(n for n in range(1, self.heads) if self.heads % n == 0 and self.heads // n in (2, 3, 4))

    @property
    def ffn_dim(self) -> int:
        return round_up(self.dim * 10 // 3 - HEAD // 2, HEAD)

    @property
    def block_weights(self) -> int:
        return self.layers * (2 * self.dim * HEAD * (self.heads + self.kv_heads) + 3 * self.dim * self.ffn_dim)

    def by_weights(self, table: tuple[tuple[float, int], ...]) -> int:
        return next(value for limit, value in table if self.block_weights <= limit)

    def config(self, vocab_size: int, context_tokens: int) -> ModelConfig:
        return ModelConfig(
            vocab_size=vocab_size, layers=self.layers, dim=self.dim, heads=self.heads, kv_heads=self.kv_heads,
            head_dim=HEAD, ffn_dim=self.ffn_dim, context_tokens=context_tokens, rope_theta=THETAS[context_tokens],
            norm_eps=1e-6, qk_norm=True, tied_embeddings=self.dim >= GROUPED_FROM,
        )  # fmt: skip


LADDER = tuple(Shape(dim, layers) for dim, layers in WIDTHS.items())

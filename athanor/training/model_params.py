"""The `model` section of params.yaml: the shape of the network."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param
from athanor.model.config import ModelConfig

# Smallest rotary base that keeps distant positions apart, by context length
# (Men et al., "Base of RoPE Bounds Context Length", 2024, table 2).
THETA_FLOOR = ((1024, 4.3e3), (2048, 1.6e4), (4096, 2.7e4), (8192, 8.4e4), (16384, 3.1e5), (32768, 6.4e5))


@dataclass(frozen=True, kw_only=True)
class ModelParams:
    vocab_size: int | None = param(
        min=256, max=1_000_000, default=None
    )  # null: the tokenizer's; a number must equal it
    layers: int = param(min=1, max=1000)
    dim: int = param(min=8, max=65536)
    heads: int = param(min=1, max=1024)
    kv_heads: int = param(min=1, max=1024)  # divides heads
    head_dim: int = param(min=4, max=1024)
    ffn_dim: int = param(min=8, max=1_000_000)
    context_tokens: int = param(min=16, max=1_048_576)
    rope_theta: float = param(min=100)
    norm_eps: float = param(min=1e-8, max=1e-3, default=1e-6)  # what Qwen3 has, whose architecture the export is
    qk_norm: bool  # a norm per query and key head; the export is then of the Qwen3 architecture
    tied_embeddings: bool = True  # the embedding is the output matrix, too; false: one of its own

    def __post_init__(self) -> None:
        if not self.qk_norm and self.heads * self.head_dim != self.dim:
            raise ParamsError(
                f"{self.heads} heads of {self.head_dim} make {self.heads * self.head_dim}, dim is {self.dim}",
                where="head_dim",
                fix="make heads · head_dim equal to dim, or set qk_norm: true",
            )
        for context, floor in THETA_FLOOR:
            if self.context_tokens > context // 2 and self.context_tokens <= context and self.rope_theta < floor:
                raise ParamsError(
                    f"{self.rope_theta:g} is too small for a context of {self.context_tokens}",
                    where="rope_theta",
                    fix=f"use a value ≥ {floor:g}",
                )
        self.config(self.vocab_size or 256)  # its rules on heads and widths

    def config(self, vocab_size: int) -> ModelConfig:
        """The model's config for a tokenizer of `vocab_size` ids; ParamsError if another size was asked for."""
        if self.vocab_size not in (None, vocab_size):
            raise ParamsError(
                f"{self.vocab_size} asked for, the tokenizer has {vocab_size}",
                where="model.vocab_size",
                fix=f"set it to null, or tokenizer.vocab_size to {self.vocab_size}",
            )
        return ModelConfig(**{**dataclasses.asdict(self), "vocab_size": vocab_size})

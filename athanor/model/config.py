"""The shape of a model and the exact number of its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from athanor.base.errors import ParamsError


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped decoder; with `qk_norm` it is Qwen3-shaped.

    Pre-RMSNorm, rotary positions (half rotation), grouped-query attention,
    SwiGLU, no biases. With `tied_embeddings` the embedding is the output matrix, too.
    """

    vocab_size: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    context_tokens: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    tied_embeddings: bool = True
    # Of weights added to a model that stays as it is (LoRA); 0 for a model that is trained whole.
    adapters: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "dim", "heads", "kv_heads", "head_dim", "ffn_dim", "context_tokens"):
            if getattr(self, name) < 1:
                raise ParamsError(f"{getattr(self, name)} is out of range", where=name, fix="use a value ≥ 1")
        if self.heads % self.kv_heads:
            raise ParamsError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly",
                where="kv_heads",
                fix=f"use a divisor of {self.heads}",
            )
        if self.head_dim % 2:
            raise ParamsError(f"rotary positions need an even head_dim, not {self.head_dim}", where="head_dim")

    def parameter_count(self) -> int:
        """Exact number of parameters; a tied embedding counts once."""
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        norms = 2 * self.dim + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + 3 * self.dim * self.ffn_dim + norms
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.dim
        return embeddings + self.layers * layer + self.dim

    def trained_count(self) -> int:
        """Parameters that have gradients and an optimiser's state."""
        return self.adapters or self.parameter_count()

    def stored_bytes(self) -> int:
        """Bytes of all weights in memory, as fp32 masters."""
        return 4 * self.parameter_count()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`; unknown or missing keys raise ParamsError.

        Files from before there was a choice lack `tied_embeddings`: those models are tied.
        """
        values = {"tied_embeddings": True, **values}
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) != names:
            odd = sorted(set(values) ^ names)
            raise ParamsError(f"model config has missing or unknown keys: {', '.join(odd)}", where="config.json")
        return cls(**values)

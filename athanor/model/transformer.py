"""The decoder: Llama's arithmetic, Hugging Face's parameter names, nothing else.

Knows nothing of devices, parallelism or training. Shapes: B rows, T tokens,
S key slots, D width, H query heads, K key-value heads, E head width, V ids.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from athanor.model import varlen
from athanor.model.config import ModelConfig
from athanor.model.kernels import attention, attention_bias, feed_forward, use_cpu_attention, use_cpu_kernel
from athanor.model.precision import autocast_dtype

INIT_STD = 0.02
INIT_EXCESS_NATS = 0.05
UNTIED_EMBEDDING_STD = 0.2
UNTIED_HEAD_STD = 0.001


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing: weights are drawn by `initialise` or loaded. Torch's own way imports its compiler, a second."""


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing, as above."""


class Cache(Protocol):
    """What the model asks of a key-value cache; a protocol, so that training does not depend on decoding's."""

    def reserve(self, width: int, positions_BT: Tensor | None) -> tuple[Tensor, Tensor | None]: ...

    def store(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]: ...


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, statistics in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(self.weight.dtype)).to(x.dtype)


def rotary_table(config: ModelConfig, length: int, device: torch.device | None = None) -> Tensor:
    """Cosines and sines of every position: [length, 2, E/2], fp32.

    Computed in fp32 like Hugging Face does, so that exports agree bit for bit.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float() / config.head_dim
    frequency_E = 1.0 / (config.rope_theta**exponent)
    angle_TE = torch.arange(length, device=device).float()[:, None] * frequency_E
    return torch.stack((angle_TE.cos(), angle_TE.sin()), 1)


def rotate(x_BTHE: Tensor, table: Tensor) -> Tensor:
    """Rotary positions, half rotation: element i pairs with i + E/2. Table: [T or B,T, 2, E/2]."""
    cos, sin = table[..., None, 0, :], table[..., None, 1, :]
    first, second = x_BTHE.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BTHE.dtype)


def attend(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Attention by torch's kernels, [B, H, T, E]; each of the K key heads serves H / K query heads.

    `mask`: bool or a bias, broadcast to [B, H, T, S]; or the starts of documents, see athanor/model/varlen.py.
    """
    if mask is not None and mask.dim() == 1:
        if q_BHTE.device.type == "cuda" and q_BHTE.dtype != torch.float32:
            return varlen.attend(q_BHTE, k_BKSE, v_BKSE, mask)
        mask = block_mask(varlen.documents_of(mask, q_BHTE.shape[0], q_BHTE.shape[2]))
    k_BKSE, v_BKSE = fit_groups(q_BHTE, k_BKSE, v_BKSE)
    grouped = q_BHTE.shape[1] != k_BKSE.shape[1]
    return F.scaled_dot_product_attention(q_BHTE, k_BKSE, v_BKSE, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def fit_groups(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as all of torch's fused kernels take them: on an accelerator one head for each query head.

    There flash kernels take no mask and no fp32, and memory-efficient ones no groups (torch 2.13, sdp_utils.cpp). For
    rows with several documents torch would take the math kernel on most chips, which writes every score to memory:
    3.99 GiB at 4,000 tokens on an RTX 4090 (ComfyUI, pull request 15135).
    """
    groups = q_BHTE.shape[1] // k_BKSE.shape[1]
    if groups == 1 or q_BHTE.device.type == "cpu":
        return k_BKSE, v_BKSE
    return k_BKSE.repeat_interleave(groups, 1), v_BKSE.repeat_interleave(groups, 1)


class Attention(nn.Module):
    """Grouped-query attention with optional per-head RMSNorm on queries and keys."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.dim, queries, bias=False)
        self.k_proj = Linear(config.dim, keys, bias=False)
        self.v_proj = Linear(config.dim, keys, bias=False)
        self.o_proj = Linear(queries, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_BTD: Tensor, table: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        q_BTHE = self.q_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKE = self.k_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKE = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        q = rotate(q_BTHE, table).transpose(1, 2)
        k, v = rotate(k_BTKE, table).transpose(1, 2), v_BTKE.transpose(1, 2)
        causal = mask is None
        if cache is not None:
            k, v = cache.store(self.layer, k, v)
            causal = causal and k.shape[2] == q.shape[2]  # one new token may see every slot
        if mask is not None and mask.is_floating_point():  # a bias, made for the kernel by hand
            mask = mask.to(q.dtype)
        return self.o_proj(attend(q, k, v, mask, causal).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x_BTD: Tensor, table: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        by_hand = cache is None and use_cpu_kernel(x_BTD) and not self._hooked()
        norm, attn, mlp = self.input_layernorm, self.self_attn, self.mlp
        if by_hand and use_cpu_attention(x_BTD):
            projections = (attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight, attn.o_proj.weight)
            gains = None if attn.q_norm is None or attn.k_norm is None else (attn.q_norm.weight, attn.k_norm.weight)
            bias_BTT = None if mask is None else mask[:, 0]
            x_BTD = attention(x_BTD, norm.weight, projections, gains, table, bias_BTT, norm.eps)
        else:
            x_BTD = x_BTD + attn(norm(x_BTD), table, mask, cache)
        norm = self.post_attention_layernorm
        if by_hand:
            matrices = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
            return feed_forward(x_BTD, norm.weight, *matrices, norm.eps)
        return x_BTD + mlp(norm(x_BTD))

    def _hooked(self) -> bool:
        """Whether somebody looks at a part of this block: then it works module by module."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self.modules())


class Decoder(nn.Module):
    """The part that Hugging Face calls `model`: embedding, blocks, final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)


class Transformer(nn.Module):
    """A decoder and its output matrix. `fresh` makes one to train; built directly, its weights mean nothing yet."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tied_embeddings:
            self.lm_head = Linear(config.dim, config.vocab_size, bias=False)
        rotary = rotary_table(config, config.context_tokens, torch.device("cpu"))  # never on meta, see Embedding
        self.register_buffer("rotary", rotary, persistent=False)

    @classmethod
    def fresh(cls, config: ModelConfig, seed: int) -> Transformer:
        """An untrained model on the CPU, decided by the seed alone; no global random state is touched."""
        with torch.device("meta"):
            model = cls(config)
        model = model.to_empty(device="cpu")
        model.restore_rotary()
        model.initialise(torch.Generator().manual_seed(seed))
        return model

    def restore_rotary(self) -> None:
        """Recompute the position table; needed after building on the meta device."""
        self.rotary = rotary_table(self.config, self.config.context_tokens, self.head_weight.device)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw N(0, 0.02) weights; those that write to the residual stream are damped by 1/sqrt(2·layers).

        The embedding has its own size, see `embedding_std`. An output matrix of
        its own comes last and is small, so that the first loss is ln V; zeros
        would let no gradient through to the blocks.
        """
        damped = INIT_STD / (2 * self.config.layers) ** 0.5
        stds = {"embed_tokens": embedding_std(self.config), "lm_head": UNTIED_HEAD_STD}
        stds |= {"o_proj": damped, "down_proj": damped}
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                weight.fill_(1.0)
                continue
            weight.normal_(0.0, stds.get(name.split(".")[-2], INIT_STD), generator=generator)

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V, D]: the embedding itself, or a matrix of its own."""
        return self.model.embed_tokens.weight if self.config.tied_embeddings else self.lm_head.weight

    def forward(
        self,
        ids_BT: Tensor,
        *,
        document_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of the next id at every position; arguments as in `hidden`."""
        h_BTD = self.hidden(ids_BT, document_BT=document_BT, positions_BT=positions_BT, cache=cache)
        return F.linear(h_BTD, self.head_weight)

    def hidden(
        self,
        ids_BT: Tensor,
        *,
        document_BT: Tensor | None = None,
        starts_M: Tensor | None = None,
        positions_BT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Final hidden states [B, T, D], after the last norm.

        Without a cache, positions run 0..T-1 along the row. `document_BT`
        (integers) confines attention to equal numbers; positions still run on
        over a document's start, because rotary attention only sees differences.
        `starts_M` says the same by the positions at which documents start.

        With a cache, tokens continue every row at `cache.length`; rows of
        unequal length pass `positions_BT` instead: the place of each token in
        its own row, -1 for padding (left or right). Padding is never attended
        to, and its own output means nothing.
        """
        T = ids_BT.shape[1]
        mask: Tensor | None = None
        if cache is not None:
            if document_BT is not None:
                raise ValueError("a cache holds one document per row; document_BT is for rows without a cache")
            positions_BT, mask = cache.reserve(T, positions_BT)
            table = self.rotary[positions_BT]
        elif positions_BT is not None:
            raise ValueError("positions_BT needs a cache; rows without one count from 0")
        else:
            table = self.rotary[:T]
            if T > self.config.context_tokens:
                raise ValueError(f"{T} tokens exceed the context of {self.config.context_tokens}")
            if starts_M is not None:
                mask = starts_M
            elif document_BT is not None:
                mask = block_mask(document_BT)
        x_BTD = self.model.embed_tokens(ids_BT)
        if autocast_dtype(x_BTD.device) is torch.bfloat16:
            x_BTD = x_BTD.bfloat16()  # the residual stream: half the bytes of norms and sums; fp16 could overflow
        if mask is not None and cache is None and use_cpu_attention(x_BTD):
            mask = attention_bias(mask)  # once, and not in every layer
        for block in self.model.layers:
            x_BTD = block(x_BTD, table, mask, cache)
        return self.model.norm(x_BTD)


def embedding_std(config: ModelConfig) -> float:
    """Standard deviation of a fresh embedding.

    A tied one is also the output matrix: normed states make logits of variance
    width · std², and half of that is what the first loss exceeds ln V by. Wide
    models get a smaller one, to keep the excess at 0.05. One of its own has no
    part in the logits; 0.2 gave a better model than 0.02 and 0.8.
    """
    if not config.tied_embeddings:
        return UNTIED_EMBEDDING_STD
    return min(INIT_STD, (2 * INIT_EXCESS_NATS / config.dim) ** 0.5)


def block_mask(document_BT: Tensor) -> Tensor:
    """Which positions may see which: same document and not later. Bool [B, 1, T, T]."""
    T = document_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=document_BT.device).tril()
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return (same_BTT & causal_TT)[:, None]

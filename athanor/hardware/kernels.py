"""Attention kernels: which work here, whether they are right, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from athanor.hardware.timing import compare
from athanor.model.config import ModelConfig
from athanor.model.precision import AUTOCAST
from athanor.model.transformer import block_mask
from athanor.training.attention import KERNELS
from athanor.training.compiling import first_line

# Largest difference from fp32 attention, relative to the largest value. Half formats carry 8 and 11 bits.
TOLERANCE = {"fp32": 1e-4, "bf16": 4e-2, "fp16": 1e-2}
_MOST_SCORES = 1 << 26  # rows · heads · tokens², so that the reference is quick and fits


def attention(
    config: ModelConfig, rows: int, precision: str, device: torch.device, budget_seconds: float
) -> dict[str, Any]:
    """Every attention kernel at the model's shape, forward and backward, with and without documents in a row."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    T = config.context_tokens
    rows = max(1, min(rows, _MOST_SCORES // (config.heads * T * T)))
    heads = (config.heads, config.kv_heads, config.kv_heads)
    wide = [_random(rows, count, T, config.head_dim, device=device) for count in heads]
    document_BT = (torch.arange(T, device=device) * 4 // T).expand(rows, T)
    masks = {"plain": None, "documents": block_mask(document_BT)}
    grouped = config.heads != config.kv_heads
    narrow = [part.to(AUTOCAST[precision] or torch.float32) for part in wide]

    def run(parts: list[Tensor], mask: Tensor | None) -> list[Tensor]:
        inputs = [part.detach().requires_grad_(True) for part in parts]
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]

    with sdpa_kernel([SDPBackend.MATH]):
        truth = {name: run(wide, mask) for name, mask in masks.items()}
    kernels: dict[str, Any] = {name: {"works": False, "why": ""} for name in KERNELS}
    for kind, mask in masks.items():
        calls: dict[str, Callable[[], Any]] = {}
        for name in KERNELS:

            def call(name: str = name, mask: Tensor | None = mask) -> list[Tensor]:
                with sdpa_kernel([getattr(SDPBackend, KERNELS[name])]):
                    return run(narrow, mask)

            try:
                error = _difference(call(), truth[kind])
                if not error <= TOLERANCE[precision]:
                    raise RuntimeError(f"wrong by {error:.1g} of the largest value")
            except (RuntimeError, AttributeError) as problem:
                kernels[name]["why"] = kernels[name]["why"] or f"{kind}: {first_line(problem)}"
                continue
            calls[name] = call
            kernels[name][f"{kind}_error"] = error
        for name, seconds in compare(calls, device, budget_seconds / len(masks)).items():
            kernels[name][f"{kind}_seconds"] = seconds
    # Flash takes no mask on a GPU: rows with documents then go to the quickest that does.
    masked = min((row["documents_seconds"] for row in kernels.values() if "documents_seconds" in row), default=0.0)
    for row in kernels.values():
        row["works"] = "plain_seconds" in row
        if row["works"]:
            row["seconds"] = row["plain_seconds"] + row.get("documents_seconds", masked)
    used = {kind: _dispatched(narrow, mask, grouped) for kind, mask in masks.items()}
    defaults = {"default": used["plain"], "default_documents": used["documents"]}
    return {"precision": precision, "rows": rows, **defaults, "kernels": kernels}


def _dispatched(parts: list[Tensor], mask: Tensor | None, grouped: bool) -> str:
    """The kernel that torch takes by itself, for inputs that need a gradient."""
    from torch.nn.attention import SDPBackend

    inputs = [part.detach().requires_grad_(True) for part in parts]
    number = torch._fused_sdp_choice(*inputs, mask, 0.0, mask is None, enable_gqa=grouped)
    there = {name: backend for name, backend in KERNELS.items() if hasattr(SDPBackend, backend)}
    names = {int(getattr(SDPBackend, backend)): name for name, backend in there.items()}
    return names.get(int(number), str(number))


def _difference(found: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, truth, strict=True))


def _random(*shape: int, device: torch.device) -> Tensor:
    """The same numbers whenever asked; the global generator is left alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)

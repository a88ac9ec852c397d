"""Attention by torch's kernels: every path against the plain one, and which kernel each chip takes for it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from athanor.model import gpu_family, transformer
from athanor.model.config import ModelConfig
from athanor.model.gpu_family import Architecture
from athanor.model.transformer import Transformer, attend, block_mask, fit_groups

B, H, K, T, E = 2, 6, 2, 12, 8
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])


def repeated(q, k, v):
    """What an accelerator is given, on this processor."""
    groups = q.shape[1] // k.shape[1]
    assert fit_groups(q.to("meta"), k.to("meta"), v.to("meta"))[0].shape == q.shape
    return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kv_heads", [H, K])
@pytest.mark.parametrize("masked", [False, True])
def test_each_path_is_softmax_of_the_scores(monkeypatch, masked, kv_heads, dtype, accelerator):
    if accelerator:
        monkeypatch.setattr(transformer, "fit_groups", repeated)
    draw = torch.Generator().manual_seed(1)
    exact = [torch.randn(B, heads, T, E, generator=draw) for heads in (H, kv_heads, kv_heads)]
    visible = block_mask(DOCUMENTS if masked else torch.zeros_like(DOCUMENTS))

    def outcome(dtype, plain):
        q, k, v = (tensor.to(dtype).requires_grad_() for tensor in exact)
        if plain:
            wide_k, wide_v = (tensor.repeat_interleave(H // kv_heads, 1) for tensor in (k, v))
            out = (q @ wide_k.mT / E**0.5).masked_fill(~visible, float("-inf")).softmax(-1) @ wide_v
        else:
            out = attend(q, k, v, visible if masked else None, not masked)
        out.float().square().sum().backward()
        return [tensor.detach().float() for tensor in (out, q.grad, k.grad, v.grad)]

    for found, expected in zip(outcome(dtype, False), outcome(torch.float32, True), strict=True):
        assert (found - expected).abs().max() <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))


def taken(chip: Architecture, capability: tuple[int, int] | None, dtype: torch.dtype, mask: bool, groups: bool) -> str:
    """The kernel of torch 2.13 for a chip (`capability` None: AMD), as aten's sdp_utils.cpp decides."""
    half = dtype != torch.float32
    modern = capability is None or capability >= (8, 0)
    works = {
        "flash": half and modern and not mask,
        "efficient": not groups,
        "math": True,
        "cudnn": half and capability is not None and modern,
    }
    prefers_cudnn = capability in ((9, 0), (10, 0))
    order = (["cudnn"] if prefers_cudnn else []) + ["flash", "efficient", "math", "cudnn"]
    return next(name for name in order if works[name])


CHIPS = [(gpu_family.nvidia(capability), capability) for capability, *_ in gpu_family.NVIDIA]
CHIPS += [(gpu_family.nvidia(capability), capability) for capability in ((8, 6), (12, 0))]
CHIPS += [(gpu_family.amd(target), None) for target in gpu_family.AMD]
FUSED = [(chip, capability) for chip, capability in CHIPS if chip.fused_attention]
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("chip", "capability"), FUSED, ids=[chip.name for chip, _ in FUSED])
def test_no_row_of_training_takes_the_math_kernel(monkeypatch, chip, capability, documents):
    """Grouped heads under a document mask did on every chip but Hopper's and Blackwell's servers."""
    for precision in ("fp32", *chip.native):
        kernels = []

        def record(q, k, v, attn_mask, is_causal, enable_gqa, dtype=FORMATS[precision], kernels=kernels):
            kernels.append(taken(chip, capability, dtype, attn_mask is not None, enable_gqa))
            return torch.empty_like(q)

        monkeypatch.setattr(F, "scaled_dot_product_attention", record)
        config = ModelConfig(64, 2, 48, H, K, 8, 64, T, 1e4, 1e-6, True)
        with torch.device("meta"):
            model = Transformer(config)
            model.restore_rotary()
            model(torch.zeros(B, T, dtype=torch.int64), document_BT=DOCUMENTS.to("meta") if documents else None)
        assert len(kernels) == 2 and "math" not in kernels, precision

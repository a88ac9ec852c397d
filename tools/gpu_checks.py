"""Parts of tools/gpu_report.py that compare results of a device with those of a CPU in fp32."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from athanor.hardware.kernels import fastest
from athanor.model.config import ModelConfig
from athanor.model.loss import Targets, training_loss
from athanor.model.precision import AUTOCAST, autocast, products
from athanor.model.transformer import Transformer, block_mask
from athanor.training.attention import DEFAULT, KERNELS, VARLEN
from athanor.training.attention import attention as attention_by
from athanor.training.compiling import first_line
from athanor.training.muon import orthogonal
from athanor.training.optimizer import Optimizer, OptimizerSettings
from athanor.training.setup import Choices
from athanor.training.step import micro_batches
from tools.gpu_speed import Facts, RandomRows, graphs, half, shape, tuned_model

SAMPLES = 30_000  # elements of a tensor that are compared, from all over it
TOLERANCE = {"fp32": 1e-4, "bf16": 4e-2, "fp16": 1e-2}  # of the largest value; the formats have 24, 8 and 11 bits
LOSS_SCALE = 1024.0
Results = Sequence[Tensor]
_known: dict[str, np.ndarray] = {}  # of the reference


def compared(
    job: Any, key: str, precision: str, call: Callable[[], Results], plain: Callable[[], Results]
) -> dict[str, Any]:
    """Largest difference from the reference of `key`, which `plain` computes where no file has it, by the largest value."""
    if job.reference and not _known:
        _known.update(np.load(job.reference))
    try:
        results = [sampled(tensor) for tensor in call()]
    except Exception as error:  # of a kernel or a compiler, of any type
        return {"refused": first_line(error)}
    if f"{key} 0" not in _known:
        _known.update({f"{key} {number}": sampled(tensor) for number, tensor in enumerate(plain())})
    expected = [_known[f"{key} {number}"] for number in range(len(results))]
    errors = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(results, expected, strict=True)]
    return {"error": float(np.max(errors)), "ok": bool(np.max(errors) <= TOLERANCE[precision])}


def sampled(tensor: Tensor) -> np.ndarray:
    flat = tensor.detach().float().flatten()
    return flat[:: flat.numel() // SAMPLES | 1].cpu().numpy()  # odd, so that it meets every column


def make_reference(job: Any) -> None:
    for part in (attention, pieces, model):
        for row in part(job):
            print(row)
    np.savez_compressed(job.make_reference, **_known)


def normal(*sizes: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that are the same everywhere."""
    return torch.from_numpy(np.random.default_rng(sizes).standard_normal(sizes, np.float32)).to(device, dtype)


# -- attention: each kernel is made for q, k, v [B, H, T, E] and numbers of documents [B, T] or None -----------------


def _sdpa(kernel: str, q: Tensor, document_BT: Tensor | None) -> Callable[..., Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask = None if document_BT is None else block_mask(document_BT)

    def attend(*qkv: Tensor) -> Tensor:
        with sdpa_kernel([getattr(SDPBackend, KERNELS[kernel])]):
            return F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=mask is None)

    return attend


def _varlen(q: Tensor, document_BT: Tensor | None) -> Callable[..., Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    B, _, T, _ = q.shape
    starts_BT = torch.ones(B, T, device=q.device)
    starts_BT[:, 1:] = 0 if document_BT is None else document_BT.diff(dim=1)
    starts_N = F.pad(starts_BT.flatten().nonzero()[:, 0], (0, 1), value=B * T).int()
    older = "is_causal" in inspect.signature(varlen_attn).parameters  # torch 2.10
    more: Any = {"is_causal": True} if older else {"window_size": (-1, 0)}
    more |= dict.fromkeys(("cu_seq_q", "cu_seq_k"), starts_N) | dict.fromkeys(
        ("max_q", "max_k"), int(starts_N.diff().max())
    )
    return lambda *qkv: (
        varlen_attn(*(x.transpose(1, 2).flatten(0, 1) for x in qkv), **more)
        .view(B, T, *qkv[0].shape[1::2])
        .transpose(1, 2)
    )


def _flex(q: Tensor, document_BT: Tensor | None) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    B, _, T, _ = q.shape
    number_BT = torch.zeros(B, T, device=q.device) if document_BT is None else document_BT
    mask = create_block_mask(
        lambda b, h, i, j: (i >= j) & (number_BT[b, i] == number_BT[b, j]), B, None, T, T, q.device
    )
    return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def attention(job: Any) -> Facts:
    """Each kernel forward and backward, with one document a row and several; its time at the preset's shape."""
    cuda, config = job.device == "cuda", shape(job, job.preset)[0]
    makers: dict[str, Any] = {name: functools.partial(_sdpa, name) for name in KERNELS}

    def run(make: Callable[..., Any], several: bool, device: str, precision: str, *sizes: int) -> Callable[[], Results]:
        B, _, T, _ = sizes
        q = normal(*sizes, device=device, dtype=AUTOCAST[precision] or torch.float32)
        document_BS = RandomRows(9, T, T / 2).batch(0, B * T).document_BS
        attend = make(q, torch.from_numpy(document_BS[:, 1:]).to(device) if several else None)

        def both_ways() -> Results:
            inputs = [q.roll(shift, 2).requires_grad_() for shift in range(3)]
            out = attend(*inputs)
            return [out, *torch.autograd.grad(out, inputs, q.roll(9, 2))]

        return both_ways

    T = config.context_tokens
    large = (16384 // T if cuda else 1), config.heads, T, config.head_dim
    for name, make in (makers | {"varlen": _varlen, "flex": _flex}).items():
        if not cuda and name not in ("flash", "math"):
            yield {name: "not on cpu"}
            continue
        for several, precision in itertools.product((False, True), dict.fromkeys(("fp32", half(job.device)))):
            arguments = (several, job.device, precision)
            row = compared(
                job, f"attention {several}", precision, lambda: run(make, *arguments, 2, 3, 512, 64)(),
                lambda: run(makers["math"], several, "cpu", "fp32", 2, 3, 512, 64)(),
            )  # fmt: skip
            if "ok" in row and precision == half(job.device):
                row["ms"] = 1e3 * fastest(run(make, *arguments, *large), torch.device(job.device), 0.2)
            yield {f"{name}{' documents' * several} {precision}": row}


# -- loss and optimizers --------------------------------------------------------------------------------------------


def _backward(loss_of: Callable[[], Tensor], weights: Sequence[Tensor], precision: str) -> Results:
    """The loss and the gradients of `weights`, with a loss scale for fp16."""
    device, scale = weights[0].device, LOSS_SCALE if precision == "fp16" else 1.0
    with products(precision, device):
        with autocast(precision, device):
            loss = loss_of()
        gradients = torch.autograd.grad(loss * scale, weights)
    return [loss, *(gradient / scale for gradient in gradients)]


def _loss(z_loss: float, device: str, precision: str) -> Results:
    """With targets for more than one chunk."""
    N, D, V = 8192, 64, 20_000
    h, head = normal(N, D, device=device).requires_grad_(), normal(V, D, device=device).div_(4).requires_grad_()
    where_N = torch.arange(N, device=device)
    batch = Targets(where_N[None], None, where_N, where_N * 7919 % V)
    model = SimpleNamespace(hidden=lambda ids, document_BT: h[None], head_weight=head)
    return _backward(lambda: training_loss(model, batch, N, z_loss=z_loss), [h, head], precision)


def _updated(device: str, name: str, refused: bool = False) -> Results:
    """Weights after two updates, and perhaps a third that is refused for a gradient that is not finite."""
    weights = torch.nn.ParameterDict({"a": normal(256, 384, device=device), "b": normal(4096, device=device)})
    optimizer = Optimizer(weights, OptimizerSettings(0.9, 0.95, 1e-8, 0.1, name))
    for bad in [False, False, True][: 2 + refused]:
        for weight in weights.values():
            weight.grad = normal(*weight.shape, device=device).roll(1) * (float("inf") if bad else 1.0)
        optimizer.step_unless(torch.tensor(bad, device=device), 0.01)
    return list(weights.values())


def pieces(job: Any) -> Facts:
    """The chunked loss in each format with and without z-loss, Muon's `orthogonal`, updates and refused updates."""
    for precision in AUTOCAST if job.device == "cuda" else ("fp32", "bf16"):
        for z in (0.0, 1e-4):
            calls = [lambda z=z, a=arguments: _loss(z, *a) for arguments in ((job.device, precision), ("cpu", "fp32"))]
            yield {f"loss z {z:g} {precision}": compared(job, f"loss {z}", precision, *calls)}
    calls = [
        lambda d=d: [orthogonal(normal(3, *n, device=d)) for n in ((256, 384), (384, 256))] for d in (job.device, "cpu")
    ]
    yield {"orthogonal": compared(job, "orthogonal", "bf16", *calls)}
    for name, precision in (("adamw", "fp32"), ("muon", "bf16")):
        row = compared(job, name, precision, lambda: _updated(job.device, name), lambda: _updated("cpu", name))
        pairs = zip(_updated(job.device, name), _updated(job.device, name, True), strict=True)
        yield {name: row | {"found_inf_changes_nothing": all(torch.equal(a, b) for a, b in pairs)}}


# -- a model of two layers ------------------------------------------------------------------------------------------


def model(job: Any) -> Facts:
    """Loss and gradients by format, recomputed, compiled; new graphs over other documents; kernels of attention."""
    cuda, best = job.device == "cuda", half(job.device)
    variants = [(name, "tied") for name in AUTOCAST if cuda or name != "fp16"]
    more = ["untied", "tied checkpointing", "untied compile"]
    if cuda:  # on a CPU each compilation takes half a minute
        more += ["tied compile checkpointing", "tied compile varlen"]
    variants += [(best, words) for words in more]
    params = dataclasses.replace(shape(job, job.preset)[1], batch_tokens=1024, document_mask=True, seed=1)
    for precision, words in variants:
        on, kernel, begin = words.split(), words.split()[-1], graphs()
        config = ModelConfig(4096, 2, 256, 4, 2, 64, 640, 256, 1e4, 1e-6, True, tied_embeddings="tied" in on)
        rows, notes = RandomRows(4096, 256, 80), list[str]()
        kernel = kernel if kernel in (*KERNELS, VARLEN) else DEFAULT
        with attention_by(kernel, torch.device(job.device)):
            batches = [micro_batches(rows.batch(position, 1024), 4, True)[0] for position in range(6)]
        choices = Choices(precision, kernel, "compile" in on, "checkpointing" in on)

        def step(net: Transformer, batch: Targets, precision: str) -> Results:
            # Weights whose names stay, whatever is fused.
            kept = [x for name, x in net.named_parameters() if re.search("embed|lm_head|o_proj|down_proj", name)]
            return _backward(lambda: training_loss(net, batch.to(kept[0].device), len(batch.where_N)), kept, precision)

        with tuned_model(job, config, params, choices, notes) as (_, net):
            calls = [
                lambda: step(net, batches[0], precision),
                lambda: step(Transformer.fresh(config, 1), batches[0], "fp32"),
            ]
            row, before = compared(job, f"model {on[0]}", precision, *calls), graphs()
            with torch.profiler.profile() as profiler:
                for batch in batches[1:] if "ok" in row else ():
                    step(net, batch, precision)
        keys = sorted(each.key[:60] for each in profiler.key_averages())
        kernels = [key for key in keys if re.search("attention|flash|fmha|cudnn", key, re.I)][:8]
        row |= {"graphs": before - begin, "new_graphs": graphs() - before, "kernels": kernels, "notes": notes}
        yield {f"{words} {precision}": row}

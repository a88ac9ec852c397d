"""Parts of tools/gpu_report.py that compare results of a device with those of a CPU in fp32."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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
from athanor.training.attention import KERNELS
from athanor.training.muon import orthogonal
from athanor.training.optimizer import Optimizer, OptimizerSettings
from athanor.training.setup import Choices
from athanor.training.step import micro_batches
from tools.gpu_report import Job
from tools.gpu_speed import RandomRows, first_line, graphs, half, shape, tuned_model

SAMPLES = 30_000  # elements of a tensor that are compared, from all over it
TOLERANCE = {"fp32": 1e-4, "bf16": 4e-2, "fp16": 1e-2}  # of the largest value; the formats have 24, 8 and 11 bits
Results = Sequence[Tensor]


class Reference:
    """fp32 results of a CPU: from a file, else computed when asked for."""

    def __init__(self, path: str = "") -> None:
        self.known: dict[str, np.ndarray] = dict(np.load(path)) if path else {}

    def compare(self, name: str, results: Results, compute: Callable[[], Results], tolerance: float) -> dict[str, Any]:
        """Largest difference of `results` from those of `name`, relative to the largest value of each tensor."""
        if f"{name} 0" not in self.known:
            self.known |= {f"{name} {number}": _sampled(tensor) for number, tensor in enumerate(compute())}
        pairs = [(_sampled(tensor), self.known[f"{name} {number}"]) for number, tensor in enumerate(results)]
        errors = [float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs]
        error = max(errors, key=lambda value: (value != value, value))  # NaN is the largest
        return {"error": error, "ok": error <= tolerance}


def _sampled(tensor: Tensor) -> np.ndarray:
    flat = tensor.detach().float().flatten()
    return flat[:: max(1, flat.numel() // SAMPLES) | 1].cpu().numpy()  # odd, so that it meets every column


def make_reference(job: Job, path: Path) -> str:
    """Write what the parts of this module compare with."""
    reference = Reference()
    for part in (attention, pieces, model):
        for _ in part(job._replace(device="cpu"), reference):
            pass
    np.savez_compressed(path, **reference.known)  # type: ignore[arg-type]
    return f"{path}: {len(reference.known)} tensors, {path.stat().st_size / 1e6:.1f} MB"


def normal(*sizes: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that are the same everywhere."""
    return torch.from_numpy(np.random.default_rng(sizes).standard_normal(sizes, np.float32)).to(device, dtype)


# -- attention ------------------------------------------------------------------------------------------------------


def _sdpa(kernel: str, q: Tensor, k: Tensor, v: Tensor, document_BT: Tensor | None) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask = None if document_BT is None else block_mask(document_BT)
    with sdpa_kernel([getattr(SDPBackend, KERNELS[kernel])]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def _varlen(q: Tensor, k: Tensor, v: Tensor, document_BT: Tensor | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    B, _, T, _ = q.shape
    change_BT = torch.ones(B, T, dtype=torch.bool, device=q.device)
    change_BT[:, 1:] = False if document_BT is None else document_BT[:, 1:] != document_BT[:, :-1]
    starts = F.pad(change_BT.flatten().nonzero()[:, 0], (0, 1), value=B * T).int()
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    longest = int(starts.diff().max())
    older = "is_causal" in inspect.signature(varlen_attn).parameters  # torch 2.10
    causal: Any = {"is_causal": True} if older else {"window_size": (-1, 0)}
    return varlen_attn(*packed, starts, starts, longest, longest, **causal).unflatten(0, (B, T)).transpose(1, 2)


def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, document_BT: Tensor | None) -> Tensor:
        B, _, T, _ = q.shape

        def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            causal = i >= j
            return causal if document_BT is None else causal & (document_BT[b, i] == document_BT[b, j])

        mask = create_block_mask(allowed, B, None, T, T, device=q.device)
        return compiled(q, k, v, block_mask=mask)

    return attend


def _documents(rows: int, T: int, device: str) -> Tensor:
    return torch.from_numpy(RandomRows(8, T, T // 4).batch(0, rows * T).document_BS[:, :-1]).to(device)


def _with_gradients(call: Callable[..., Tensor], qkv: Results, dout: Tensor, document_BT: Tensor | None) -> Results:
    inputs = [x.detach().requires_grad_(True) for x in qkv]
    out = call(*inputs, document_BT)
    return [out, *torch.autograd.grad(out, inputs, dout)]


def attention(job: Job, reference: Reference | None = None) -> Iterator[dict[str, Any]]:
    """Each kernel forward and backward, one document a row and several; then its time at the preset's shape."""
    reference, device = reference or Reference(job.reference), torch.device(job.device)
    cuda, (config, _) = device.type == "cuda", shape(job, job.preset)
    calls: dict[str, Callable[..., Tensor]] = {name: lambda *x, name=name: _sdpa(name, *x) for name in KERNELS}
    calls |= {"varlen": _varlen, "flex": _flex()}
    B, H, T, E = 2, 3, 512, 64
    rows = max(1, 16384 // config.context_tokens) if cuda else 1
    big = rows, config.heads, config.context_tokens, config.head_dim
    for kind, several in (("causal", False), ("documents", True)):
        for name, call in calls.items():
            for precision in (half(device), "fp32") if cuda else ("fp32",):
                if not cuda and name in ("efficient", "cudnn", "varlen", "flex"):
                    yield {f"{name} {kind}": "not on cpu"}
                    continue
                dtype = AUTOCAST[precision] or torch.float32

                def case(where: str, dtype: torch.dtype, call: Callable[..., Tensor] = call, several: bool = several,
                         sizes: tuple[int, ...] = (B, H, T, E)) -> Callable[[], Results]:  # fmt: skip
                    qkv = [normal(*sizes, device=where, dtype=dtype).roll(shift, 2) for shift in range(3)]
                    documents = _documents(sizes[0], sizes[2], where) if several else None
                    return lambda: _with_gradients(call, qkv, qkv[0].roll(9, 2), documents)

                try:
                    plain = case("cpu", torch.float32, calls["math"])
                    row = reference.compare(f"{kind}", case(job.device, dtype)(), plain, TOLERANCE[precision])
                    if precision != "fp32" or not cuda:
                        row["ms"] = 1000 * fastest(case(job.device, dtype, sizes=big), device, 0.2)
                except Exception as error:  # of a compiler, of any type
                    row = {"refused": first_line(error)}
                yield {f"{name} {kind} {precision}": row}


# -- loss and optimizers --------------------------------------------------------------------------------------------


def _loss(device: str, precision: str, z_loss: float) -> Results:
    """Loss and its gradients, with targets for more than one chunk."""
    N, D, V = 4096, 64, 20_000
    h, head = normal(N, D, device=device).requires_grad_(), (normal(V, D, device=device) / 4).requires_grad_()
    ids_N = (torch.arange(N, device=device) * 7919) % V
    batch = Targets(ids_N[None], None, torch.arange(N, device=device), ids_N)
    model: Any = SimpleNamespace(hidden=lambda ids, document_BT: h[None], head_weight=head)
    scale = 1024.0 if precision == "fp16" else 1.0
    with products(precision, torch.device(device)):
        with autocast(precision, torch.device(device)):
            loss = training_loss(model, batch, N, z_loss=z_loss)
        (loss * scale).backward()
    assert h.grad is not None and head.grad is not None
    return [loss, h.grad / scale, head.grad / scale]


def _orthogonal(device: str) -> Results:
    return [orthogonal(normal(3, *sizes, device=device)) for sizes in ((256, 384), (384, 256))]


def _updates(device: str, name: str, refused: bool) -> Results:
    """Weights after three updates, the last of which may be refused for a gradient that is not finite."""
    weights = torch.nn.ParameterDict({"matrix": normal(256, 384, device=device), "gain": normal(4096, device=device)})
    optimizer = Optimizer(weights, OptimizerSettings(0.9, 0.95, 1e-8, 0.1, name))  # type: ignore[arg-type]
    for step in range(2 + refused):
        bad = step == 2
        for weight in weights.values():
            weight.grad = normal(*weight.shape, device=device).roll(step, 0) + (float("nan") if bad else 0.0)
        optimizer.step_unless(torch.tensor(bad, device=device), 0.01)
    return [weight.detach() for _, weight in sorted(weights.items())]


def pieces(job: Job, reference: Reference | None = None) -> Iterator[dict[str, Any]]:
    """The chunked loss in each format with and without z-loss, Muon's `orthogonal`, updates and refused updates."""
    reference = reference or Reference(job.reference)
    for precision in AUTOCAST if job.device != "cpu" else ("fp32", "bf16"):
        for z in (0.0, 1e-4):
            name, tolerance = f"loss z {z:g}", TOLERANCE[precision]

            def compute(z: float = z) -> Results:
                return _loss("cpu", "fp32", z)

            row = reference.compare(name, _loss(job.device, precision, z), compute, tolerance)
            yield {f"{name} {precision}": row}
    directions = _orthogonal(job.device)
    values = torch.cat([torch.linalg.svdvals(x.float()).flatten() for x in directions])
    row = reference.compare("orthogonal", directions, lambda: _orthogonal("cpu"), TOLERANCE["bf16"])
    yield {"orthogonal": row | {"singular_values": [float(values.min()), float(values.max())]}}
    for name in ("adamw", "muon"):
        weights = _updates(job.device, name, False)
        again = _updates(job.device, name, True)

        def updated(name: str = name) -> Results:
            return _updates("cpu", name, False)

        row = reference.compare(name, weights, updated, TOLERANCE["fp32" if name == "adamw" else "bf16"])
        refused = all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
        yield {name: row | {"found_inf_changes_nothing": refused}}


# -- a model of two layers ------------------------------------------------------------------------------------------


def _small(tied: bool) -> ModelConfig:
    widths = {"layers": 2, "dim": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn_dim": 640}
    return ModelConfig(4096, **widths, context_tokens=256, rope_theta=1e4, norm_eps=1e-6, qk_norm=True,
                       tied_embeddings=tied)  # fmt: skip


def _gradients(model: Transformer, batch: Targets, precision: str) -> Results:
    """The loss, and gradients of weights whose names stay whatever is fused."""
    device, scale = model.head_weight.device, 1024.0 if precision == "fp16" else 1.0
    model.zero_grad(set_to_none=True)
    with products(precision, device):
        with autocast(precision, device):
            loss = training_loss(model, batch.to(device), len(batch.where_N))
        (loss * scale).backward()
    kept = [weight for name, weight in model.named_parameters() if re.search("embed|lm_head|o_proj|down_proj", name)]
    return [loss, *(weight.grad / scale for weight in kept if weight.grad is not None)]


def model(job: Job, reference: Reference | None = None) -> Iterator[dict[str, Any]]:
    """Loss and gradients by format, compiled, recomputed; graphs over batches of other documents; attention kernels."""
    reference, cuda = reference or Reference(job.reference), job.device == "cuda"
    best, other = (half(torch.device("cuda")), "efficient") if cuda else ("fp32", "math")
    variants = [(True, Choices(name)) for name in (AUTOCAST if cuda else ("fp32", "bf16"))]
    variants += [(False, Choices(best)), (True, Choices(best, checkpointing=True))]
    variants += [(False, Choices(best, compile=True))]
    if cuda:  # on a CPU a compilation takes half a minute
        variants += [(True, Choices(best, compile=True))]
        variants += [(True, Choices(best, compile=True, **more)) for more in ({"checkpointing": True}, {"attention": other})]
    _, params = shape(job, job.preset)
    rows = RandomRows(4096, 256, 80)
    batches = [micro_batches(rows.batch(n * 1024, 1024), 4, True)[0] for n in range(6)]
    for tied, choices in variants:
        config, notes = _small(tied), list[str]()
        name = " ".join(["tied" if tied else "untied", *(str(v) for v in dataclasses.astuple(choices)[:2]),
                         *(key for key in ("compile", "checkpointing") if getattr(choices, key))])  # fmt: skip

        def plain(config: ModelConfig = config) -> Results:
            return _gradients(Transformer.fresh(config, params.seed), batches[0], "fp32")

        try:
            with tuned_model(job, config, dataclasses.replace(params, batch_tokens=1024), choices, notes, 1024) as (_, net):
                results = _gradients(net, batches[0], choices.precision)
                row = reference.compare(f"model {tied}", results, plain, TOLERANCE[choices.precision])
                before = graphs()
                for batch in batches[1:]:
                    _gradients(net, batch, choices.precision)
                row |= {"graphs": before, "more_graphs": graphs() - before, "notes": notes}
                row["attention"] = _attention_of(lambda: _gradients(net, batches[0], choices.precision))
        except Exception as error:  # of a compiler, of any type
            row = {"refused": first_line(error), "notes": notes}
        yield {name: row}


def _attention_of(call: Callable[[], Any]) -> list[str]:
    """Names of the operations and kernels of attention inside a call."""
    with torch.profiler.profile() as profile, contextlib.nullcontext():
        call()
    names = [event.key for event in profile.key_averages()]
    return sorted({name[:70] for name in names if re.search("attention|flash|fmha|cudnn|efficient|flex", name, re.I)})[:8]

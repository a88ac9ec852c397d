"""Single kernels of a model's own shapes and what they cost: matrix products in every number format, attention."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from athanor.model.config import ModelConfig
from athanor.model.precision import AUTOCAST
from athanor.model.transformer import attend, block_mask, fit_groups
from athanor.model.varlen import document_starts, documents_by_length
from athanor.training.attention import KERNELS, VARLEN
from athanor.training.compiling import first_line

TRIES = 20
LAYOUTS = ("forward", "input_gradient", "weight_gradient")
# Operations of one pass over all shapes: slow units shall not take minutes.
_MAX_FLOPS = {"cpu": 30e9, "mps": 1e12, "cuda": 2e13}
_MAX_ELEMENTS = 1 << 28  # of one operand: a gigabyte in fp32
_MIN_TOKENS = 64
# Largest difference from fp32 attention, relative to the largest value. Half formats carry 8 and 11 bits.
TOLERANCE = {"fp32": 1e-4, "bf16": 4e-2, "fp16": 1e-2}
_MAX_SCORES = 1 << 26  # rows · heads · tokens², so that the reference is quick and fits


def synchronise(device: torch.device) -> None:
    """Wait for the device: without it a clock measures how fast work is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def fastest(call: Callable[[], Any], device: torch.device, budget_seconds: float) -> float:
    """The shortest of as many calls as fit into the budget, after one to warm up; on a CPU that one counts when it is long."""
    return compare({"": call}, device, budget_seconds)[""]


def compare(calls: Mapping[str, Callable[[], Any]], device: torch.device, budget_seconds: float) -> dict[str, float]:
    """As `fastest` for each of several calls, in turns: what else the machine does then meets them all alike."""

    def once(call: Callable[[], Any]) -> float:
        synchronise(device)
        started = time.perf_counter()
        call()
        synchronise(device)
        return time.perf_counter() - started

    started = time.perf_counter()
    warm = {name: once(call) for name, call in calls.items()}
    # The first call on a GPU loads libraries and kernels: an H200's fp32 products looked 217 times as slow as bf16's.
    if device.type == "cpu" and time.perf_counter() - started > 2 * budget_seconds:
        return warm
    seconds = {name: once(call) for name, call in calls.items()}
    for _ in range(TRIES):
        if time.perf_counter() - started > budget_seconds:
            break
        seconds = {name: min(seconds[name], once(call)) for name, call in calls.items()}
    return seconds


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """That many threads for each operation inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def linear_shapes(config: ModelConfig) -> Counter[tuple[int, int]]:
    """(outputs, inputs) of the model's linear layers, with how often a forward pass uses each."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    counts: Counter[tuple[int, int]] = Counter()
    for outputs, inputs, times in (
        (queries, config.dim, 1),
        (keys, config.dim, 2),
        (config.dim, queries, 1),
        (config.ffn_dim, config.dim, 2),
        (config.dim, config.ffn_dim, 1),
    ):
        counts[outputs, inputs] += times * config.layers
    counts[config.vocab_size, config.dim] += 1
    return counts


def rows_for(config: ModelConfig, tokens: int, device: torch.device) -> int:
    """Tokens of a product: those of a micro-batch, fewer where that would take too long or too much memory."""
    shapes = linear_shapes(config)
    flops, widest = 2 * len(LAYOUTS) * sum(outputs * inputs for outputs, inputs in shapes), max(map(max, shapes))
    while tokens > _MIN_TOKENS and (flops * tokens > _MAX_FLOPS[device.type] or widest * tokens > _MAX_ELEMENTS):
        tokens //= 2
    return tokens


def operands(outputs: int, inputs: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """X, W and dY of a linear layer Y = X Wᵀ: normal random numbers in fp32, made on the device.

    As in a model: a chip draws less power on constants, and then runs faster.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    x_TI, w_OI, dy_TO = (
        torch.randn(shape, generator=generator, device=device)
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    return x_TI, w_OI, dy_TO


def layouts(x_TI: Tensor, w_OI: Tensor, dy_TO: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The products of a linear layer by their names in LAYOUTS, with transposes as training has them."""
    return {
        "forward": lambda: x_TI @ w_OI.t(),
        "input_gradient": lambda: dy_TO @ w_OI,
        "weight_gradient": lambda: dy_TO.t() @ x_TI,
    }


def products(
    config: ModelConfig,
    tokens: int,
    device: torch.device,
    budget_seconds: float,
    formats: tuple[str, ...] = tuple(AUTOCAST),
) -> dict[str, Any]:
    """GFLOPS by format: of each layout, and of all together weighted by the time they take (`ceiling`).

    The ceiling is what a model made of nothing but these products would reach.
    """
    tokens = rows_for(config, tokens, device)
    layer_shapes = linear_shapes(config)
    budget_per_product = budget_seconds / (len(formats) * len(LAYOUTS) * len(layer_shapes))
    flops = {name: dict.fromkeys(LAYOUTS, 0.0) for name in formats}
    seconds = {name: dict.fromkeys(LAYOUTS, 0.0) for name in formats}
    for (outputs, inputs), times in layer_shapes.items():
        fp32 = operands(outputs, inputs, tokens, device)
        for name in list(flops):
            try:
                for layout, call in layouts(*(x.to(AUTOCAST[name] or torch.float32) for x in fp32)).items():
                    took = fastest(call, device, budget_per_product)
                    flops[name][layout] += 2.0 * outputs * inputs * tokens * times
                    seconds[name][layout] += took * times
            except RuntimeError:  # a format that this device has no products for
                del flops[name]
    gflops: dict[str, Any] = {}
    for name in flops:
        gflops[name] = {layout: flops[name][layout] / seconds[name][layout] / 1e9 for layout in LAYOUTS}
        gflops[name]["ceiling"] = sum(flops[name].values()) / sum(seconds[name].values()) / 1e9
    return {"tokens": tokens, "gflops": gflops}


def variant(kind: str, name: str, document_BT: Tensor) -> Tensor | None:
    """The mask that a kernel takes for rows of one document ("plain"), or of several ("documents")."""
    if name == VARLEN:
        numbers_BT = document_BT.cpu().numpy()
        starts_M = document_starts(numbers_BT if kind == "documents" else numbers_BT * 0)
        return torch.from_numpy(starts_M).to(document_BT.device)
    return None if kind == "plain" else block_mask(document_BT)


def _only(name: str) -> contextlib.AbstractContextManager[Any]:
    """Inside, torch dispatches to this kernel alone; to one that it does not dispatch to, the mask leads."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return documents_by_length() if name == VARLEN else sdpa_kernel([getattr(SDPBackend, KERNELS[name])])


def attention(
    config: ModelConfig, rows: int, precision: str, device: torch.device, budget_seconds: float
) -> dict[str, Any]:
    """Every attention kernel at the model's shape, forward and backward, with and without documents in a row.

    Checked on a few rows, because the reference keeps every score, and timed on `rows`: fewer would time the launches.
    """
    T = config.context_tokens
    few = max(1, min(rows, _MAX_SCORES // (config.heads * T * T)))
    heads = (config.heads, config.kv_heads, config.kv_heads)
    generator = torch.Generator(device=device).manual_seed(0)
    qkv_fp32 = [torch.randn(few, n, T, config.head_dim, generator=generator, device=device) for n in heads]
    document_BT = (torch.arange(T, device=device) * 4 // T).expand(rows, T)
    qkv = [tensor.to(AUTOCAST[precision] or torch.float32) for tensor in qkv_fp32]
    whole = [tensor.repeat(-(-rows // few), 1, 1, 1)[:rows] for tensor in qkv]

    def run(tensors: list[Tensor], name: str, mask: Tensor | None) -> list[Tensor]:
        inputs = [tensor.detach().requires_grad_(True) for tensor in tensors]
        q, k, v = inputs
        with _only(name):
            out = attend(q, k, v, mask, mask is None)
            return [out.detach(), *torch.autograd.grad(out, inputs, out.detach())]

    masks = {kind: variant(kind, "math", document_BT[:few]) for kind in ("plain", "documents")}
    reference = {kind: run(qkv_fp32, "math", mask) for kind, mask in masks.items()}
    names = [*KERNELS, VARLEN] if device.type == "cuda" and precision != "fp32" else [*KERNELS]
    kernels: dict[str, Any] = {name: {"works": False, "why": ""} for name in names}
    for kind in masks:
        calls: dict[str, Callable[[], Any]] = {}
        for name in names:
            try:
                error = _difference(run(qkv, name, variant(kind, name, document_BT[:few])), reference[kind])
                if not error <= TOLERANCE[precision]:
                    raise RuntimeError(f"wrong by {error:.1g} of the largest value")
            except Exception as problem:  # a kernel that is not there fails in many ways
                kernels[name]["why"] = kernels[name]["why"] or f"{kind}: {first_line(problem)}"
                continue
            calls[name] = functools.partial(
                run,
                qkv if name == "math" else whole,
                name,
                variant(kind, name, document_BT[:few] if name == "math" else document_BT),
            )
            kernels[name][f"{kind}_error"] = error
        for name, seconds in compare(calls, device, budget_seconds / len(masks)).items():
            kernels[name][f"{kind}_seconds"] = seconds * (rows / few if name == "math" else 1.0)
    for row in kernels.values():
        row["works"] = "plain_seconds" in row
    used = {kind: _dispatched(qkv, mask) for kind, mask in masks.items()}
    defaults = {"default": used["plain"], "default_documents": used["documents"]}
    return {"precision": precision, "rows": rows, **defaults, "kernels": kernels}


def _dispatched(tensors: list[Tensor], mask: Tensor | None) -> str:
    """The kernel that torch takes by itself, for inputs that need a gradient."""
    from torch.nn.attention import SDPBackend

    q, k, v = (tensor.detach().requires_grad_(True) for tensor in tensors)
    k, v = fit_groups(q, k, v)
    number = torch._fused_sdp_choice(q, k, v, mask, 0.0, mask is None, enable_gqa=q.shape[1] != k.shape[1])
    names = {int(getattr(SDPBackend, backend, -1)): name for name, backend in KERNELS.items()}
    return names.get(int(number), str(number))


def _difference(values: list[Tensor], reference: list[Tensor]) -> float:
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(values, reference, strict=True))

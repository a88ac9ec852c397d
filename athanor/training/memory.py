"""An estimate of the memory that a training step needs, made before any of it is allocated.

What backward keeps is not counted by hand but measured: the real code runs on
a few tokens of the real widths, while every storage that comes to life is
counted. That takes milliseconds, and tokens, rows and layers scale exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from athanor.base.errors import InputError
from athanor.model.config import ModelConfig
from athanor.model.cross_entropy import chunk_rows
from athanor.model.flops import block_weights
from athanor.model.gpu_family import identify
from athanor.model.kernels import BLOCK_TOKENS, attention_by_torch, cpu_attention_fits
from athanor.model.loss import Targets, training_loss
from athanor.model.precision import autocast, rounds_products
from athanor.model.rounded import fast_bf16
from athanor.model.transformer import Transformer
from athanor.training.muon import PIECE_ELEMENTS

_FIXED_BYTES = 8 << 20  # small buffers
# What an allocator takes beyond what is alive: glibc's heap keeps holes. With its mmap threshold fixed at 64 KiB,
# twelve shapes of 1M to 30M parameters took 1.00 of what is alive, by default 1.0 to 1.2.
_SLACK = {"cpu": 1.15, "cuda": 1.05}
_USABLE = 0.95  # share of the free memory that may be planned for
_PROBE_TOKENS = {"cpu": 32, "cuda": 128}  # kernels of GPUs pad rows to multiples of their tiles


@dataclass(frozen=True)
class StepFootprint:
    """What decides the memory of a step: `replicas` hold gradients, `parallel` of them run at a time.

    `accumulates`: a replica works on several micro-batches, so that gradients of
    the first are there while the next one runs. `checkpointing`: a block keeps
    its input only, and runs again in backward. `keeps_best`: a copy of the best
    validation's weights lies in the same memory.
    """

    micro_batch_rows: int
    row_tokens: int
    precision: str
    replicas: int = 1
    parallel: int = 1
    accumulates: bool = True
    checkpointing: bool = False
    documents: bool = True  # rows hold several, kept apart by a mask
    optimizer: str = "adamw"
    keeps_best: bool = False

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch_rows * self.row_tokens


@dataclass(frozen=True)
class Growth:
    """Bytes of a row of T tokens: fixed + token · T + pair · T²; `fixed` once, however many rows."""

    fixed: float
    token: float
    pair: float

    def bytes(self, rows: int, row_tokens: int) -> float:
        return self.fixed + rows * (self.token * row_tokens + self.pair * row_tokens**2)


@dataclass(frozen=True)
class SavedActivations:
    """The bytes kept for backward: by each block, by the rest of the model without the loss, and by the loss at its peak."""

    block: Growth
    rest: Growth
    loss: Growth


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages made inside and still alive: `now`, and at most `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is none to skip, and loading it takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in args if isinstance(value, Tensor)}
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(value, Tensor):
                continue
            storage = value.untyped_storage()
            key = storage._cdata
            if key in self._known or key in given:  # a view, or changed in place
                continue
            self._known[key] = storage.nbytes()
            self.now += self._known[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key)


@functools.lru_cache(maxsize=32)
def measure_activations(
    config: ModelConfig, precision: str, device: torch.device, documents: bool, by_hand: bool, tokens: int
) -> SavedActivations:
    """Measure what backward keeps of this model, on the device and in the precision that it will train in.

    `by_hand`: with the attention of athanor/model/kernels.py. `tokens` of a micro-batch, of which the loss takes a chunk at once.
    """
    cpu_kernels = device.type == "cpu" and (precision == "fp32" or rounds_products(precision, device))
    unit = min(_PROBE_TOKENS.get(device.type, 32), config.context_tokens // 3)
    if cpu_kernels:
        unit = BLOCK_TOKENS // 4  # rows of up to three are one block each
    widths = dataclasses.replace(config, vocab_size=64)
    lengths = (unit, 2 * unit, 3 * unit)
    with contextlib.nullcontext() if by_hand else attention_by_torch():
        one_layer, two_layers = (
            [_run(dataclasses.replace(widths, layers=layers), T, 1, precision, device, documents)[0] for T in lengths]
            for layers in (1, 2)
        )
    block = _growth(unit, [b - a for a, b in zip(one_layer, two_layers, strict=True)])
    rest = _growth(unit, [2 * a - b for a, b in zip(one_layer, two_layers, strict=True)])
    # The loss alone: of a model so narrow that nothing else counts, with two numbers of targets beyond one chunk.
    narrow = dataclasses.replace(config, layers=1, dim=8, heads=1, kv_heads=1, head_dim=8, ffn_dim=8)
    chunked = cpu_kernels or device.type != "cpu"
    step = max(1, min(chunk_rows(device, config.vocab_size), tokens)) if chunked else unit
    peak_few, peak_many = (_run(narrow, 64, n, precision, device, False, backward=True)[1] for n in (step, 2 * step))
    slope = (peak_many - peak_few) / step
    fixed = max(0.0, peak_few - slope * step) + (4 * config.vocab_size * config.dim if chunked else 0)
    return SavedActivations(block, rest, Growth(fixed, slope + 3 * 4 * config.dim, 0.0))


def _run(
    config: ModelConfig,
    T: int,
    targets: int,
    precision: str,
    device: torch.device,
    documents: bool,
    *,
    backward: bool = False,
) -> tuple[int, int]:
    """Bytes alive after a forward pass over T ids by weights that nobody has set, and the peak (with backward)."""
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(config, context_tokens=T))
    model = model.to_empty(device=device)
    model.restore_rotary()
    ids_1T = torch.zeros(1, T, dtype=torch.int64, device=device)
    document_1T = torch.arange(T, device=device)[None] // (T - 1) if documents else None
    where_N = torch.arange(targets, device=device) % T
    with LiveBytes() as live:
        with autocast(precision, device):
            loss = training_loss(model, Targets(ids_1T, document_1T, where_N, torch.zeros_like(where_N)), 1)
        held_bytes = live.now
        if backward:
            loss.backward()
        return held_bytes, live.peak


def _growth(unit: int, values: list[int]) -> Growth:
    """The parabola through the values at 1, 2 and 3 units."""
    first, second, third = values
    pair = (third - 2 * second + first) / (2 * unit * unit)
    token = (second - first) / unit - 3 * unit * pair
    return Growth(first - token * unit - pair * unit * unit, token, pair)


def state_bytes(config: ModelConfig, footprint: StepFootprint) -> int:
    """Bytes that do not depend on rows or context: weights, the optimiser's state, and every replica's gradients."""
    return _held_bytes(config, footprint) + 4 * config.trained_count() * footprint.replicas


def _held_bytes(config: ModelConfig, footprint: StepFootprint) -> int:
    """Bytes that are held all the time: weights, those of the best validation, and the optimiser's state."""
    best = 4 * config.trained_count() if footprint.keeps_best else 0
    return config.stored_bytes() + best + moment_bytes(config, footprint.optimizer)


def moment_bytes(config: ModelConfig, optimizer: str) -> int:
    """The optimiser's state: AdamW has two numbers for a weight, Muon one for a weight in a block's matrix."""
    return 4 * (2 * config.trained_count() - (block_weights(config) if optimizer == "muon" else 0))


_BF16_KERNELS = 25e6  # what oneDNN compiles and packs for Muon's products; fitted to three shapes on one machine


def _update_bytes(config: ModelConfig, footprint: StepFootprint) -> float:
    """Bytes that Muon holds while it steps: gradient, factors, product and direction of the matrices at work.

    AdamW changes weights and moments where they are.
    """
    if footprint.optimizer != "muon":
        return 0.0
    matrix = config.dim * config.ffn_dim
    elements = 2 * config.layers * matrix  # the gates and what they are multiplied with, which have one shape
    if footprint.replicas > 1:  # a piece on each core
        elements = min(elements, footprint.parallel * max(matrix, PIECE_ELEMENTS))
    return elements * (12.0 if fast_bf16() else 18.0)


def training_bytes(
    config: ModelConfig,
    footprint: StepFootprint,
    device: torch.device = torch.device("cpu"),
    *,
    slack: float | None = None,
) -> int:
    """Peak bytes of training: weights, gradients, the optimiser's state, and what backward keeps of a micro-batch.

    The peak is either where the loss turns around, with all blocks' inputs and
    the logits there, or at the end of backward, with all gradients there, or
    in Muon's step. Replicas at work side by side are taken to reach it at once.
    """
    # Neither the number of blocks nor the context changes what one row of a few tokens keeps.
    alike = dataclasses.replace(config, layers=1, context_tokens=min(config.context_tokens, 3 * _PROBE_TOKENS["cuda"]))
    by_hand = cpu_attention_fits(device.type, footprint.precision, footprint.row_tokens)
    measured = measure_activations(
        alike, footprint.precision, device, footprint.documents, by_hand, footprint.micro_batch_tokens
    )
    rows, T, gradient = footprint.micro_batch_rows, footprint.row_tokens, 4 * config.trained_count()
    block, rest = measured.block.bytes(rows, T), measured.rest.bytes(rows, T)
    blocks = config.layers * block
    if footprint.checkpointing:
        blocks = config.layers * 4 * config.dim * footprint.micro_batch_tokens + block
    turning_point = blocks + rest + measured.loss.bytes(rows, T)
    # A tied embedding is the output matrix, too: two gradients of it meet at the end.
    second_gradient = 4 * config.vocab_size * config.dim if config.tied_embeddings and not config.adapters else 0
    # A block that runs again in backward is gone before the embedding's second gradient comes.
    end = gradient + (
        max(second_gradient, block + rest) if footprint.checkpointing else second_gradient + 2 * block + rest
    )
    if footprint.accumulates:
        turning_point, end = turning_point + gradient, end + gradient
    idle_gradients = gradient * (footprint.replicas - footprint.parallel)  # gradients of replicas that are done
    factor = _SLACK.get(device.type, 1.15) if slack is None else slack
    work = idle_gradients + factor * footprint.parallel * max(turning_point, end)
    update = gradient + factor * _update_bytes(config, footprint)  # one gradient: the replicas' are added up by then
    kernels = _BF16_KERNELS if footprint.optimizer == "muon" and device.type == "cpu" and fast_bf16() else 0.0
    return int(_held_bytes(config, footprint) + max(work, update) + _FIXED_BYTES + kernels)


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device now, control-group limit respected; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    if device.type != "cpu":
        return None
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        folder = Path("/sys/fs/cgroup") if limit == "memory.max" else Path("/sys/fs/cgroup/memory")
        texts = [(folder / name).read_text().strip() if (folder / name).is_file() else "" for name in (limit, used)]
        if all(text.isdigit() for text in texts):
            limits.append(int(texts[0]) - int(texts[1]))
    return min(limits) if limits else None


def check_memory(
    config: ModelConfig, footprint: StepFootprint, device: torch.device, available: int | None = None
) -> int:
    """Refuse (InputError) a model that cannot be trained here, with what to change first; returns the estimate.

    `available` replaces the measured free memory.
    """
    needed = training_bytes(config, footprint, device)
    free = available_bytes(device) if available is None else available
    if free is None or needed <= free * _USABLE:
        return needed
    steps = what_to_change(config, footprint, device, lambda size: size <= free * _USABLE)
    raise InputError(
        f"training {config.parameter_count():,} parameters needs about {needed / 2**30:.1f} GiB,"
        f" {free / 2**30:.1f} GiB are free on {device.type}",
        where="model",
        fix="; ".join(f"{i}. {step}" for i, step in enumerate(steps, 1)),
    )


def what_to_change(
    config: ModelConfig, footprint: StepFootprint, device: torch.device, fits: Callable[[int], bool]
) -> list[str]:
    """Changes in the order of what they cost, each on top of those before it, until the estimate fits.

    A machine setting that leaves the result alone comes first, the model last.
    """
    steps: list[str] = []

    def fit() -> bool:
        return fits(training_bytes(config, footprint, device))

    rows = footprint.micro_batch_rows
    while footprint.micro_batch_rows > 1 and not fit():
        footprint = dataclasses.replace(footprint, micro_batch_rows=footprint.micro_batch_rows // 2, accumulates=True)
    if footprint.micro_batch_rows < rows:
        steps.append(f"micro_batch_tokens: {footprint.micro_batch_tokens} in machine.yaml")
    if footprint.parallel > 1 and not fit():
        footprint = dataclasses.replace(footprint, parallel=1)
        steps.append("threads: 1 in machine.yaml")
    if not footprint.checkpointing and not fit():
        footprint = dataclasses.replace(footprint, checkpointing=True)
        steps.append("checkpointing: on in machine.yaml")
    # A format that the chip only emulates is slower than fp32; the driver would offer it all the same.
    native = identify(device).native if device.type == "cuda" else ()
    if native and footprint.precision == "fp32" and not fit():
        footprint = dataclasses.replace(footprint, precision=native[0])
        steps.append(f"precision: {footprint.precision}")
    length = config.context_tokens
    while config.context_tokens > 128 and not fit() and fits(state_bytes(config, footprint)):
        config = dataclasses.replace(config, context_tokens=config.context_tokens // 2)
        footprint = dataclasses.replace(footprint, row_tokens=min(footprint.row_tokens, config.context_tokens))
    if config.context_tokens < length:
        steps.append(f"model.context_tokens: {config.context_tokens}")
    layers = config.layers
    while config.layers > 1 and not fit():
        config = dataclasses.replace(config, layers=config.layers - max(1, config.layers // 8))
    if config.layers < layers:
        steps.append(f"model.layers: {config.layers}, or a smaller dim and ffn_dim")
    if not fit():
        steps += ["a smaller vocabulary", "a machine with more memory"]
    return steps

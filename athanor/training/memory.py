"""An estimate of the memory that a training step needs, made before any of it is allocated.

What backward keeps is not counted by hand but measured (athanor/training/activations.py): tokens, rows and layers scale
exactly. Sizes for an accelerator are the same on every host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from athanor.base import host
from athanor.base.errors import InputError
from athanor.model.config import ModelConfig
from athanor.model.flops import block_weights
from athanor.model.gpu_family import identify, memory_share
from athanor.model.kernels import cpu_attention_fits
from athanor.model.rounded import fast_bf16
from athanor.training.activations import SavedActivations, measure_activations, trace_activations
from athanor.training.muon import PIECE_ELEMENTS

USABLE = 0.95  # share of the free memory that may be planned for
_FIXED_BYTES = 8 << 20  # small buffers
# What an allocator takes beyond what is alive: glibc's heap keeps holes. With its mmap threshold fixed at 64 KiB,
# twelve shapes of 1M to 30M parameters took 1.00 of what is alive, by default 1.0 to 1.2.
_SLACK, _SLACK_ACCELERATOR = 1.15, 1.05
# Of Python with torch, and of CUDA's or ROCm's context and kernels: no estimate of tensors sees them.
RUNTIME_BYTES, RUNTIME_BYTES_ACCELERATOR = 450_000_000, 700_000_000


@dataclass(frozen=True)
class StepFootprint:
    """What decides the memory of a step: `replicas` hold gradients, `parallel` of them run at a time.

    `accumulates`: a replica works on several micro-batches, so that gradients of
    the first are there while the next one runs. `checkpointing`: a block keeps
    its input only, and runs again in backward. `keeps_best`: a copy of the best
    validation's weights lies in the same memory. `math_attention`: an accelerator
    without fused attention keeps every score.
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
    math_attention: bool = False

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch_rows * self.row_tokens


def state_bytes(config: ModelConfig, footprint: StepFootprint) -> int:
    """Bytes that do not depend on rows or context: weights, the optimiser's state, and every replica's gradients."""
    best = 4 * config.trained_count() if footprint.keeps_best else 0
    gradients = 4 * config.trained_count() * footprint.replicas
    return config.stored_bytes() + best + moment_bytes(config, footprint.optimizer) + gradients


def moment_bytes(config: ModelConfig, optimizer: str) -> int:
    """The optimiser's state: AdamW has two numbers for a weight, Muon one for a weight in a block's matrix."""
    return 4 * (2 * config.trained_count() - (block_weights(config) if optimizer == "muon" else 0))


_BF16_KERNELS = 25e6  # what oneDNN compiles and packs for Muon's products; fitted to three shapes on one machine


@dataclass(frozen=True)
class Parts:
    """Bytes at a step's peak. `logits`: what the loss takes; `update`: Muon's step; `slack`: an allocator's holes, small buffers."""

    weights: float
    gradients: float
    moments: float
    activations: float
    logits: float
    update: float
    slack: float
    runtime: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def _update_bytes(config: ModelConfig, footprint: StepFootprint, device: torch.device) -> float:
    """Bytes that Muon holds while it steps: gradient, factors, product and direction of the matrices at work.

    AdamW changes weights and moments where they are.
    """
    if footprint.optimizer != "muon":
        return 0.0
    matrix = config.dim * config.ffn_dim
    elements = 2 * config.layers * matrix  # the gates and what they are multiplied with, which have one shape
    if footprint.replicas > 1:  # a piece on each core
        elements = min(elements, footprint.parallel * max(matrix, PIECE_ELEMENTS))
    return elements * (12.0 if device.type != "cpu" or fast_bf16() else 18.0)


def _saved(config: ModelConfig, footprint: StepFootprint, on_cpu: bool) -> SavedActivations:
    # Neither the number of blocks nor the context changes what one row of a few tokens keeps.
    alike = dataclasses.replace(config, layers=1, context_tokens=min(config.context_tokens, 384))
    precision, documents, tokens = footprint.precision, footprint.documents, footprint.micro_batch_tokens
    if not on_cpu:
        return trace_activations(alike, precision, documents, footprint.math_attention, tokens)
    by_hand = cpu_attention_fits("cpu", precision, footprint.row_tokens)
    return measure_activations(alike, precision, documents, by_hand, tokens)


def parts(
    config: ModelConfig,
    footprint: StepFootprint,
    device: torch.device,
    *,
    shards: int = 1,
    slack: float | None = None,
) -> Parts:
    """Return the parts of the peak memory of training; of each of `shards` processes that have one model between them.

    The peak is either where the loss turns around, with all blocks' inputs and
    the logits there, or at the end of backward, with all gradients there, or
    in Muon's step. Replicas at work side by side are taken to reach it at once.
    """
    on_cpu = device.type == "cpu"
    saved = _saved(config, footprint, on_cpu)
    rows, T, gradient = footprint.micro_batch_rows, footprint.row_tokens, 4 * config.trained_count()
    block, rest = saved.block.bytes(rows, T), saved.rest.bytes(rows, T)
    blocks = config.layers * block
    if footprint.checkpointing:  # the copies of weights, which autocast keeps, are there all the same
        copies = 0.0 if on_cpu else (config.layers - 1) * saved.block.fixed
        blocks = config.layers * saved.input * footprint.micro_batch_tokens + copies + block
    before = gradient if footprint.accumulates else 0
    # A tied embedding is the output matrix, too: two gradients of it meet at the end. So do those of two micro-batches,
    # on an accelerator a matrix at a time, as each is added at once; on a CPU replicas hold all of theirs.
    meets = config.tied_embeddings or (footprint.accumulates and not on_cpu)
    second_gradient = 4 * config.vocab_size * config.dim if meets and not config.adapters else 0
    # A block that runs again in backward is gone before the embedding's second gradient comes.
    tail = max(second_gradient, block + rest) if footprint.checkpointing else second_gradient + 2 * block + rest
    parallel, idle = (
        footprint.parallel,
        gradient * (footprint.replicas - footprint.parallel),
    )  # of replicas that are done
    peaks = (
        (idle + parallel * before, parallel * (blocks + rest), parallel * saved.loss.bytes(rows, T), 0.0),
        (idle + parallel * (gradient + (before if on_cpu else 0)), parallel * tail, 0.0, 0.0),
        (gradient, 0.0, 0.0, _update_bytes(config, footprint, device)),  # the replicas' gradients are added up by then
    )
    gradients, activations, logits, update = max(peaks, key=sum)
    factor = (_SLACK if on_cpu else _SLACK_ACCELERATOR) if slack is None else slack
    moving = activations + logits + update + (0 if update else gradients - idle)
    kernels = _BF16_KERNELS if footprint.optimizer == "muon" and on_cpu and fast_bf16() else 0.0
    if shards > 1:  # whole once: gradients while micro-batches add up, or the weights in validation
        gradients += 4 * config.parameter_count() - gradient + gradient / shards
    best = 4 * config.trained_count() if footprint.keeps_best else 0
    return Parts(
        (config.stored_bytes() + best) / shards,
        gradients,
        moment_bytes(config, footprint.optimizer) / shards,
        activations,
        logits,
        update,
        (factor - 1) * moving + _FIXED_BYTES + kernels,
        RUNTIME_BYTES if on_cpu else RUNTIME_BYTES_ACCELERATOR,
    )


def training_bytes(
    config: ModelConfig, footprint: StepFootprint, device: torch.device, *, shards: int = 1, slack: float | None = None
) -> int:
    """Peak bytes of training beyond the runtime's own, which is not free by the time that anybody asks."""
    needed = parts(config, footprint, device, shards=shards, slack=slack)
    return int(needed.total - needed.runtime)


def available_bytes(device: torch.device) -> int | None:
    """Memory that this process may use: free on the device or this host, limits respected; None where it is unknown.

    What torch's allocator keeps for later tensors is free. A GPU that shares memory with the processor has its share of it
    (`memory_share`), and what the host has left.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved, share = torch.cuda.memory_reserved(device), memory_share(identify(device))
        if share < 1.0:
            free = max(0, min(free, int(share * total) - reserved, host.free_memory_bytes()))
        return free + reserved - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return host.free_memory_bytes() if device.type == "cpu" else None


def check_memory(
    config: ModelConfig, footprint: StepFootprint, device: torch.device, available: int | None = None
) -> int:
    """Refuse (InputError) a model that cannot be trained here, with what to change first; returns the estimate.

    `available` replaces the measured free memory.
    """
    needed = training_bytes(config, footprint, device)
    free = available_bytes(device) if available is None else available
    if free is None or needed <= free * USABLE:
        return needed
    steps = what_to_change(config, footprint, device, lambda size: size <= free * USABLE)
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

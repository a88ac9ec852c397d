"""What the memory of a training step is made of, for one device and for several that share the model."""

from __future__ import annotations

import dataclasses

import torch

from athanor.model.config import ModelConfig
from athanor.model.cross_entropy import chunk_rows
from athanor.model.kernels import cpu_attention_fits
from athanor.training.memory import StepFootprint, measure_activations, moment_bytes

RUNTIME_BYTES = 700_000_000  # of CUDA's or ROCm's context and kernels, which no estimate of tensors sees
RUNTIME_BYTES_CPU = 450_000_000  # of Python with torch
ALLOCATOR = 1.05


@dataclasses.dataclass(frozen=True)
class Parts:
    """Bytes on one device. `logits` is what the loss takes at its peak."""

    weights: float
    gradients: float
    moments: float
    activations: float
    logits: float
    runtime: float = 0.0

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def parts(config: ModelConfig, footprint: StepFootprint, devices: int = 1) -> Parts:
    """The parts on an accelerator in 16 bits; with several `devices` as FSDP shares weights, gradients and moments.

    Activations are measured here, by the code of accelerators on the CPU: torch's own operations in fp16.
    """
    weights = config.parameter_count()
    alike = dataclasses.replace(config, layers=1, context_tokens=min(config.context_tokens, 384))
    tokens = footprint.micro_batch_tokens
    saved = measure_activations(alike, "fp16", torch.device("cpu"), footprint.documents, False, tokens)
    rows, T = footprint.micro_batch_rows, footprint.row_tokens
    blocks = config.layers * saved.block.bytes(rows, T)
    if footprint.checkpointing:
        blocks = config.layers * 4 * config.dim * tokens + saved.block.bytes(rows, T)
    chunk = min(tokens, chunk_rows(torch.device("meta"), config.vocab_size))
    return Parts(
        4 * weights / devices,
        4 * weights / devices,
        moment_bytes(config, footprint.optimizer) / devices,
        ALLOCATOR * (blocks + saved.rest.bytes(rows, T)),
        10 * chunk * config.vocab_size,
        RUNTIME_BYTES,
    )


def cpu_parts(config: ModelConfig, footprint: StepFootprint) -> Parts:
    """The parts on a CPU, where replicas side by side have gradients and activations of their own."""
    alike = dataclasses.replace(config, layers=1, context_tokens=min(config.context_tokens, 384))
    by_hand = cpu_attention_fits("cpu", footprint.precision, footprint.row_tokens)
    device, tokens = torch.device("cpu"), footprint.micro_batch_tokens
    saved = measure_activations(alike, footprint.precision, device, footprint.documents, by_hand, tokens)
    rows, T = footprint.micro_batch_rows, footprint.row_tokens
    return Parts(
        config.stored_bytes(),
        4 * config.trained_count() * footprint.replicas,
        moment_bytes(config, footprint.optimizer),
        footprint.parallel * (config.layers * saved.block.bytes(rows, T) + saved.rest.bytes(rows, T)),
        footprint.parallel * saved.loss.bytes(rows, T),
        RUNTIME_BYTES_CPU,
    )

"""Will it fit? An estimate of the memory a training step needs, before any of it is taken."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from athanor.errors import InputError
from athanor.model.config import ModelConfig

_FIXED_BYTES = 128 << 20  # allocator slack and small buffers
_USABLE = 0.95  # share of the free memory that may be planned for


@dataclass(frozen=True)
class Load:
    """How a machine works on a model: `lanes` hold gradients, `parallel` of them run at a time."""

    micro_batch_rows: int
    row_tokens: int
    precision: str
    lanes: int = 1
    parallel: int = 1

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch_rows * self.row_tokens


def training_bytes(config: ModelConfig, load: Load) -> int:
    """Peak bytes of training: weights, gradients, two Adam moments, and what backward keeps of a micro-batch."""
    state = (12 + 4 * load.lanes) * config.parameter_count()
    wide = config.heads * config.head_dim
    norms = 2 * wide if config.qk_norm else 0
    layer = 6 * config.dim + 4 * wide + norms + 4 * config.ffn_dim
    per_token = config.layers * layer + 3 * config.vocab_size
    element = 4
    if load.precision != "fp32":
        # Half-width copies of the weights; norms, residual stream and logits stay wide.
        state += 2 * config.parameter_count()
        per_token = config.layers * (layer / 2 + 3 * config.dim) + 3 * config.vocab_size
    kept = load.micro_batch_tokens * (per_token * element + 5 * load.row_tokens)
    return int(state + load.parallel * kept + _FIXED_BYTES)


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device now, control-group limit respected; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        folder = Path("/sys/fs/cgroup") if limit == "memory.max" else Path("/sys/fs/cgroup/memory")
        texts = [(folder / name).read_text().strip() if (folder / name).is_file() else "" for name in (limit, used)]
        if all(text.isdigit() for text in texts):
            found.append(int(texts[0]) - int(texts[1]))
    return min(found) if found else None


def check_memory(config: ModelConfig, load: Load, device: torch.device, available: int | None = None) -> int:
    """Refuse (InputError) a model that cannot be trained here, with what to change first; returns the estimate.

    `available` replaces the measured free memory.
    """
    needed = training_bytes(config, load)
    free = available_bytes(device) if available is None else available
    if free is None or needed <= free * _USABLE:
        return needed

    def fits(**changes: int) -> bool:
        return training_bytes(config, dataclasses.replace(load, **changes)) <= free * _USABLE

    steps, rows = [], load.micro_batch_rows
    while rows > 1 and not fits(micro_batch_rows=rows):
        rows //= 2
    if rows < load.micro_batch_rows:
        steps.append(f"micro_batch_tokens: {rows * load.row_tokens} in machine.yaml")
    if not fits(micro_batch_rows=1):
        if load.parallel > 1:
            steps.append("threads: 1 in machine.yaml")
        if not fits(micro_batch_rows=1, parallel=1):
            if 16 * config.parameter_count() < free * _USABLE:
                steps.append(f"a smaller model.context_tokens than {config.context_tokens}")
            steps.append(f"fewer model.layers than {config.layers}, then a smaller dim and ffn_dim")
            steps += ["a smaller vocabulary", "a machine with more memory"]
    raise InputError(
        f"training {config.parameter_count():,} parameters needs about {needed / 2**30:.1f} GiB,"
        f" {free / 2**30:.1f} GiB are free on {device.type}",
        where="model",
        fix="; ".join(f"{i}. {step}" for i, step in enumerate(steps, 1)),
    )

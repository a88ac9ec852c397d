"""All measurements of a hardware profile, one after the other, each in bounded time.

python -m athanor.hardware.measure JSON      measure as the JSON says, print the profile
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from athanor.base import host
from athanor.base.errors import AthanorError
from athanor.data.sampler import PretrainSampler
from athanor.hardware import kernels, policy, profile, steps
from athanor.hardware.kernels import threads
from athanor.model import gpu_family
from athanor.model.config import ModelConfig
from athanor.model.device import micro_batch, prepare
from athanor.model.kernels import cpu_attention_fits
from athanor.model.precision import AUTOCAST
from athanor.training import checkpoint
from athanor.training.cpu_replicas import replica_count
from athanor.training.memory import available_bytes

_MAX_BYTES = 128 << 20  # of a checkpoint that is written to try


class Bounds(NamedTuple):
    """Seconds that each part may take, about; a single slow call may exceed it."""

    products: float = 8.0
    steps: float = 6.0
    attention: float = 3.0
    compile: float = 90.0  # at most; on two cores 20 to 40
    loader: float = 1.0


# By itself, before the first training on an accelerator.
QUICK = Bounds(products=2.0, steps=1.0, attention=1.0, compile=90.0, loader=0.1)
_START_SECONDS = 120.0  # at most, on top of the bounds: imports, a driver's start, single slow calls


def measure(
    config: ModelConfig,
    device: torch.device,
    count: int,
    *,
    precision: str,
    batch_tokens: int,
    root: Path,
    bounds: Bounds = Bounds(),
    report: Callable[[str], None] = lambda part: None,
) -> dict[str, Any]:
    """A profile of `device` with `count` threads for a model and its batch; `precision` may be auto.

    `root` holds data/shards and .athanor. `report` is called with the name of each part as it begins.
    """
    started, free = time.monotonic(), memory(device)  # before anything is allocated
    architecture = gpu_family.identify(device)
    rows = micro_batch(device, 0, config.context_tokens, batch_tokens)
    # Micro-batches side by side run on one core each, so that is what is measured.
    replicas = replica_count(config, device)
    thread_count = 1 if replicas > 1 else count
    measurements: dict[str, Any] = {
        "schema": profile.SCHEMA,
        "fingerprint": profile.fingerprint(config, device, count),
        "architecture": architecture.name,
        "rows": rows,
        "lanes": replicas,
    }
    report("matrix products")
    # What a GPU emulates is never chosen and would take most of the time.
    formats = tuple(AUTOCAST) if device.type == "cpu" else ("fp32", *architecture.native)
    measurements["products"] = kernels.products(config, rows * config.context_tokens, device, bounds.products, formats)
    with threads(thread_count):
        measurements |= _formats(config, rows, device, bounds, report)
        chosen = precision if precision != policy.AUTO else str(policy.precision_of(architecture, measurements).value)
        measurements["precision"] = chosen
        if not cpu_attention_fits(device.type, chosen, config.context_tokens):
            report("attention kernels")
            measurements["attention"] = kernels.attention(config, rows, chosen, device, bounds.attention)
    if bounds.compile:
        report(f"compiler (at most {bounds.compile:.0f} s)")
        cache = root / ".athanor" / "compile-cache"
        measurements["compile"] = steps.compiling(config, rows, chosen, device, thread_count, cache, bounds.compile)
    else:
        measurements["compile"] = {"works": False, "why": "not measured, because it is off"}
    report("loader")
    measurements["loader"] = loader(root / "data" / "shards", config.context_tokens, batch_tokens, bounds.loader)
    report("checkpoint")
    measurements["checkpoint"] = checkpoints(root / ".athanor" / "slots", config)
    measurements["memory"] = free
    measurements["seconds"] = round(time.monotonic() - started, 1)
    return measurements


def _formats(
    config: ModelConfig, rows: int, device: torch.device, bounds: Bounds, report: Callable[[str], None]
) -> dict[str, Any]:
    """Steps and stability of the formats that the chip has units for."""
    native = gpu_family.identify(device).native
    report("training steps by number format")
    step_rows = max(1, min(rows, 4096 // config.context_tokens))  # enough to compare by, and sure to fit
    speeds = steps.by_format(config, step_rows, ["fp32", *native], device, bounds.steps)
    if "fp16" in native:
        report("stability of fp16")
    return {"steps": speeds, "stable": {name: steps.stable(config, name, device) for name in native if name == "fp16"}}


def loader(shards: Path, context_tokens: int, batch_tokens: int, budget_seconds: float) -> dict[str, Any]:
    """Tokens per second that the sampler reads from the shards, all of its work included."""
    if not (shards / "manifest.json").is_file():
        return {"works": False, "why": f"{shards} is not there yet"}
    try:
        sampler = PretrainSampler(shards, context_tokens, 0, cooldown_start=1 << 60)
        sampler.batch(0, batch_tokens)
        started, position = time.perf_counter(), 0
        while not position or time.perf_counter() - started < budget_seconds:
            position += batch_tokens
            sampler.batch(position, batch_tokens)
        return {"works": True, "tokens_per_second": position / (time.perf_counter() - started)}
    except AthanorError as error:
        return {"works": False, "why": str(error)}


def checkpoints(slots: Path, config: ModelConfig) -> dict[str, Any]:
    """Bytes per second at which a checkpoint reaches the disk where slots are kept, checksum and fsync included."""
    count = min(12 * config.parameter_count(), _MAX_BYTES)
    slots.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".bench.", suffix=".tmp", dir=slots))
    try:
        started = time.perf_counter()
        checkpoint.save(folder, 1, {"tensor": torch.ones(count // 4)}, {})
        return {"bytes": count, "bytes_per_second": count / (time.perf_counter() - started)}
    except OSError as error:
        return {"bytes": count, "bytes_per_second": None, "why": str(error)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def memory(device: torch.device) -> dict[str, int | None]:
    """Bytes of the device: free now, and in all."""
    total = None
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    elif device.type == "mps":
        total = torch.mps.recommended_max_memory()
    elif device.type == "cpu":
        total = host.memory_bytes()
    return {"free_bytes": available_bytes(device), "total_bytes": total}


def in_subprocess(config: ModelConfig, device: torch.device, count: int, root: Path, **how: Any) -> dict[str, Any]:
    """As `measure`, by a process of its own, whose allocator is gone with it; RuntimeError with its last words."""
    names = {field.name for field in dataclasses.fields(ModelConfig)}  # a foreign model's shape has more
    shape = {name: value for name, value in config.to_dict().items() if name in names}
    job = {"config": shape, "device": device.type, "count": count, "root": str(root), **how}
    measured = steps.answer_of("athanor.hardware.measure", job, sum(how["bounds"]) + _START_SECONDS)
    return {**measured, "fingerprint": profile.fingerprint(config, device, count)}


def _measured(job: dict[str, Any]) -> dict[str, Any]:
    config, device, root, bounds = (job.pop(name) for name in ("config", "device", "root", "bounds"))
    device = prepare(device, job["count"])
    return measure(ModelConfig.from_dict(config), device, root=Path(root), bounds=Bounds(*bounds), **job)


if __name__ == "__main__":
    sys.exit(steps.answer(_measured))

"""How fast training is fed and saved, and how much memory there is."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from athanor.base.errors import AthanorError
from athanor.data.sampler import PretrainSampler
from athanor.model.config import ModelConfig
from athanor.training import checkpoint
from athanor.training.memory import available_bytes

_MOST_BYTES = 128 << 20  # of a checkpoint that is written to try


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
    count = min(12 * config.parameter_count(), _MOST_BYTES)
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
    elif device.type == "cpu":
        meminfo = Path("/proc/meminfo")
        if meminfo.is_file():
            lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
            total = int(lines["MemTotal"].split()[0]) * 1024
    return {"free_bytes": available_bytes(device), "total_bytes": total}

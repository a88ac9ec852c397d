"""The hardware profile: what was measured on this machine for one model, in `.athanor/hardware.json`.

Outside the tracked parameters, because it holds times. It is good for the
machine, torch and model it was measured with, and is not read for any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from athanor.base.artifacts import digest, read_json, write_json
from athanor.base.errors import InputError
from athanor.model.config import ModelConfig

if TYPE_CHECKING:
    import torch

SCHEMA = 2
FILE = Path(".athanor") / "hardware.json"


def fingerprint(config: ModelConfig, device: torch.device, threads: int) -> dict[str, Any]:
    """What a measurement belongs to."""
    import torch

    from athanor.model import gpu_family

    return {
        "device": f"{device.type}: {gpu_family.name(device)}",
        "torch": torch.__version__,
        "threads": threads,
        "model": config.to_dict(),
    }


def read(root: Path) -> dict[str, Any] | None:
    """The stored profile, of whatever machine and model; None where there is none that can be read."""
    path = root / FILE
    try:
        profile = read_json(path) if path.is_file() else None
    except InputError:
        return None
    return profile if isinstance(profile, dict) and profile.get("schema") == SCHEMA else None


def load(root: Path, expected: Mapping[str, Any]) -> dict[str, Any] | None:
    """The stored profile if its fingerprint is the `expected` one."""
    profile = read(root)
    return profile if profile is not None and profile.get("fingerprint") == expected else None


def save(root: Path, profile: Mapping[str, Any]) -> Path:
    write_json(root / FILE, profile)
    return root / FILE


def short_digest(profile: Mapping[str, Any]) -> str:
    """Eight letters that stand for a profile."""
    return digest(profile)[:8]

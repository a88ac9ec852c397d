"""How fast a run was, against what its machine could do: facts of a run, never part of a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from athanor.hardware import profile
from athanor.hardware.peaks import measured_tflops, peak_tflops
from athanor.runtime.machine import anchor


def with_rates(timings: Mapping[str, Any], device: Any, precision: str) -> dict[str, Any]:
    """The timings of a training, completed by what they are of this machine's peak."""
    return {**timings, **rates(timings, device_name(device), precision, profile.read(anchor()), tf32())}


def rates(
    timings: Mapping[str, Any], name: str, precision: str, measured: Mapping[str, Any] | None, tf32: bool = False
) -> dict[str, Any]:
    """The model's TFLOPS, and their share of the data sheet's peak (mfu) and of this machine's measured ceiling.

    A share whose base is not known is left out. `name`: what torch calls the accelerator, "" for a CPU.
    """
    if "model_gflops" not in timings:
        return {}
    achieved = timings["model_gflops"] / 1000
    told: dict[str, Any] = {"model_tflops": achieved, "precision": precision}
    bases = {"mfu": peak_tflops(name, precision, tf32=tf32), "of_ceiling": measured_tflops(measured, precision)}
    told |= {share: achieved / base for share, base in bases.items() if base}
    return told | ({"accelerator": name} if name else {})


def device_name(device: Any) -> str:
    if device.type != "cuda":
        return ""
    import torch

    return torch.cuda.get_device_name(device)


def tf32() -> bool:
    """Whether products of fp32 matrices may go through tensor cores."""
    import torch

    return torch.get_float32_matmul_precision() != "highest"

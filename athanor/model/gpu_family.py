"""Which number formats a chip computes in by itself. Drivers are not asked: they count emulation as support.

`torch.cuda.is_bf16_supported()` says yes on a Turing card and for every ROCm
build; there bf16 is computed through fp32 and slower than it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from athanor.base import host


@dataclass(frozen=True)
class Architecture:
    """device: cpu, cuda or mps. native: formats besides fp32 with units of their own.

    fused_attention: whether a kernel better than the math one is to be
    expected. shared_memory: the chip takes its memory from the processor's.
    """

    name: str
    device: str
    native: tuple[str, ...] = ()
    fused_attention: bool = True
    shared_memory: bool = False


SHARED_MEMORY = 0.80  # of memory that a GPU shares with the processor
BOTH, HALF = ("bf16", "fp16"), ("fp16",)
# Compute capability, from the newest: NVIDIA CUDA C++ programming guide, arithmetic instructions.
NVIDIA = (
    ((10, 0), "Blackwell", BOTH, True),
    ((9, 0), "Hopper", BOTH, True),
    ((8, 9), "Ada", BOTH, True),
    ((8, 0), "Ampere", BOTH, True),
    ((7, 5), "Turing", HALF, True),
    ((7, 0), "Volta", HALF, True),
    ((6, 0), "Pascal", (), True),
)
# LLVM target names, the longest prefix that fits: native formats, fused attention, shared memory.
AMD = {
    "gfx9": ("Vega", HALF, False, False),
    "gfx906": ("Vega 20 (MI50, MI60)", HALF, False, False),
    "gfx908": ("CDNA (MI100)", BOTH, True, False),
    "gfx90a": ("CDNA 2 (MI200)", BOTH, True, False),
    "gfx94": ("CDNA 3 (MI300)", BOTH, True, False),
    "gfx950": ("CDNA 4 (MI350)", BOTH, True, False),
    "gfx10": ("RDNA 2", HALF, False, False),
    "gfx11": ("RDNA 3", BOTH, True, False),
    "gfx1103": ("RDNA 3 (Phoenix)", BOTH, True, True),
    "gfx115": ("RDNA 3.5 (Strix)", BOTH, True, True),
    "gfx1151": ("RDNA 3.5 (Strix Halo)", BOTH, True, True),
    "gfx12": ("RDNA 4", BOTH, True, False),
}


def nvidia(capability: tuple[int, int], shared_memory: bool = False) -> Architecture:
    for min_capability, name, native, fused in NVIDIA:
        if capability >= min_capability:
            return Architecture(f"{name} sm{capability[0]}{capability[1]}", "cuda", native, fused, shared_memory)
    return Architecture(f"sm{capability[0]}{capability[1]}", "cuda", (), False, shared_memory)


def amd(target: str, shared_memory: bool = False) -> Architecture:
    """`target` as ROCm names it, features included: gfx90a:sramecc+:xnack-."""
    prefixes = [prefix for prefix in AMD if target.split(":")[0].startswith(prefix)]
    if not prefixes:
        return Architecture(target, "cuda", (), False, shared_memory)
    name, native, fused, shared = AMD[max(prefixes, key=len)]
    return Architecture(f"{name} {target.split(':')[0]}", "cuda", native, fused, shared or shared_memory)


def cpu(flags: Collection[str]) -> Architecture:
    """The architecture of a processor, by its feature flags as Linux names them."""
    for flag, name in (("amx_bf16", "CPU with AMX"), ("avx512_bf16", "CPU with AVX512-BF16"), ("bf16", "ARM, bf16")):
        if flag in flags:
            return Architecture(name, "cpu", ("bf16",))
    return Architecture("CPU", "cpu")


# Before torch 2.13 attention in a half format looked ahead there (pytorch#195910).
_CAUSAL = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
MPS = Architecture("Apple MPS", "mps", BOTH if _CAUSAL else (), False, True)


def memory_share(architecture: Architecture) -> float:
    """The share of a GPU's memory that torch may take; the rest belongs to the processor."""
    return SHARED_MEMORY if architecture.device == "cuda" and architecture.shared_memory else 1.0


def identify(device: torch.device) -> Architecture:
    """The architecture of a device of this machine."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        shared = bool(getattr(properties, "is_integrated", False))
        if torch.version.hip:
            return amd(properties.gcnArchName, shared)
        return nvidia((properties.major, properties.minor), shared)
    if device.type == "mps":
        return MPS
    return cpu(host.cpuinfo("flags", "Features").split())  # x86, ARM


def product_dtype(device: torch.device) -> torch.dtype:
    """The format for products that need few digits: bf16 where the chip has units for it, else fp16, else fp32."""
    native = ("bf16",) if device.type == "cpu" else identify(device).native  # a CPU rounds to it without units, too
    if "bf16" in native:
        return torch.bfloat16
    return torch.float16 if "fp16" in native else torch.float32


def name(device: torch.device) -> str:
    """The device's model, as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return host.processor()

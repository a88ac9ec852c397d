"""The compute device, prepared once before the first operation."""

from __future__ import annotations

import os
import platform

import torch

from athanor.base.errors import InputError
from athanor.model.gpu_family import identify, memory_share

# Tokens per forward pass when the machine settings leave it open. On a CPU
# larger ones only spill the caches; an accelerator wants more at once.
MICRO_BATCH_TOKENS = {"cpu": 1024, "mps": 4096, "cuda": 16384}
# torch 2.9 to 2.13 read the first, and the other where that is not set.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def prepare(name: str, threads: int, deterministic: bool = False) -> torch.device:
    """The device called `name` (auto, cpu, cuda, mps), with threads set, denormals flushed and memory limited.

    Call before any tensor work: worker threads inherit the denormal mode from
    the thread that starts them. Without it, Adam's moments of ids that no
    longer occur decay into denormals and slow its step down twentyfold.
    """
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"  # not mps, on which nobody has tried this yet
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not usable.get(name, False):
        raise InputError(f"torch cannot use device '{name}' here", where="machine.device", fix="use auto or cpu")
    device = torch.device(name)
    set_environment(name)
    if deterministic:
        make_deterministic(device)
    limit_memory(device)
    return device


def set_environment(device_type: str) -> None:
    """Set what torch reads from the environment at its first use of a GPU. What the user has set stays."""
    if device_type != "cuda":
        return
    if torch.version.hip:
        # Elsewhere than on MI200 and MI300 its attention kernels count as experimental (ROCm/TheRock#1437).
        if identify(torch.device(device_type)).name.startswith(("RDNA 3", "RDNA 4")):
            os.environ.setdefault("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1")
    # Sizes differ from one micro-batch to the next, which fragments segments of fixed size. Not supported everywhere.
    elif "microsoft" not in platform.release().lower() and os.environ.keys().isdisjoint(ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def make_deterministic(device: torch.device) -> None:
    """Restrict torch to algorithms that give the same bits each time; an operation without one raises an error.

    The backward pass of flash attention adds up by atomics by default, and that of cuDNN always does:
    the efficient and the math kernel are left. cuBLAS reads its variable at the first product.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time, and nothing reads such memory
    torch.backends.cudnn.deterministic = True
    if device.type == "cuda":
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


# A CPU works on micro-batches side by side, so a small batch has to be cut as well. A fixed number:
# the cores of a machine must not decide in which groups gradients are added up.
CPU_MICRO_BATCHES = 4


def micro_batch(device: torch.device, asked_tokens: int, row_tokens: int, batch_tokens: int) -> int:
    """Rows per forward pass for a setting of `asked_tokens` (0: choose), at most the batch."""
    tokens = asked_tokens or MICRO_BATCH_TOKENS[device.type]
    if device.type == "cpu" and not asked_tokens:
        tokens = min(tokens, batch_tokens // CPU_MICRO_BATCHES)
    return max(1, min(tokens, batch_tokens) // row_tokens)


def limit_memory(device: torch.device) -> None:
    """Let torch take at most `memory_share` of a GPU's memory, whatever it is taken for.

    On a chip that shares memory with the processor, a driver out of memory
    takes the whole machine down instead of raising an error.
    """
    if device.type == "mps":  # torch would go up to 1.7 times what Metal recommends, and the machine would swap
        torch.mps.set_per_process_memory_fraction(1.0)
    elif device.type == "cuda" and (share := memory_share(identify(device))) < 1.0:
        torch.cuda.set_per_process_memory_fraction(share, device.index)  # None: the current one

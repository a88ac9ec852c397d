"""Which of torch's attention kernels training uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from athanor.model.kernels import attention_by_torch
from athanor.model.varlen import documents_by_length

KERNELS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
VARLEN = "varlen"  # documents by their starts (athanor/model/varlen.py); rows of one document by torch's own dispatch
DEFAULT = "default"  # torch's own dispatch, shape by shape, and on a CPU short rows by hand


@contextlib.contextmanager
def attention(kernel: str, device: torch.device) -> Iterator[None]:
    """Attention by `kernel` (flash, efficient, cudnn, math, varlen, or default) inside the block, in every thread.

    A kernel that cannot take a mask, such as flash with documents on a GPU,
    gives way to the next that can: "flash,cudnn" says which. There that is never the math kernel, which
    writes every score to memory: torch raises instead.
    """
    if kernel == DEFAULT:
        yield
        return
    if kernel == VARLEN:
        with attention_by_torch(), documents_by_length():
            yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    others = [name for name in KERNELS if name != "math"] if device.type == "cuda" else ["math"]
    order = [kernel] if kernel == "math" else dict.fromkeys([*kernel.split(","), *others])
    with attention_by_torch(), sdpa_kernel([getattr(SDPBackend, KERNELS[name]) for name in order], set_priority=True):
        yield

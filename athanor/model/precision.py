"""Number formats of the forward and backward pass; master weights are fp32 in every one of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from athanor.base.errors import ParamsError
from athanor.model.gpu_family import product_dtype
from athanor.model.rounded import Numerics, fast_bf16, forget_weights

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE = 2.0**16
_GROW_AFTER = 2000


_inside, _lock = 0, threading.Lock()


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Context for a forward pass in `precision` (fp32, bf16 or fp16)."""
    if precision not in AUTOCAST:
        raise ParamsError(f"'{precision}' is not allowed", where="precision", fix=f"one of {', '.join(AUTOCAST)}")
    dtype = AUTOCAST[precision]
    if dtype is None or rounds_products(precision, device):
        return products(precision, device)
    return torch.autocast(device.type, dtype=dtype)


_on_meta: torch.dtype | None = None


@contextlib.contextmanager
def meta_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, `autocast_dtype` of the meta device is `dtype`: torch has no autocast there, where sizes are counted."""
    global _on_meta
    before, _on_meta = _on_meta, dtype
    try:
        yield
    finally:
        _on_meta = before


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The format of products under torch's autocast on the device, or None outside of it."""
    if device.type == "meta":
        return _on_meta
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def rounds_products(precision: str, device: torch.device) -> bool:
    """Whether `precision` means fp32 weights and residuals whose matrix products take rounded factors: bf16 on a CPU.

    Blocks and loss are written by hand for it (athanor/model/kernels.py), with the
    same meaning on every processor. Other products inside `products` (rows too long for these,
    a LoRA's base) stay fp32 tensors, whose factors oneDNN rounds where the processor has AMX.
    """
    return precision == "bf16" and device.type == "cpu"


@contextlib.contextmanager
def products(precision: str, device: torch.device) -> Iterator[None]:
    """Inside, matrix products are made as `precision` says, those of a backward pass too.

    A mode of the process: several threads may be inside, and the last one ends it.
    """
    global _inside
    if not rounds_products(precision, device):
        yield
        return
    with _lock:
        _inside += 1
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                torch.set_float32_matmul_precision("highest")
                forget_weights()


def numerics() -> Numerics:
    """How the kernels by hand multiply here and now: rounded inside `products` of a format that rounds, in any thread."""
    return Numerics(_inside > 0)


def scoring_precision(device: torch.device) -> str:
    """Format in which held-out text is scored: bf16 on an accelerator with units for it, else fp32."""
    return "bf16" if device.type != "cpu" and product_dtype(device) == torch.bfloat16 else "fp32"


def without_effect(precision: str, device: torch.device) -> bool:
    """True when `precision` is as slow as fp32: this processor has no units for it, and rounded fp32 stands for it."""
    return rounds_products(precision, device) and not fast_bf16()


class LossScale:
    """Dynamic loss scale for fp16, held on the device; a constant 1 for the other formats.

    Halved after a step with a non-finite gradient, doubled after 2000 good
    ones in a row, like torch's GradScaler, but without its look at the host
    each step and with a state of two numbers.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        self.active = precision == "fp16"
        self.scale = torch.tensor(_FIRST_SCALE if self.active else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale if self.active else loss

    def unscale(self, gradients: list[Tensor]) -> None:
        if self.active:
            torch._foreach_mul_(gradients, self.scale.reciprocal())

    def update(self, skipped: Tensor) -> None:
        """Adapt the scale to whether this step was skipped."""
        if not self.active:
            return
        good = torch.where(skipped, 0, self.good_steps + 1)
        grown = good >= _GROW_AFTER
        self.scale = torch.where(skipped, self.scale * 0.5, torch.where(grown, self.scale * 2, self.scale))
        self.good_steps = torch.where(grown, 0, good)

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.scale = tensors["scale"].to(self.scale.device)
        self.good_steps = tensors["good_steps"].to(self.good_steps.device)

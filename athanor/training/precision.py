"""Number formats of the forward and backward pass; master weights are fp32 in every one of them."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from athanor.errors import ParamsError

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE = 2.0**16
_GROW_AFTER = 2000


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Context for a forward pass in `precision` (fp32, bf16 or fp16)."""
    if precision not in AUTOCAST:
        raise ParamsError(f"'{precision}' is not allowed", where="precision", fix=f"one of {', '.join(AUTOCAST)}")
    dtype = AUTOCAST[precision]
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


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
        """Adapt to what this step met."""
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

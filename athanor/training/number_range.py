"""How near the numbers in each block are to the ends of their format: the largest, and the share that is lost below it.

fp16 ends at 65504 and has full precision down to 6e-5 (bf16 and fp32: 3e38
and 1e-38). A product above it is infinite, and what is far below it becomes
zero (Micikevicius et al. 2018, arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from athanor.model.precision import AUTOCAST

GRADIENT_ROWS = 4  # of each matrix


class Frame(NamedTuple):
    """One reading. A list has a number for each block.

    largest: largest absolute value that the forward pass computes in the block
    tiny: share of zeros and subnormal numbers of the format in the residual stream behind it
    gradient_largest, gradient_tiny: the same of the gradients of its matrices, as backward made them
    """

    step: int
    largest: list[float]
    tiny: list[float]
    gradient_largest: list[float]
    gradient_tiny: list[float]

    def summary(self) -> dict[str, float]:
        """What the blocks at the edge say, each with its number (the first block is 0)."""
        found: dict[str, float] = {}
        for name in ("largest", "gradient_tiny"):
            values = getattr(self, name)
            block = max(
                range(len(values)), key=lambda i, values=values: (values[i] != values[i], values[i])
            )  # NaN first
            found |= {name: values[block], f"{name}_block": float(block)}
        return found


class BlockRange:
    """Looks at what a forward pass computes in each block, while the `with` block runs.

    Matrix products are what the format bounds: their results, and the product of gate and value that is a factor of
    the last. `smallest` is the format's smallest normal number.
    """

    def __init__(self, blocks: Sequence[nn.Module], precision: str) -> None:
        self.blocks, self.smallest = list(blocks), smallest_normal(precision)
        self._extremes: list[list[Tensor]] = [[] for _ in self.blocks]
        self._tiny: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> BlockRange:
        for number, block in enumerate(self.blocks):
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    self._hooks.append(module.register_forward_hook(lambda _m, _i, out, n=number: self._see(n, out)))
                if name.endswith("down_proj"):
                    self._hooks.append(
                        module.register_forward_pre_hook(lambda _m, given, n=number: self._see(n, given[0]))
                    )
            self._hooks.append(block.register_forward_hook(lambda _m, _i, out, n=number: self._end(n, out)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, number: int, x: Tensor) -> None:
        self._extremes[number] += torch.aminmax(x.detach())

    def _end(self, number: int, out: Any) -> None:
        x = out[0] if isinstance(out, tuple) else out
        self._tiny[number] = tiny_share(x.detach().abs(), self.smallest)

    def numbers(self) -> Tensor | None:
        """[blocks, 2], fp32: the largest absolute value, and the share of tiny ones behind it; None where not seen."""
        if not self.blocks or len(self._tiny) < len(self.blocks) or not all(self._extremes):
            return None
        highest = torch.stack([torch.stack(values).float().abs().amax() for values in self._extremes])
        return torch.stack((highest, torch.stack([self._tiny[n] for n in range(len(self.blocks))])), 1)


def tiny_share(size: Tensor, smallest: float) -> Tensor:
    """Share of absolute values below the smallest normal number."""
    return torch.count_nonzero(size < smallest) / size.numel()


def smallest_normal(precision: str) -> float:
    return torch.finfo(AUTOCAST[precision] or torch.float32).tiny


def gradient_range(blocks: Sequence[nn.Module], precision: str, factor: float) -> Tensor | None:
    """[blocks, 2], fp32: largest absolute value and share of tiny ones in the first rows of the matrices' gradients.

    `factor`: what the loss scale and clipping have multiplied them with since backward. None where there are none.
    """
    numbers = []
    for block in blocks:
        rows = [
            weight.grad[:GRADIENT_ROWS].flatten()
            for weight in block.parameters()
            if weight.grad is not None and weight.grad.dim() == 2
        ]
        if not rows:
            return None
        size = torch.cat(rows).abs()
        numbers.append(torch.stack((size.amax() / factor, tiny_share(size, smallest_normal(precision) * factor))))
    return torch.stack(numbers) if numbers else None

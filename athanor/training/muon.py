"""Muon: momentum whose singular values are all brought to about one, for the matrices inside the blocks.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); the scale of the update
is that of Liu et al. 2025 (arXiv:2502.16982), at which learning rate and weight
decay mean the same as for AdamW, so both parts of a model share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

# The quintic of Jordan et al.: steep at zero, and every singular value ends between 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
_RMS = 0.2  # of an update's elements, as large as AdamW's usually are (Liu et al. 2025, section 2.2)


def orthogonal(x_BMN: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """The nearest matrices with singular values of about one, [B, M, N], by a Newton-Schulz iteration.

    bf16 on accelerators, as the authors do it; on a CPU in the precision of the input.
    """
    dtype = x_BMN.dtype
    x = x_BMN if x_BMN.device.type == "cpu" else x_BMN.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.transpose(1, 2)
    x = x / (torch.linalg.vector_norm(x.float(), dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    a, b, c = _COEFFICIENTS
    for _ in range(iterations):
        square = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.transpose(1, 2)).to(dtype)


# Applies a function to matrices, several at a time, and returns the results in order.
Spread = Callable[[Callable[[Tensor], Tensor], Sequence[Tensor]], list[Tensor]]


class Muon:
    """Nesterov momentum, made orthogonal, for the given matrices.

    Layers of equal shape go through together; with `spread` each matrix by
    itself, side by side with others. The bits do not depend on
    how many cores there are.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        momentum: float,
        weight_decay: float,
        spread: Spread | None = None,
    ) -> None:
        self.weights, self.momentum, self.weight_decay = dict(weights), momentum, weight_decay
        self.spread = spread
        self.buffers = {name: torch.zeros_like(weight.detach()) for name, weight in self.weights.items()}
        self.groups: dict[tuple[int, ...], list[str]] = {}
        for name, weight in self.weights.items():
            self.groups.setdefault(tuple(weight.shape), []).append(name)

    @torch.no_grad()
    def step_unless(self, skip: Tensor, rate: float) -> None:
        """One update at learning rate `rate`, or nothing at all where `skip` is true; decided on the device."""
        go = 1.0 - skip.float()
        moving: list[tuple[tuple[int, ...], list[Tensor], list[Tensor]]] = []
        for shape, group in self.groups.items():
            names = [name for name in group if self.weights[name].grad is not None]
            if not names:
                continue
            gradients = [torch.where(skip, 0.0, self.weights[name].grad) for name in names]
            buffers = [self.buffers[name] for name in names]
            weights = [self.weights[name] for name in names]
            # buffer + (1 - momentum)(gradient - buffer), or the buffer itself.
            torch._foreach_lerp_(buffers, gradients, (1 - self.momentum) * go)
            torch._foreach_lerp_(gradients, buffers, self.momentum)
            moving.append((shape, weights, gradients))
        directions = self._orthogonal([gradients for _, _, gradients in moving])
        for (shape, weights, _), updates in zip(moving, directions, strict=True):
            torch._foreach_mul_(weights, 1 - go * (rate * self.weight_decay))
            torch._foreach_add_(weights, torch._foreach_mul(updates, go * (-rate * _RMS * max(shape) ** 0.5)))

    def _orthogonal(self, groups: list[list[Tensor]]) -> list[list[Tensor]]:
        if self.spread is None:
            return [list(orthogonal(torch.stack(group)).unbind()) for group in groups]
        ready = iter(self.spread(lambda one: orthogonal(one[None])[0], [one for group in groups for one in group]))
        return [[next(ready) for _ in group] for group in groups]

    def tensors(self) -> dict[str, Tensor]:
        """The state as `<parameter>.momentum` tensors."""
        return {f"{name}.momentum": buffer for name, buffer in self.buffers.items()}

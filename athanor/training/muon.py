"""Muon: momentum whose singular values are all brought to about one, for the matrices inside the blocks.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); the scale of the update
is that of Liu et al. 2025 (arXiv:2502.16982), at which learning rate and weight
decay mean the same as for AdamW, so both parts of a model share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

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
ParallelMap = Callable[[Callable[[Tensor], Tensor], Sequence[Tensor]], list[Tensor]]


class ShardedParams(Protocol):
    """For weights that are sharded over processes: gathers the full tensor, and cuts this process's shard out of one."""

    def gathered(self, name: str, tensor: Tensor) -> Tensor: ...
    def shard_of(self, name: str, full: Tensor) -> Tensor: ...


class Muon:
    """Nesterov momentum, made orthogonal, for the given matrices.

    Layers of equal shape are updated together; with `parallel_map` each matrix
    alone, several at the same time. The bits do not depend on the number of
    cores. With `sharded`, weights are shards of matrices: one group is gathered
    at a time, every process computes the same directions and keeps its shard.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        momentum: float,
        weight_decay: float,
        parallel_map: ParallelMap | None = None,
        sharded: ShardedParams | None = None,
    ) -> None:
        self.weights, self.momentum, self.weight_decay = dict(weights), momentum, weight_decay
        self.parallel_map, self.sharded = parallel_map, sharded
        self.buffers = {name: torch.zeros_like(weight.detach()) for name, weight in self.weights.items()}
        self.groups: dict[tuple[int, ...], list[str]] = {}  # by the shape of the whole: equal in every process
        for name, buffer in self.buffers.items():
            shape = tuple(buffer.shape if sharded is None else sharded.gathered(name, buffer).shape)
            self.groups.setdefault(shape, []).append(name)

    @torch.no_grad()
    def step_unless(self, skip: Tensor, lr: float) -> None:
        """One update at learning rate `lr`, or nothing at all where `skip` is true; decided on the device."""
        keep = 1.0 - skip.float()
        moving: list[tuple[tuple[int, ...], list[str], list[Tensor]]] = []
        for shape, group in self.groups.items():
            # An empty part has no gradient and yet belongs to a matrix that moves.
            names = [name for name in group if self.weights[name].grad is not None or not self.weights[name].numel()]
            if not names:
                continue
            gradients = [torch.where(skip, 0.0, self._gradient(name)) for name in names]
            buffers = [self.buffers[name] for name in names]
            # buffer + (1 - momentum)(gradient - buffer), or the buffer itself.
            torch._foreach_lerp_(buffers, gradients, (1 - self.momentum) * keep)
            torch._foreach_lerp_(gradients, buffers, self.momentum)
            moving.append((shape, names, gradients))
        directions = self._directions([(names, gradients) for _, names, gradients in moving])
        for (shape, names, _), updates in zip(moving, directions, strict=True):
            weights = [self.weights[name] for name in names]
            torch._foreach_mul_(weights, 1 - keep * (lr * self.weight_decay))
            torch._foreach_add_(weights, torch._foreach_mul(updates, keep * (-lr * _RMS * max(shape) ** 0.5)))

    def _gradient(self, name: str) -> Tensor:
        weight = self.weights[name]
        return torch.zeros_like(weight) if weight.grad is None else weight.grad

    def _directions(self, groups: list[tuple[list[str], list[Tensor]]]) -> Iterator[list[Tensor]]:
        """The direction of every gradient, one group at a time; the full gradients of a group have one shape."""
        if self.parallel_map is not None:
            flat = [gradient for _, gradients in groups for gradient in gradients]
            updates = iter(self.parallel_map(lambda gradient: orthogonal(gradient[None])[0], flat))
            yield from ([next(updates) for _ in gradients] for _, gradients in groups)
            return
        for names, gradients in groups:
            if self.sharded is None:
                yield list(orthogonal(torch.stack(gradients)).unbind())
                continue
            gathered = [self.sharded.gathered(name, gradient) for name, gradient in zip(names, gradients, strict=True)]
            directions = orthogonal(torch.stack(gathered)).unbind()
            yield [self.sharded.shard_of(name, gradient) for name, gradient in zip(names, directions, strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        """The state as `<parameter>.momentum` tensors."""
        return {f"{name}.momentum": buffer for name, buffer in self.buffers.items()}

"""Muon: momentum whose singular values are all brought to about one, for the matrices inside the blocks.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); the scale of the update
is that of Liu et al. 2025 (arXiv:2502.16982), at which learning rate and weight
decay mean the same as for AdamW, so both parts of a model share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from athanor.model.gpu_family import product_dtype
from athanor.model.rounded import factor, rounded

# Polar Express (Amsel et al. 2025, arXiv:2505.16932): odd quintics of which each is the best after those before it,
# for singular values from 1e-3 on, with room for what bf16 rounds.
_QUINTICS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_NORM_MARGIN = 1.01  # the norm of a rounded matrix may be a little above one
_RMS = 0.2  # of an update's elements, as large as AdamW's usually are (Liu et al. 2025, section 2.2)
PIECE_ELEMENTS = 1 << 19  # of matrices that one core updates together: about what its cache holds


def orthogonal(x_BMN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The nearest matrices with singular values of about one, [B, M, N], by Newton-Schulz iterations.

    In bf16, or where a chip has no units for it in fp16, whose range suffices: elements of the iterates stay below 8.
    """
    dtype = dtype or product_dtype(x_BMN.device)
    norm_B11 = torch.linalg.vector_norm(x_BMN, dim=(1, 2), keepdim=True)
    x = factor(x_BMN / (norm_B11 * _NORM_MARGIN + 1e-7), dtype)
    tall = x.shape[1] > x.shape[2]
    for a, b, c in _QUINTICS:
        square = rounded(torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT), dtype)
        polynomial = rounded(torch.baddbmm(square, square, square, beta=b, alpha=c), dtype)
        left, right = (x, polynomial) if tall else (polynomial, x)
        x = rounded(torch.baddbmm(x, left, right, beta=a), dtype)
    return x.to(x_BMN.dtype)


# Applies a function to items, several at a time, and returns the results in order.
ParallelMap = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


class ShardedParams(Protocol):
    """For weights that are sharded over processes: gathers the full tensor, and cuts this process's shard out of one."""

    def gathered(self, name: str, tensor: Tensor) -> Tensor: ...
    def shard_of(self, name: str, full: Tensor) -> Tensor: ...


class Piece(NamedTuple):
    """Matrices of one shape that are updated together, and their state, stacked."""

    names: list[str]
    shape: tuple[int, ...]  # of a whole matrix: equal in every process
    momentum: Tensor

    def only(self, index: int) -> Piece:
        """One of the matrices, with its part of the same state."""
        part = slice(index, index + 1)
        return Piece(self.names[part], self.shape, self.momentum[part])


class Muon:
    """Nesterov momentum, made orthogonal, for the given matrices.

    Layers of equal shape are updated together; with `parallel_map` in pieces that
    do not depend on the number of cores, and so neither do the bits. With
    `sharded`, weights are shards of matrices: one group is gathered at a time,
    every process computes the same directions and keeps its shard.
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
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, weight in self.weights.items():
            shape = tuple((weight if sharded is None else sharded.gathered(name, weight.detach())).shape)
            groups.setdefault(shape, []).append(name)
        self.pieces: list[Piece] = []
        for shape, group in groups.items():
            size = len(group) if parallel_map is None else max(1, PIECE_ELEMENTS // (shape[0] * shape[1]))
            for start in range(0, len(group), size):
                names = group[start : start + size]
                momentums = torch.stack([torch.zeros_like(self.weights[name].detach()) for name in names])
                self.pieces.append(Piece(names, shape, momentums))

    @torch.no_grad()
    def step_unless(self, skip: Tensor, lr: float) -> None:
        """One update at learning rate `lr`, or nothing at all where `skip` is true; decided on the device."""
        if skip.device.type == "cpu" and bool(skip):  # where a look does not wait for anything
            return

        def update(piece: Piece) -> None:
            self._update(piece, skip, lr)

        if self.parallel_map is not None:
            self.parallel_map(update, list(self._moving()))
            return
        for piece in self._moving():
            update(piece)

    def _moving(self) -> Iterator[Piece]:
        """The pieces of which every matrix has a gradient, and single ones of the others."""
        for piece in self.pieces:
            # An empty part has no gradient and yet belongs to a matrix that moves.
            ready = [self.weights[name].grad is not None or not self.weights[name].numel() for name in piece.names]
            if all(ready):
                yield piece
            else:
                yield from (piece.only(index) for index, moves in enumerate(ready) if moves)

    @torch.no_grad()  # a mode of the thread
    def _update(self, piece: Piece, skip: Tensor, lr: float) -> None:
        weights, keep = [self.weights[name] for name in piece.names], 1.0 - skip.float()
        gradients = torch.stack(
            [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        )
        if skip.device.type != "cpu":
            gradients.masked_fill_(skip, 0.0)
        # momentum + (1 - beta)(gradient - momentum), or the momentum itself.
        piece.momentum.lerp_(gradients, (1 - self.momentum) * keep)
        gradients.lerp_(piece.momentum, self.momentum)
        directions = self._directions(piece, gradients).mul_(keep * (-lr * _RMS * max(piece.shape) ** 0.5))
        torch._foreach_mul_(weights, 1 - keep * (lr * self.weight_decay))
        torch._foreach_add_(weights, directions.unbind())

    def _directions(self, piece: Piece, gradients: Tensor) -> Tensor:
        if self.sharded is None:
            return orthogonal(gradients)
        whole = [self.sharded.gathered(name, part) for name, part in zip(piece.names, gradients.unbind(), strict=True)]
        directions = orthogonal(torch.stack(whole))
        parts = zip(piece.names, directions.unbind(), strict=True)
        return torch.stack([self.sharded.shard_of(name, direction) for name, direction in parts])

    def tensors(self) -> dict[str, Tensor]:
        """The state as `<parameter>.momentum` tensors, which are views of the stacks."""
        return {
            f"{name}.momentum": momentum
            for piece in self.pieces
            for name, momentum in zip(piece.names, piece.momentum, strict=True)
        }

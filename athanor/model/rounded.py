"""Matrix products of bf16 factors, summed in fp32, on processors with and without units for them.

Where the processor multiplies bf16 fast, tensors are bf16. Elsewhere they are
fp32 tensors of bf16 values, rounded again after every product. Both mean the
same numbers but for the order of sums.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_forced: bool | None = None


def fast_bf16() -> bool:
    """Whether products of bf16 tensors are faster on this processor than those of fp32."""
    return _has_units() if _forced is None else _forced


@functools.cache
def _has_units() -> bool:
    capabilities = torch.cpu.get_capabilities()
    # Without these oneDNN takes bf16 tensors too, but converts them first.
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16"))


@contextlib.contextmanager
def forced(fast: bool) -> Iterator[None]:
    """Inside, `fast_bf16` answers `fast`, in all threads: for tests of both ways on one processor."""
    global _forced
    before, _forced = _forced, fast
    try:
        yield
    finally:
        _forced = before


def factor(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`x` rounded to `dtype`, in the dtype that products on its device are made in."""
    narrow = x.to(dtype)
    return narrow if dtype != torch.bfloat16 or x.device.type != "cpu" or fast_bf16() else narrow.float()


def rounded(product: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The product of two factors, rounded to `dtype` once."""
    return product if product.dtype == dtype else product.to(dtype).float()


# By memory and version of the weights, which are kept, so that no other tensor gets their memory.
_factors: dict[tuple[int, ...], tuple[tuple[Tensor, ...], Tensor]] = {}
_lock = threading.Lock()


def forget_weights() -> None:
    """Let go of what `Numerics.weights` keeps."""
    _factors.clear()


class Numerics(NamedTuple):
    """Products as they are at the time of the forward pass, for the backward pass too."""

    rounds: bool

    def factor(self, x: Tensor) -> Tensor:
        """A factor of a product."""
        return factor(x) if self.rounds else x

    def result(self, x: Tensor) -> Tensor:
        """What was computed from factors, in their format."""
        return rounded(x) if self.rounds else x

    def empty(self, shape: Sequence[int]) -> Tensor:
        """For a factor on the CPU."""
        return torch.empty(shape, dtype=torch.bfloat16 if self.rounds and fast_bf16() else torch.float32)

    def weights(self, *parts: Tensor) -> Tensor:
        """Weights as one factor, below one another; rounded once until `forget_weights`, for all replicas of a model."""
        if not self.rounds:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        key = tuple(number for part in parts for number in (part.data_ptr(), part._version))
        with _lock:
            if key not in _factors:
                _factors[key] = parts, factor(torch.cat(parts))
            return _factors[key][1]

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        return self.result(torch.mm(a, b))

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        return self.result(torch.bmm(a, b))

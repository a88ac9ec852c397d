"""Cross-entropy by hand for training, with its plain twin; see athanor/model/kernels.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from athanor.model import elementwise
from athanor.model.precision import numerics
from athanor.model.rounded import Numerics


def summed_cross_entropy(
    h_ND: Tensor, head_VD: Tensor, next_N: Tensor, divisor: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of all targets, summed and divided; gradients are made with it, a chunk of rows at a time.

    Also that of each target, fp32 [N], to look at: no gradient goes through it.

    Logits never exist as a whole. On a CPU a chunk of 512 rows stays in the cache from
    the product to both gradients: 10 to 25 % faster than the plain way. On an accelerator whole
    logits are what takes most memory: 3.1 GB for 16,384 tokens of 48,000 ids, three times over.
    """
    by = numerics() if h_ND.device.type == "cpu" else Half.of(h_ND.device)
    return _CrossEntropy.apply(h_ND, head_VD, next_N, divisor, z_loss, by)


class Half(NamedTuple):
    """Products of an accelerator in the format of autocast, in place of `Numerics`."""

    dtype: torch.dtype

    @classmethod
    def of(cls, device: torch.device) -> Half:
        enabled = torch.is_autocast_enabled(device.type)
        return cls(torch.get_autocast_dtype(device.type) if enabled else torch.float32)

    def factor(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def weights(self, matrix: Tensor) -> Tensor:
        return self.factor(matrix)

    def result(self, x: Tensor) -> Tensor:
        return x

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b)


CHUNK_ROWS = 512
CHUNK_LOGITS = 1 << 26  # of an accelerator: 256 MiB in fp32, and products of a thousand rows
# Rows are filled up to a multiple of this: oneDNN compiles and keeps a kernel for each number of rows, and the number
# of targets is another one in every batch (260 MB more in 200 steps of fine-tuning, without).
PADDED_ROWS = 64


def chunk_rows(device: torch.device, vocab_size: int) -> int:
    """How many targets the loss works on at once."""
    padded = CHUNK_LOGITS // vocab_size // PADDED_ROWS * PADDED_ROWS
    return CHUNK_ROWS if device.type == "cpu" else max(PADDED_ROWS, padded)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, head_VD: Tensor, next_N: Tensor, divisor: int, z_loss: float, by: Numerics | Half
    ) -> tuple[Tensor, Tensor]:
        count, step = len(h_ND), chunk_rows(h_ND.device, len(head_VD))
        # In fp16 a gradient this small would be 0 before the loss scale makes it larger, so it is divided at the end.
        ctx.divisor = divisor if isinstance(by, Half) else 1
        padding = -count % PADDED_ROWS
        h_all, w = by.factor(F.pad(h_ND, (0, 0, 0, padding))), by.weights(head_VD)
        next_all = F.pad(next_N, (0, padding))
        losses = torch.empty(len(h_all), device=h_ND.device)
        dh, dhead = torch.empty(h_all.shape, device=h_ND.device), None  # None stays for an output layer that does
        buffer = w.new_empty(min(step, len(h_all)), len(head_VD))
        for start in range(0, len(h_all), step):
            rows = slice(start, start + step)
            h = h_all[rows]
            logits = by.result(torch.mm(h, w.t(), out=buffer[: len(h)]))
            p, losses[rows] = elementwise.cross_entropy(logits, next_all[rows], z_loss, ctx.divisor / divisor, by)
            dh[rows] = by.mm(p, w)
            if ctx.needs_input_grad[1]:
                part = by.mm(p.t(), h)  # nothing of the rows that fill up: their h is 0
                dhead = part.float() if dhead is None else dhead.add_(part)
        losses_N, dh = losses[:count], dh[:count]
        if ctx.needs_input_grad[1]:
            dhead = torch.zeros_like(head_VD) if dhead is None else dhead
        ctx.save_for_backward(dh, dhead)
        ctx.mark_non_differentiable(losses_N)
        return losses_N.sum() / divisor, losses_N

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dh, dhead = ctx.saved_tensors
        if upstream.device.type != "cpu" or float(upstream) != ctx.divisor:  # an accelerator is not asked for numbers
            dh, dhead = (None if part is None else part * (upstream / ctx.divisor) for part in (dh, dhead))
        return dh, dhead, None, None, None, None


def plain_summed_cross_entropy(
    h_ND: Tensor, head_VD: Tensor, next_N: Tensor, divisor: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The plain version of `summed_cross_entropy`."""
    losses_N = cross_entropies(h_ND, head_VD, next_N, z_loss)
    return losses_N.sum() / divisor, losses_N.detach()


def cross_entropies(h_ND: Tensor, head_VD: Tensor, next_N: Tensor, z_loss: float) -> Tensor:
    """Cross-entropy in nats of every target, fp32 [N]."""
    logits_NV = F.linear(h_ND, head_VD).float()
    losses_N = F.cross_entropy(logits_NV, next_N, reduction="none")
    if z_loss:
        losses_N = losses_N + z_loss * logits_NV.logsumexp(-1).square()
    return losses_N

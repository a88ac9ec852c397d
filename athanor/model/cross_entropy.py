"""Cross-entropy by hand for training, with its plain twin; see athanor/model/kernels.py."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from athanor.model import elementwise
from athanor.model.precision import autocast_dtype, numerics
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
        return cls(autocast_dtype(device) or torch.float32)

    def factor(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def weights(self, matrix: Tensor) -> Tensor:
        return self.factor(matrix)

    def result(self, x: Tensor) -> Tensor:
        return x

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b)

    def add_mm(self, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Add a product to a total in fp32, where possible before it is rounded."""
        with contextlib.suppress(RuntimeError, TypeError):  # torch has it since 2.8, for some devices
            return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return total.add_(torch.mm(a, b))


CHUNK_ROWS = 512
# Of an accelerator: 256 MiB in 16 bits. At V = 48,000 and D = 1,280 that is 2,752 rows, whose logits move 1.6 GB, 12 bytes
# each with the products; the output layer's gradient in fp32, read and written once for a chunk, 0.5 GB.
CHUNK_LOGITS = 1 << 27
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
            if isinstance(by, Half):
                p, losses[rows] = _on_accelerator(logits, next_all[rows], z_loss)
            else:
                p, losses[rows] = elementwise.cross_entropy(logits, next_all[rows], z_loss, 1 / divisor, by)
            dh[rows] = by.mm(p, w)
            if ctx.needs_input_grad[1]:  # nothing of the rows that fill up: their h is 0
                if isinstance(by, Half):
                    dhead = by.add_mm(torch.zeros(w.shape, device=w.device) if dhead is None else dhead, p.t(), h)
                else:
                    part = by.mm(p.t(), h)
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


_compiler_fails = False


def _on_accelerator(logits_NV: Tensor, next_N: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """The gradient of the summed losses, in place of the logits, and the losses, fp32 [N]."""
    global _compiler_fails
    at_target = next_N[:, None]
    target = logits_NV.gather(1, at_target).float()
    normaliser = None
    if not (_compiler_fails or logits_NV.is_mps):  # torch's compiler for Metal is a prototype
        try:
            normaliser = fused_softmax(logits_NV, z_loss)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler's errors are of any type
            _compiler_fails = True
            warnings.warn(f"the loss is not compiled and thus slower ({error!r:.300})", stacklevel=2)
    if normaliser is None:
        normaliser = _softmax(logits_NV, z_loss)
    losses = normaliser - target + z_loss * normaliser.square()
    gradient = (target - normaliser).exp() * (1 + 2 * z_loss * normaliser) - 1
    return logits_NV.scatter_(1, at_target, gradient.to(logits_NV.dtype)), losses[:, 0]


def _softmax(logits_NV: Tensor, z_loss: float) -> Tensor:
    """Log-sum-exp, fp32 [N, 1]. The logits become their gradient, but for those of targets: inductor would copy all.

    Compiled for a GPU it is one kernel that moves 6 bytes a logit in 16 bits, two reads and a write; uncompiled, 36.
    """
    x_NV = logits_NV.float()
    top = x_NV.amax(1, keepdim=True)
    exp_NV = x_NV.sub_(top).exp_()
    total = exp_NV.sum(1, keepdim=True)
    normaliser = top + total.log()
    torch.mul(exp_NV, (1 + 2 * z_loss * normaliser) / total, out=logits_NV)
    return normaliser


_compiled = functools.cache(torch.compile)  # which loads the compiler, when called


# An operator, so that a mode that counts or fakes tensors sees one call and no compiler.
@torch.library.custom_op(
    "athanor::softmax_", mutates_args=("logits_NV",), schema="(Tensor(a!) logits_NV, float z_loss) -> Tensor"
)
def fused_softmax(logits_NV: Tensor, z_loss: float) -> Tensor:
    torch._dynamo.mark_dynamic(logits_NV, 0)  # one compilation for all numbers of rows
    torch._dynamo.mark_static(logits_NV, 1)  # else rows would not be known to be aligned
    return _compiled(_softmax)(logits_NV, z_loss)


@fused_softmax.register_fake
def _(logits_NV: Tensor, z_loss: float) -> Tensor:
    return logits_NV.new_empty(len(logits_NV), 1, dtype=torch.float32)


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

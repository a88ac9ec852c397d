"""Kernels for training on a CPU in fp32, with gradients written by hand: fewer passes over memory than autograd makes.

At widths of 128 to 512 half of a training step is not matrix products but
passes over activations. Each function here has a plain version, which is what
runs on accelerators, under a compiler, in other precisions and without
gradients; tests hold the two together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

# Queries per block of attention. 64 was best or within 2 % of it from 128 to 512 tokens, 1.3 to 1.8
# times as fast, forward and backward, as torch's kernel; at 1024 tokens that one is as fast.
BLOCK_TOKENS = 64
MAX_ROW_TOKENS = 512
MASKED_SCORE = -1e30  # added to a score: nothing is left of it, and it is a number, unlike what an overflow leaves


def use_cpu_kernel(x: Tensor) -> bool:
    """Whether the functions of this module take over for an input."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, statistics in fp32."""
    if use_cpu_kernel(x):
        return _RMSNorm.apply(x, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, inverse, weight = ctx.saved_tensors
        width = unit.shape[-1]
        projected = (dy * unit).view(-1, width)
        dweight = projected.sum(0)
        radial = torch.mv(projected, weight).view(inverse.shape).div_(-width)
        return (dy * weight).addcmul_(unit, radial).mul_(inverse), dweight, None


def cpu_attention_fits(device: str, precision: str, tokens: int) -> bool:
    """Whether training in a format on a type of device has `attend` for its rows: short ones of whole blocks."""
    short = tokens <= MAX_ROW_TOKENS and tokens % min(tokens, BLOCK_TOKENS) == 0
    return device == "cpu" and precision != "fp16" and short  # fp16 on a CPU is autocast's


_torch_attention_depth = 0  # blocks of `attention_by_torch` that are open, in the whole process


@contextlib.contextmanager
def attention_by_torch() -> Iterator[None]:
    """Inside, in every thread, torch's kernels work where `attend` would."""
    global _torch_attention_depth
    _torch_attention_depth += 1
    try:
        yield
    finally:
        _torch_attention_depth -= 1


def use_cpu_attention(q_BTHE: Tensor) -> bool:
    """Whether `attend` is for queries like these, here and now."""
    return not _torch_attention_depth and use_cpu_kernel(q_BTHE) and cpu_attention_fits("cpu", "fp32", q_BTHE.shape[1])


def attend(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, table: Tensor, bias_BTT: Tensor | None) -> Tensor:
    """Rotary positions and grouped-query attention of whole rows: [B, T, H·E].

    `table` is [T, 2, E/2]. Causal without a bias; `bias_BTT` is 0 where a
    position may be seen and MASKED_SCORE elsewhere, future included.
    """
    return _Attend.apply(q_BTHE, k_BTKE, v_BTKE, table, bias_BTT)


class _Attend(Function):
    """Blocks of n queries against the keys up to their end, so half of the score matrix is never computed.

    Layouts: queries [B·K, blocks, G·n, E] with the G heads of a key head side by side, keys and values [B·K, T, E].
    """

    @staticmethod
    def forward(
        ctx: Any, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, table: Tensor, bias_BTT: Tensor | None
    ) -> Tensor:
        B, T, H, E = q_BTHE.shape
        K = k_BTKE.shape[2]
        G, n = H // K, min(T, BLOCK_TOKENS)
        q = q_BTHE.new_empty(B * K, T // n, G * n, E)
        k, v = q_BTHE.new_empty(B * K, T, E), q_BTHE.new_empty(B * K, T, E)
        _rotate_into(_blocked(q_BTHE, K, n), q.view(B, K, T // n, G, n, E), _block_table(table, n), 1)
        _rotate_into(k_BTKE.transpose(1, 2), k.view(B, K, T, E), table, 1)
        v.view(B, K, T, E).copy_(v_BTKE.transpose(1, 2))
        out = torch.empty_like(q_BTHE, memory_format=torch.contiguous_format)
        blocked = _blocked(out, K, n)
        future_nn = torch.full((n, n), -torch.inf).triu_(1) if bias_BTT is None else None
        weights = []
        for block in range(T // n):
            start, end = block * n, (block + 1) * n
            p = q.new_empty(B * K, G * n, end)
            torch.baddbmm(p, q[:, block], k[:, :end].transpose(1, 2), beta=0, alpha=E**-0.5, out=p)
            p_BKGnS = p.view(B, K, G, n, end)
            if bias_BTT is None:
                p_BKGnS[..., start:] += future_nn
            else:
                p_BKGnS += bias_BTT[:, None, None, start:end, :end]
            torch.softmax(p, -1, out=p)
            blocked[:, :, block] = torch.bmm(p, v[:, :end]).view(B, K, G, n, E)
            weights.append(p)
        ctx.save_for_backward(q, k, v, table, *weights)
        ctx.shape = (B, T, H, K, E)
        return out.flatten(2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table, *weights = ctx.saved_tensors
        B, T, H, K, E = ctx.shape
        G, n = H // K, min(T, BLOCK_TOKENS)
        incoming = _blocked(dout.view(B, T, H, E), K, n)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block, p in enumerate(weights):
            end = (block + 1) * n
            d = incoming[:, :, block].reshape(B * K, G * n, E)
            dv[:, :end].baddbmm_(p.transpose(1, 2), d)
            dp = torch.bmm(d, v[:, :end].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            torch.baddbmm(dq[:, block], ds, k[:, :end], beta=0, alpha=E**-0.5, out=dq[:, block])
            dk[:, :end].baddbmm_(ds.transpose(1, 2), q[:, block], alpha=E**-0.5)
        grads = [dout.new_empty(B, T, heads, E) for heads in (H, K)]
        _rotate_into(dq.view(B, K, T // n, G, n, E), _blocked(grads[0], K, n), _block_table(table, n), -1)
        _rotate_into(dk.view(B, K, T, E), grads[1].transpose(1, 2), table, -1)
        return grads[0], grads[1], dv.view(B, K, T, E).transpose(1, 2), None, None


def _blocked(x_BTHE: Tensor, K: int, n: int) -> Tensor:
    """The same memory seen as [B, K, blocks, G, n, E]."""
    B, T, H, E = x_BTHE.shape
    return x_BTHE.view(B, T // n, n, K, H // K, E).permute(0, 3, 1, 4, 2, 5)


def _block_table(table: Tensor, n: int) -> Tensor:
    """[T, 2, E/2] as [blocks, 1, n, 2, E/2]."""
    return table.view(-1, 1, n, *table.shape[1:])


def _rotate_into(x: Tensor, out: Tensor, table: Tensor, sign: int) -> None:
    """Rotate x (half rotation) by the angles of the table, forwards or backwards, into `out`."""
    cos, sin = table[..., 0, :], table[..., 1, :]
    (first, second), (out_first, out_second) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)


def summed_cross_entropy(
    h_ND: Tensor, head_VD: Tensor, next_N: Tensor, divisor: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of all targets, summed and divided; gradients are made with it, a chunk of rows at a time.

    Also that of each target, fp32 [N], to look at: no gradient goes through it.

    Logits never exist as a whole: a chunk of 256 rows stays in the cache from
    the product to both gradients. 10 to 25 % faster than the plain way here.
    """
    return _CrossEntropy.apply(h_ND, head_VD, next_N, divisor, z_loss)


CHUNK_ROWS = 256


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, head_VD: Tensor, next_N: Tensor, divisor: int, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        dh = torch.empty_like(h_ND)
        dhead = torch.zeros_like(head_VD) if ctx.needs_input_grad[1] else None  # None: an output layer that stays
        losses_N = h_ND.new_empty(len(h_ND))
        buffer = h_ND.new_empty(min(CHUNK_ROWS, len(h_ND)), len(head_VD))
        for start in range(0, len(h_ND), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            h, target = h_ND[rows], next_N[rows, None]
            p = torch.mm(h, head_VD.t(), out=buffer[: len(h)])
            max_logit, index = p.max(-1, keepdim=True)
            target_logit = p.gather(1, target)
            torch.softmax(p, -1, out=p)
            # By way of the likeliest id: the target's own probability may be too small for a float.
            log_normaliser = max_logit - p.gather(1, index).log_()
            loss = log_normaliser - target_logit
            if z_loss:
                loss = loss + z_loss * log_normaliser.square()
                p.mul_(1 + 2 * z_loss * log_normaliser)
            p.scatter_add_(1, target, p.new_full(target.shape, -1.0))
            losses_N[rows] = loss[:, 0]
            torch.mm(p, head_VD, out=dh[rows])
            if dhead is not None:
                dhead.addmm_(p.t(), h, alpha=1 / divisor)
        ctx.save_for_backward(dh.mul_(1 / divisor), dhead)
        ctx.mark_non_differentiable(losses_N)
        return losses_N.sum() / divisor, losses_N

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        dh, dhead = ctx.saved_tensors
        factor = float(upstream)
        if factor != 1.0:
            dh, dhead = dh * factor, None if dhead is None else dhead * factor
        return dh, dhead, None, None, None


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

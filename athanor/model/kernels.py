"""Kernels for training on a CPU, with gradients written by hand: fewer passes over memory than autograd makes.

At widths of 128 to 512 half of a training step is not matrix products but
passes over activations. Each function here has a plain version, which is what
runs on accelerators, under a compiler and without gradients; tests hold the
two together.

In bf16 both factors of every product are rounded, and so is what comes out of
it (athanor/model/rounded.py); the residual stream, norms, rotations and the
sums of gradients are fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from athanor.model.precision import numerics

# Queries per block of attention: the scores after a block's last query are never computed. 128 and 256
# were within 2 % of each other at 256 tokens a row; torch's own kernel took three times as long there.
BLOCK_TOKENS = 128
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


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(dh: Tensor, unit: Tensor, inverse: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and gain for those of norm(x) · gain, of which `dh` is overwritten; `unit` is norm(x)."""
    projected = dh * unit
    radial = torch.mv(projected, gain).view(inverse.shape).div_(-unit.shape[-1])
    return dh.mul_(gain).addcmul_(unit, radial).mul_(inverse), projected.sum(0)


def feed_forward(x_BTD: Tensor, gain_D: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
    """x + SwiGLU(norm(x)): the second half of a block."""
    return _FeedForward.apply(x_BTD, gain_D, gate, up, down, eps)


class _FeedForward(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
        by = ctx.by = numerics()
        x_ND = x_BTD.view(-1, x_BTD.shape[-1])
        inverse = _inverse_rms(x_ND, eps)
        unit = x_ND * inverse
        h, w, w_down = by.factor(unit * gain), by.factor(torch.cat((gate, up))), by.factor(down)
        both = by.mm(h, w.t())
        g, u = both.chunk(2, 1)
        silu = by.result(F.silu(g))
        y = by.mm(by.result(silu * u), w_down.t())
        ctx.save_for_backward(unit, inverse, gain, h, w, w_down, both, silu)
        return torch.add(x_ND, y.float()).view(x_BTD.shape)

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, gain, h, w, w_down, both, silu = ctx.saved_tensors
        by, dy = ctx.by, dy_BTD.view(unit.shape)
        d = by.factor(dy)
        g, u = both.chunk(2, 1)
        dhidden = by.mm(d, w_down)
        ddown = by.mm(d.t(), by.result(silu * u)).float()
        dboth = torch.empty_like(both)
        torch.mul(dhidden, silu, out=dboth[:, g.shape[1] :])
        torch.ops.aten.silu_backward.grad_input(by.result(dhidden.mul_(u)), g, grad_input=dboth[:, : g.shape[1]])
        dboth = by.result(dboth)
        dgate, dup = by.mm(dboth.t(), h).float().chunk(2)
        dx, dgain = _norm_backward(by.mm(dboth, w).float(), unit, inverse, gain)
        return dx.add_(dy).view(dy_BTD.shape), dgain, dgate, dup, ddown, None


def cpu_attention_fits(device: str, precision: str, tokens: int) -> bool:
    """Whether training in a format on a type of device has `attention` for its rows: short ones of whole blocks."""
    short = tokens <= MAX_ROW_TOKENS and tokens % min(tokens, BLOCK_TOKENS) == 0
    return device == "cpu" and precision != "fp16" and short  # fp16 on a CPU is autocast's


_torch_attention_depth = 0  # blocks of `attention_by_torch` that are open, in the whole process


@contextlib.contextmanager
def attention_by_torch() -> Iterator[None]:
    """Inside, in every thread, torch's kernels work where `attention` would."""
    global _torch_attention_depth
    _torch_attention_depth += 1
    try:
        yield
    finally:
        _torch_attention_depth -= 1


def use_cpu_attention(x_BTD: Tensor) -> bool:
    """Whether `attention` is for rows like these, here and now."""
    return not _torch_attention_depth and use_cpu_kernel(x_BTD) and cpu_attention_fits("cpu", "fp32", x_BTD.shape[1])


def attention(
    x_BTD: Tensor,
    gain_D: Tensor,
    projections: tuple[Tensor, Tensor, Tensor, Tensor],
    head_gains: tuple[Tensor, Tensor] | None,
    table: Tensor,
    bias_BTT: Tensor | None,
    eps: float,
) -> Tensor:
    """x + attention(norm(x)), whole rows: the first half of a block.

    `projections` of queries, keys, values and output; `head_gains` of queries and
    keys, where each head is normed. `table` is [T, 2, E/2]. Causal without a bias;
    `bias_BTT` is 0 where a position may be seen and MASKED_SCORE elsewhere, future included.
    """
    return _Attention.apply(x_BTD, gain_D, *projections, *(head_gains or (None, None)), table, bias_BTT, eps)


def attention_bias(mask: Tensor) -> Tensor:
    """What `attention` adds to scores for a mask that is true where a position may be seen."""
    return numerics().factor(torch.zeros(mask.shape).masked_fill_(~mask, MASKED_SCORE))


class _Attention(Function):
    """Blocks of n queries against the keys up to their end.

    Layouts: queries [B·K, blocks, G·n, E] with the G heads of a key head side by side, keys and values [B·K, T, E].
    Within a head element i stands beside i + E/2, with which it is rotated, so that a rotation is one product
    of complex numbers: rows of weights are read in that order, and scores do not depend on it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        gain: Tensor,
        wq: Tensor,
        wk: Tensor,
        wv: Tensor,
        wo: Tensor,
        q_gain: Tensor | None,
        k_gain: Tensor | None,
        table: Tensor,
        bias_BTT: Tensor | None,
        eps: float,
    ) -> Tensor:
        by = ctx.by = numerics()
        B, T, D = x_BTD.shape
        E = 2 * table.shape[-1]
        H, K, n = len(wq) // E, len(wk) // E, min(T, BLOCK_TOKENS)
        x_ND = x_BTD.view(-1, D)
        inverse = _inverse_rms(x_ND, eps)
        unit = x_ND * inverse
        h, w_out = by.factor(unit * gain), by.factor(wo)
        w = by.factor(torch.cat((_paired(torch.cat((wq, wk)), E), wv)))
        projected = by.mm(h, w.t())
        q_k = projected[:, : (H + K) * E].float().view(B, T, H + K, E)
        head_inverse = _inverse_rms(q_k, eps) if q_gain is not None else q_k.new_ones(1)
        gains_HE = torch.full((H + K, E), 1.0)
        if q_gain is not None and k_gain is not None:
            gains_HE[:H], gains_HE[H:] = _paired(q_gain, E), _paired(k_gain, E)
        gains_HE[:H] *= E**-0.5  # the scale of the scores
        turns = torch.complex(table[:, 0], table[:, 1])[:, None]
        turned = _turned(q_k * gains_HE, turns).mul_(head_inverse)
        q, k, v = h.new_empty(B * K, T // n, H // K * n, E), h.new_empty(B * K, T, E), h.new_empty(B * K, T, E)
        q.view(B, K, T // n, H // K, n, E).copy_(_blocked(turned[:, :, :H], K, n))
        k.view(B, K, T, E).copy_(turned[:, :, H:].transpose(1, 2))
        v.view(B, K, T, E).copy_(projected.view(B, T, -1, E)[:, :, H + K :].transpose(1, 2))
        q, k = by.result(q), by.result(k)
        out = h.new_empty(B, T, H, E)
        blocked = _blocked(out, K, n)
        future_nn = h.new_full((n, n), -torch.inf).triu_(1) if bias_BTT is None else None
        weights = []
        for block in range(T // n):
            start, end = block * n, (block + 1) * n
            p = by.bmm(q[:, block], k[:, :end].transpose(1, 2))
            p_BKGnS = p.view(B, K, H // K, n, end)
            if bias_BTT is None:
                p_BKGnS[..., start:] += future_nn
            else:
                p_BKGnS += bias_BTT[:, None, None, start:end, :end]
            p = by.result(torch.softmax(p, -1))
            blocked[:, :, block] = by.bmm(p, v[:, :end]).view(B, K, H // K, n, E)
            weights.append(p)
        y = by.mm(out.view(-1, H * E), w_out.t()).float()
        saved = (unit, inverse, gain, h, w, w_out, q_k, head_inverse, gains_HE, turns, q, k, v, out)
        ctx.save_for_backward(*saved, *weights)
        ctx.shape, ctx.head_gains = (B, T, H, K, E, n), q_gain is not None
        return y.add_(x_ND).view(x_BTD.shape)

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, gain, h, w, w_out, q_k, head_inverse, gains_HE, turns, q, k, v, out, *weights = ctx.saved_tensors
        B, T, H, K, E, n = ctx.shape
        by, dy = ctx.by, dy_BTD.view(unit.shape)
        d = by.factor(dy)
        incoming = _blocked(by.mm(d, w_out).view(B, T, H, E), K, n)
        dw_out = by.mm(d.t(), out.view(-1, H * E)).float()
        dq = torch.empty_like(q)
        dk, dv = unit.new_zeros(k.shape), unit.new_zeros(v.shape)
        for block, p in enumerate(weights):
            end = (block + 1) * n
            d_block = incoming[:, :, block].reshape(B * K, H // K * n, E)
            dv[:, :end] += by.bmm(p.transpose(1, 2), d_block)
            dp = by.bmm(d_block, v[:, :end].transpose(1, 2))
            ds = by.result(torch._softmax_backward_data(dp, p, -1, p.dtype))
            dq[:, block] = by.bmm(ds, k[:, :end])
            dk[:, :end] += by.bmm(ds.transpose(1, 2), q[:, block])
        dturned = unit.new_empty(B, T, H + K, E)
        _blocked(dturned[:, :, :H], K, n).copy_(dq.view(B, K, T // n, H // K, n, E))
        dturned[:, :, H:] = dk.view(B, K, T, E).transpose(1, 2)
        dgained = _turned(dturned, turns.conj()).mul_(head_inverse)
        dgains_HE = None
        if ctx.head_gains:
            products = dgained * q_k
            dgains_HE = products.view(-1, H + K, E).sum(0)
            radial = products.mul_(gains_HE).sum(-1, keepdim=True).mul_(head_inverse.square()).div_(-E)
            dq_k = dgained.mul_(gains_HE).addcmul_(q_k, radial)
        else:
            dq_k = dgained.mul_(gains_HE)
        dprojected = h.new_empty(B, T, H + 2 * K, E)
        dprojected[:, :, : H + K] = dq_k
        dprojected[:, :, H + K :] = dv.view(B, K, T, E).transpose(1, 2)
        d = by.result(dprojected).view(len(unit), -1)
        dw = by.mm(d.t(), h).float()
        dwq, dwk = _unpaired(dw[: (H + K) * E], E).split((H * E, K * E))
        dx, dgain = _norm_backward(by.mm(d, w).float(), unit, inverse, gain)
        head_gains: tuple[Tensor | None, Tensor | None] = (None, None)
        if dgains_HE is not None:
            head_gains = _unpaired(dgains_HE[:H].sum(0), E) * E**-0.5, _unpaired(dgains_HE[H:].sum(0), E)
        dx_BTD = dx.add_(dy).view(dy_BTD.shape)
        return dx_BTD, dgain, dwq, dwk, dw[(H + K) * E :], dw_out, *head_gains, None, None, None


def _paired(rows: Tensor, E: int) -> Tensor:
    """Rows of each head in the order 0, E/2, 1, E/2 + 1 and so on."""
    return rows.unflatten(0, (-1, 2, E // 2)).transpose(1, 2).flatten(0, 2)


def _unpaired(rows: Tensor, E: int) -> Tensor:
    """The inverse of `_paired`."""
    return rows.unflatten(0, (-1, E // 2, 2)).transpose(1, 2).flatten(0, 2)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Neighbours of x as complex numbers, times `turns`."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)


def _blocked(x_BTHE: Tensor, K: int, n: int) -> Tensor:
    """The same memory seen as [B, K, blocks, G, n, E]."""
    _, T, H, _ = x_BTHE.shape
    return x_BTHE.unflatten(2, (K, H // K)).unflatten(1, (T // n, n)).permute(0, 3, 1, 4, 2, 5)

"""Halves of a block for training on a CPU, with gradients written by hand: fewer passes over memory than autograd makes.

What lies between the products is in athanor/model/elementwise.py. Each function
here has a plain version, which is what runs on accelerators, under a compiler
and without gradients; tests hold the two together.

In bf16 both factors of every product are rounded, and so is what comes out of
it (athanor/model/rounded.py); the residual stream, norms, rotations and the
sums of gradients are fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from athanor.model import elementwise
from athanor.model.precision import numerics
from athanor.model.rounded import Numerics

# Queries per block of attention: the scores after a block's last query are never computed. 128 and 256
# were within 2 % of each other at 256 tokens a row; torch's own kernel took three times as long there.
BLOCK_TOKENS = 256
# By precision. At 1,024 tokens a step of 28M parameters took 0.73 of the processor time that it takes with torch's kernel
# in bf16, and as much in fp32, where torch keeps no scores in memory.
MAX_ROW_TOKENS = {"fp32": 512, "bf16": 1024}
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


def feed_forward(x_BTD: Tensor, gain_D: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
    """x + SwiGLU(norm(x)): the second half of a block."""
    return _FeedForward.apply(x_BTD, gain_D, gate, up, down, eps)


class _FeedForward(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
        by = ctx.by = numerics()
        x = x_BTD.reshape(-1, x_BTD.shape[-1]).contiguous()
        h, inverse = elementwise.norm(x, gain, eps, by)
        w, w_down = by.weights(gate, up), by.weights(down)
        both = by.mm(h, w.t())
        y = by.mm(elementwise.swiglu(both, by), w_down.t())
        ctx.save_for_backward(x, inverse, gain, h, w, w_down, both)
        return elementwise.add(x, y, by).view(x_BTD.shape)

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, gain, h, w, w_down, both = ctx.saved_tensors
        by, dy = ctx.by, dy_BTD.reshape(x.shape).contiguous()
        d = by.factor(dy)
        dboth, hidden = elementwise.swiglu_backward(both, by.mm(d, w_down), by)
        ddown = by.mm(d.t(), hidden).float()
        dgate, dup = by.mm(dboth.t(), h).float().chunk(2)
        dx, dgain = elementwise.norm_backward(by.mm(dboth, w), x, inverse, gain, dy, by)
        return dx.view(dy_BTD.shape), dgain, dgate, dup, ddown, None


def cpu_attention_fits(device: str, precision: str, tokens: int) -> bool:
    """Whether training in a format on a type of device has `attention` for its rows: short ones of whole blocks."""
    short = tokens <= MAX_ROW_TOKENS.get(precision, 0)  # fp16 on a CPU is autocast's
    return device == "cpu" and short and tokens % min(tokens, BLOCK_TOKENS) == 0


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
    precision = "bf16" if numerics().rounds else "fp32"
    return not _torch_attention_depth and use_cpu_kernel(x_BTD) and cpu_attention_fits("cpu", precision, x_BTD.shape[1])


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
        shape = ctx.shape = B, T, H, K, E, n
        x = x_BTD.reshape(-1, D).contiguous()
        h, inverse = elementwise.norm(x, gain, eps, by)
        w, w_out = by.weights(wq, wk, wv), by.weights(wo)
        projected = by.mm(h, w.t())
        gains = None if q_gain is None or k_gain is None else torch.stack((q_gain, k_gain))
        q, k, v, head_inverse = elementwise.heads(projected, gains, table, shape, eps, by)
        out, weights = by.empty((B, T, H, E)), []
        out_blocks = elementwise.blocked(out, K, n)
        for block in range(T // n):
            end = (block + 1) * n
            scores = by.bmm(q[:, block], k[:, :end].transpose(1, 2))
            p = elementwise.softmax(scores, bias_BTT, block * n, n, by)
            out_blocks[:, :, block] = by.bmm(p, v[:, :end]).view(B, K, H // K, n, E)
            weights.append(p)
        y = by.mm(out.view(-1, H * E), w_out.t())
        saved = (x, inverse, gain, h, w, w_out, projected, gains, table, head_inverse, q, k, v, out)
        ctx.save_for_backward(*saved, *weights)
        return elementwise.add(x, y, by).view(x_BTD.shape)

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, gain, h, w, w_out, projected, gains, table, head_inverse, q, k, v, out, *weights = ctx.saved_tensors
        B, T, H, K, E, n = ctx.shape
        by, dy = ctx.by, dy_BTD.reshape(x.shape).contiguous()
        d = by.factor(dy)
        incoming = elementwise.blocked(by.mm(d, w_out).view(B, T, H, E), K, n)
        dw_out = by.mm(d.t(), out.view(-1, H * E)).float()
        dq, keys_values = torch.empty_like(q), []
        for block, p in enumerate(weights):
            end = (block + 1) * n
            d_block = incoming[:, :, block].reshape(B * K, H // K * n, E)
            dp = by.bmm(d_block, v[:, :end].transpose(1, 2))
            ds = elementwise.softmax_backward(p, dp, block * n, n, by)
            dq[:, block] = by.bmm(ds, k[:, :end])
            keys_values.append((by.bmm(ds.transpose(1, 2), q[:, block]), by.bmm(p.transpose(1, 2), d_block)))
        dk, dv = (_joined(parts, by) for parts in zip(*keys_values, strict=True))
        dprojected, dgains = elementwise.heads_backward(
            (dq, dk, dv), projected, gains, table, head_inverse, ctx.shape, by
        )
        dw = by.mm(dprojected.t(), h).float()
        dwq, dwk, dwv = dw.split((H * E, K * E, K * E))
        dx, dgain = elementwise.norm_backward(by.mm(dprojected, w), x, inverse, gain, dy, by)
        head_gains = (None, None) if gains is None else (dgains[0], dgains[1])
        return dx.view(dy_BTD.shape), dgain, dwq, dwk, dwv, dw_out, *head_gains, None, None, None


def _joined(parts: Sequence[Tensor], by: Numerics) -> Tensor:
    """The sum of what each block of queries says of the keys up to its end."""
    if len(parts) == 1:
        return parts[0]
    total = parts[-1].float()
    for part in parts[:-1]:
        total[:, : part.shape[1]] += part
    return by.factor(total)

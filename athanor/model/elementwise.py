"""What happens between the matrix products of a training step on a CPU: norms, SwiGLU, rotations, softmaxes.

At widths of 128 to 512 a step in torch's operations spends two thirds of its
time on passes over activations. Where the machine has a C compiler, each
function here is one pass of compiled C (elementwise.c, a second the first
time); elsewhere it is the torch operations beside it. Both mean the same but
for roundings in between; tests hold the two together.

Tensors are contiguous. N rows of a micro-batch, D width, F width inside the
feed-forward, and as in athanor/model/kernels.py. `by` are the numerics of the
products: what goes into one or comes out of one has their format.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from athanor.base import host
from athanor.model.rounded import Numerics, fast_bf16

_SOURCE = Path(__file__).with_suffix(".c")
# Sums may be reordered, once and for all by the compiler; NaN and infinities keep their meaning, which -ffast-math takes.
_FLAGS = "-O3 -shared -fPIC -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
# gcc takes half of AVX-512's width by itself: 12 to 25 % more time for softmax, SwiGLU and rotations, 2 % for a step.
_X86_FLAGS = "-march=native -mprefer-vector-width=512"
_in_torch = False


@functools.cache
def compiled_functions() -> ctypes.CDLL | None:
    """elementwise.c, compiled for this processor; None where that cannot be."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if not compiler or os.name != "posix":
        return None
    native = _X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    flags = [*_FLAGS.split(), *native.split()]
    found = {"PATH": os.defpath, **os.environ}  # by the compiler: its own parts
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = [*compiler.split(), *flags, "--version"]
        version = subprocess.run(asked, env=found, capture_output=True, check=True, timeout=60).stdout
        # What the processor can do: a home directory may be shared by unequal machines.
        features = host.cpuinfo("flags", "Features") or host.processor()
        key = hashlib.sha256(_SOURCE.read_bytes() + version + " ".join(flags).encode() + features.encode())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "athanor"
        made = cache / f"elementwise-{key.hexdigest()[:16]}.so"
        if not made.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                new = Path(folder) / made.name
                arguments = [*compiler.split(), *flags, "-o", str(new), str(_SOURCE), "-lm"]
                subprocess.run(arguments, env=found, capture_output=True, check=True, timeout=120)
                new.replace(made)
        return ctypes.CDLL(str(made))
    return None


@contextlib.contextmanager
def in_torch() -> Iterator[None]:
    """Inside, the functions of this module are torch's operations, in all threads: for tests of both ways."""
    global _in_torch
    before, _in_torch = _in_torch, True
    try:
        yield
    finally:
        _in_torch = before


def _compiled(name: str, by: Numerics, *arguments: int | float | Tensor | None) -> bool:
    """Run a function of elementwise.c; False where there is none."""
    if _in_torch or (functions := compiled_functions()) is None:
        return False
    suffix = "fp32" if not by.rounds else "bf16" if fast_bf16() else "rounded"
    values: list[ctypes.c_int64 | ctypes.c_float | ctypes.c_void_p] = []
    for value in arguments:
        if isinstance(value, int):
            values.append(ctypes.c_int64(value))
        elif isinstance(value, float):
            values.append(ctypes.c_float(value))
        else:
            if value is not None and not value.is_contiguous():
                raise ValueError(f"{name}: a tensor of shape {tuple(value.shape)} is not contiguous")
            values.append(ctypes.c_void_p(None if value is None else value.data_ptr()))
    getattr(functions, f"{name}_{suffix}")(*values)
    return True


def norm(x_ND: Tensor, gain_D: Tensor, eps: float, by: Numerics) -> tuple[Tensor, Tensor]:
    """RMSNorm as a factor [N, D], and the inverse root mean squares [N]."""
    h, inverse = by.empty(x_ND.shape), x_ND.new_empty(len(x_ND))
    if not _compiled("norm", by, *x_ND.shape, x_ND, gain_D, eps, h, inverse):
        inverse = _inverse_rms(x_ND, eps)[:, 0]
        h = by.factor(x_ND * inverse[:, None] * gain_D)
    return h, inverse


def norm_backward(
    dh_ND: Tensor, x_ND: Tensor, inverse_N: Tensor, gain_D: Tensor, dy_ND: Tensor, by: Numerics
) -> tuple[Tensor, Tensor]:
    """Gradients of x and gain where x went into a norm, whose gradient is `dh_ND`, and past it, with `dy_ND`."""
    dx, dgain = torch.empty_like(x_ND), torch.zeros_like(gain_D)
    if not _compiled("norm_backward", by, *x_ND.shape, dh_ND, x_ND, inverse_N, gain_D, dy_ND, dx, dgain):
        inverse, dh = inverse_N[:, None], dh_ND.float()
        unit = x_ND * inverse
        projected = dh * unit
        radial = torch.mv(projected, gain_D)[:, None].div_(-x_ND.shape[1])
        dx, dgain = (dh * gain_D).addcmul_(unit, radial).mul_(inverse).add_(dy_ND), projected.sum(0)
    return dx, dgain


def add(x_ND: Tensor, y_ND: Tensor, by: Numerics) -> Tensor:
    """The residual stream x in fp32 plus what came out of a product."""
    total = torch.empty_like(x_ND)
    return total if _compiled("add", by, x_ND.numel(), x_ND, y_ND, total) else torch.add(x_ND, y_ND.float())


def swiglu(both_NF: Tensor, by: Numerics) -> Tensor:
    """silu(gate) · up as a factor [N, F], of gate and up side by side [N, 2F]."""
    hidden = both_NF.new_empty(len(both_NF), both_NF.shape[1] // 2)
    if not _compiled("swiglu", by, *hidden.shape, both_NF, hidden):
        gate, up = both_NF.float().chunk(2, 1)
        hidden = by.factor(F.silu(gate) * up)
    return hidden


def swiglu_backward(both_NF: Tensor, dhidden_NF: Tensor, by: Numerics) -> tuple[Tensor, Tensor]:
    """The gradient of `both_NF`, and what `swiglu` gave once more."""
    dboth, hidden = torch.empty_like(both_NF), torch.empty_like(dhidden_NF)
    if not _compiled("swiglu_backward", by, *hidden.shape, both_NF, dhidden_NF, dboth, hidden):
        gate, up = both_NF.float().chunk(2, 1)
        silu, d = F.silu(gate), dhidden_NF.float()
        hidden = by.factor(silu * up)
        dboth = by.factor(torch.cat((torch.ops.aten.silu_backward(d * up, gate), d * silu), 1))
    return dboth, hidden


def heads(
    projected: Tensor, gains_2E: Tensor | None, table: Tensor, shape: tuple[int, ...], eps: float, by: Numerics
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [B·K, blocks, G·n, E], keys and values [B·K, T, E] as factors, rotated, normed where there are gains.

    Of all heads side by side, [B·T, (H + 2K)·E]. Queries are scaled by 1/sqrt(E). `shape` is
    B, T, H, K, E, n. The last result is the inverse root mean square of each query and key head.
    """
    B, T, H, K, E, n = shape
    q, k, v = by.empty((B * K, T // n, H // K * n, E)), by.empty((B * K, T, E)), by.empty((B * K, T, E))
    inverse = torch.ones(B, T, H + K)
    sizes = (B, T, H, K, E // 2, n)
    if not _compiled("heads", by, *sizes, projected, gains_2E, table, eps, q, k, v, inverse):
        raw = projected.view(B, T, H + 2 * K, E)
        x = raw[:, :, : H + K].float()
        if gains_2E is not None:
            norms = _inverse_rms(x, eps)
            inverse = norms[..., 0]
            x = x * norms * _of_heads(gains_2E, H, K)
        turned = _turned(x, table, 1.0)
        q.view(B, K, T // n, H // K, n, E).copy_(blocked(by.factor(turned[:, :, :H] * E**-0.5), K, n))
        k.view(B, K, T, E).copy_(by.factor(turned[:, :, H:]).transpose(1, 2))
        v.view(B, K, T, E).copy_(raw[:, :, H + K :].transpose(1, 2))
    return q, k, v, inverse


def heads_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    projected: Tensor,
    gains_2E: Tensor | None,
    table: Tensor,
    inverse: Tensor,
    shape: tuple[int, ...],
    by: Numerics,
) -> tuple[Tensor, Tensor]:
    """Gradients of `projected` and of the gains, for those of queries, keys and values in the layouts of `heads`."""
    B, T, H, K, E, n = shape
    dprojected, dgains = torch.empty_like(projected), inverse.new_zeros(2, E)
    sizes = (B, T, H, K, E // 2, n)
    values = (*gradients, projected, gains_2E, table, inverse, dprojected, dgains)
    if not _compiled("heads_backward", by, *sizes, *values):
        dq, dk, dv = gradients
        d = inverse.new_empty(B, T, H + K, E)
        blocked(d[:, :, :H], K, n).copy_(dq.view(B, K, T // n, H // K, n, E)).mul_(E**-0.5)
        d[:, :, H:] = dk.view(B, K, T, E).transpose(1, 2)
        d = _turned(d, table, -1.0)
        if gains_2E is not None:
            unit = projected.view(B, T, -1, E)[:, :, : H + K] * inverse[..., None]
            sums_HE = (d * unit).flatten(0, 1).sum(0)
            dgains = torch.stack((sums_HE[:H].sum(0), sums_HE[H:].sum(0)))
            d = d * _of_heads(gains_2E, H, K)
            d = (d - unit * (d * unit).mean(-1, keepdim=True)) * inverse[..., None]
        whole = dprojected.view(B, T, -1, E)
        whole[:, :, : H + K], whole[:, :, H + K :] = by.factor(d), dv.view(B, K, T, E).transpose(1, 2)
    return dprojected, dgains


def softmax(scores: Tensor, bias_BTT: Tensor | None, start: int, n: int, by: Numerics) -> Tensor:
    """Attention's weights, in place of the scores [B·K, G·n, S] of n queries from `start` on, the last of which sees all.

    `bias_BTT` is added, if there is one; no query sees what comes after it.
    """
    rows, width, S = scores.shape
    B, T = (rows, S) if bias_BTT is None else bias_BTT.shape[:2]
    if not _compiled("softmax", by, B, rows // B * width // n, n, S, start, T, scores, bias_BTT):
        x = scores.float().view(B, -1, n, S)
        if bias_BTT is not None:
            x = x + bias_BTT[:, None, start : start + n, :S]
        x = x + torch.full((n, S), -torch.inf).triu_(1 + start)
        scores = by.factor(torch.softmax(x, -1)).view(scores.shape)
    return scores


def softmax_backward(p: Tensor, dp: Tensor, start: int, n: int, by: Numerics) -> Tensor:
    """The gradient of scores, in place of that of their weights `p`; shapes as in `softmax`."""
    rows, width, S = p.shape
    if not _compiled("softmax_backward", by, rows, width // n, n, S, start, p, dp):
        dp = by.factor(torch._softmax_backward_data(dp.float(), p.float(), -1, torch.float32))
    return dp


def cross_entropy(
    logits_NV: Tensor, next_N: Tensor, z_loss: float, scale: float, by: Numerics
) -> tuple[Tensor, Tensor]:
    """The gradient of `scale` times the summed losses, in place of the logits, and the losses, fp32 [N]."""
    losses = logits_NV.new_empty(len(logits_NV), dtype=torch.float32)
    if not _compiled("cross_entropy", by, *logits_NV.shape, logits_NV, next_N, z_loss, scale, losses):
        logits = logits_NV.float()
        normaliser = torch.logsumexp(logits, 1, keepdim=True)
        losses = (normaliser - logits.gather(1, next_N[:, None]) + z_loss * normaliser.square())[:, 0]
        p = torch.exp(logits.sub_(normaliser)).mul_(1 + 2 * z_loss * normaliser)
        logits_NV = by.factor(p.scatter_add_(1, next_N[:, None], p.new_full((len(p), 1), -1.0)).mul_(scale))
    return logits_NV, losses


def blocked(x_BTHE: Tensor, K: int, n: int) -> Tensor:
    """The same memory seen as [B, K, blocks, G, n, E]."""
    _, T, H, _ = x_BTHE.shape
    return x_BTHE.unflatten(2, (K, H // K)).unflatten(1, (T // n, n)).permute(0, 3, 1, 4, 2, 5)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _of_heads(gains_2E: Tensor, H: int, K: int) -> Tensor:
    return gains_2E.repeat_interleave(torch.tensor([H, K]), 0)


def _turned(x_BTHE: Tensor, table: Tensor, direction: float) -> Tensor:
    """Element i of a head turned with i + E/2, by the angle of its position or back."""
    cosine, sine = table[:, None, 0], table[:, None, 1] * direction
    first, second = x_BTHE.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)

"""Every function of elementwise.c beside its twin in torch's operations, in all three formats."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from athanor.model import elementwise, rounded
from athanor.model.config import ModelConfig
from athanor.model.rounded import Numerics
from athanor.model.transformer import rotary_table

FORMATS = {"fp32": (Numerics(False), True), "rounded": (Numerics(True), False), "bf16": (Numerics(True), True)}
B, T, H, K, E = 2, 24, 4, 2, 16


@pytest.fixture(params=FORMATS)
def by(request):
    if elementwise.compiled_functions() is None:
        pytest.skip("no C compiler here")
    numerics, fast = FORMATS[request.param]
    with rounded.forced(fast):
        yield numerics


def randn(*shape, by=None, seed=1):
    x = torch.randn(shape, generator=torch.manual_seed(seed))
    return x if by is None else by.factor(x)


def both_ways(function, by):
    """Results of compiled C are those of torch, but for a rounding or two."""
    compiled = function()
    with elementwise.in_torch():
        plain = function()
    for one, other in zip(compiled, plain, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        unit = 2e-6 if not by.rounds else 2**-7
        assert torch.allclose(one.float(), other.float(), rtol=unit, atol=unit * float(other.float().abs().max()))
    return compiled


@pytest.mark.parametrize("width", [1, 7, 192])
def test_norm(by, width):
    x, gain, dy, dh = randn(5, width), randn(width), randn(5, width, seed=2), randn(5, width, by=by)
    x[0] = 0.0
    _, inverse = both_ways(lambda: elementwise.norm(x, gain, 1e-6, by), by)
    both_ways(lambda: elementwise.norm_backward(dh, x, inverse, gain, dy, by), by)
    both_ways(lambda: [elementwise.add(x, dh, by)], by)


def test_swiglu(by):
    """Also far from zero, where e to the power of a gate has no float."""
    both, d = randn(40, 2 * 33, by=by).mul_(3), randn(40, 33, by=by)
    both[:4] = by.factor(torch.tensor([[-3e4], [3e4], [-90.0], [90.0]]))
    both_ways(lambda: [elementwise.swiglu(both, by)], by)
    both_ways(lambda: elementwise.swiglu_backward(both, d, by), by)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("n", [T, 8])
def test_heads(by, normed, n):
    table = rotary_table(ModelConfig(8, 1, 8, H, K, E, 8, T, 1e4, 1e-6, True), T)
    gains, shape = (randn(2, E) if normed else None), (B, T, H, K, E, n)
    projected = randn(B * T, (H + 2 * K) * E, by=by)
    q, k, v, inverse = both_ways(lambda: elementwise.heads(projected, gains, table, shape, 1e-6, by), by)
    arguments = (projected, gains, table, inverse, shape, by)
    both_ways(lambda: elementwise.heads_backward((q, k, v), *arguments), by)


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("start", [0, 8])
def test_softmax(by, documents, start):
    n, S = 8, start + 8
    document = torch.tensor([0] * 5 + [1] * (T - 5)).repeat(B, 1)
    seen = (document[:, :, None] == document[:, None, :]).tril()
    bias = by.factor(torch.zeros(seen.shape).masked_fill_(~seen, -1e30)) if documents else None
    scores = randn(B * K, 2 * n, S, by=by).mul_(4)
    (p,) = both_ways(lambda: [elementwise.softmax(scores.clone(), bias, start, n, by)], by)
    for query in range(n):
        hidden = ~seen[0, start + query, :S] if documents else torch.arange(S) > start + query
        assert not p.view(-1, n, S)[:, query, hidden].any()
    dp = randn(*p.shape, by=by, seed=2)
    both_ways(lambda: [elementwise.softmax_backward(p, dp.clone(), start, n, by)], by)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy(by, z_loss):
    logits, target = randn(9, 515, by=by).mul_(10), torch.randint(0, 515, (9,), generator=torch.manual_seed(3))
    logits[0] = by.factor(torch.tensor(-300.0))
    logits[0, 3] = 300.0
    target[0] = 4
    _, losses = both_ways(lambda: elementwise.cross_entropy(logits.clone(), target, z_loss, 0.25, by), by)
    assert float(losses[0]) == pytest.approx(600 + z_loss * 300**2, rel=1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_is_not_lost(by, bad):
    """The guard skips a step whose loss is not finite: a kernel must not make a number of it."""
    x = randn(3, 20, by=by)
    x[1, 17] = bad
    probabilities, losses = elementwise.cross_entropy(x.clone(), torch.tensor([1, 2, 3]), 0.0, 1.0, by)
    assert not losses[1].isfinite() and losses[[0, 2]].isfinite().all() and not probabilities[1].isfinite().all()
    assert not elementwise.swiglu(x, by)[1].isfinite().all()
    assert elementwise.norm(x.float(), torch.ones(20), 1e-6, by)[0][1].isnan().any()
    weights = elementwise.softmax(x.view(1, 3, 20).clone(), None, 17, 3, by)
    assert weights[0, 1].isnan().any() and weights[0, 0].isfinite().all()


def test_rounds_as_torch_does(by):
    """To the nearest, ties to even, at every size, and NaN stays NaN."""
    bits = torch.arange(-(2**31), 2**31, 65521, dtype=torch.int64).to(torch.int32)
    x = torch.cat((bits.view(torch.float32), torch.tensor([1.00390625, 1.01171875, math.nan, math.inf, -0.0, 1e-40])))
    with rounded.forced(True):
        found = elementwise.add(torch.zeros_like(x), x.bfloat16(), Numerics(True))
        assert torch.equal(found.nan_to_num(7.0), x.bfloat16().float().nan_to_num(7.0))
    with rounded.forced(False):
        ones = torch.stack((torch.full_like(x, 60.0), x), 1)  # silu(60) is 60
        found = elementwise.swiglu(ones.view(-1, 2), Numerics(True))[:, 0]
    wanted = (60.0 * x).bfloat16().float()
    normal = wanted.isnan() | (wanted.abs() > 1e-36) | (wanted == 0)
    assert torch.equal(found[normal].nan_to_num(7.0), wanted[normal].nan_to_num(7.0))


def test_without_a_compiler_it_is_torch(tmp_path):
    program = (
        "import torch; from athanor.model import elementwise; from athanor.model.rounded import Numerics;"
        "assert elementwise.compiled_functions() is None; print(elementwise.swiglu(torch.ones(1, 2), Numerics(False)))"
    )
    environment = {"CC": "false", "XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "0.7311" in done.stdout, done.stderr
    assert not list(tmp_path.rglob("*.so"))

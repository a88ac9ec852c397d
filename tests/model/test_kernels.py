"""Each function by hand against its plain twin: values and gradients."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from athanor.model import cross_entropy, kernels
from athanor.model.config import ModelConfig
from athanor.model.cross_entropy import plain_summed_cross_entropy, summed_cross_entropy
from athanor.model.elementwise import in_torch
from athanor.model.kernels import feed_forward, use_cpu_kernel
from athanor.model.loss import Targets, token_losses, training_loss
from athanor.model.precision import products
from athanor.model.transformer import Transformer

CONFIG = ModelConfig(96, 2, 32, 4, 2, 8, 64, 512, 1e4, 1e-6, True)


@pytest.fixture
def plain(monkeypatch):
    """A call with the twins in place of the functions by hand."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "use_cpu_kernel", lambda x: False)
            patch.setattr("athanor.model.loss.use_cpu_kernel", lambda x: False)
            patch.setattr("athanor.model.transformer.use_cpu_kernel", lambda x: False)
            return function()

    return run


def close(found, wanted, tolerance=2e-5):
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("shape", [(1, 7, 16), (3, 33, 48)])
def test_feed_forward(shape):
    """Also for a row of zeros, whose norm is finite."""
    D, F = shape[-1], 24
    x = torch.randn(shape)
    x[0, 0] = 0.0
    x.requires_grad_()
    gain = torch.rand(D).add(0.5).requires_grad_()
    matrices = [torch.randn(rows, columns).mul(0.1).requires_grad_() for rows, columns in ((F, D), (F, D), (D, F))]
    towards = torch.randn(shape)

    def plain_feed_forward():
        h = gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        gate, up, down = (h @ matrices[0].t(), h @ matrices[1].t(), matrices[2])
        return x + (torch.nn.functional.silu(gate) * up) @ down.t()

    both = []
    for y in (feed_forward(x, gain, *matrices, 1e-6), plain_feed_forward()):
        both.append((y, *gradients((y * towards).sum(), (x, gain, *matrices))))
    assert all(bool(torch.isfinite(one).all()) for one in both[0])
    close(*both)


def test_inputs_and_gradients_that_repeat_one_row_in_memory():
    """A sum has such a gradient; compiled C would read past its end."""
    x, matrix = torch.randn(1, 1, 16).expand(2, 5, 16).requires_grad_(), torch.randn(24, 16)
    both = []
    for way in (contextlib.nullcontext(), in_torch()):
        with way:
            both += [gradients(feed_forward(x, torch.ones(16), matrix, matrix, matrix.t(), 1e-6).sum(), x)]
    close(*both)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("count", [1, 300, 512])
def test_cross_entropy(count, z_loss):
    h, head = torch.randn(count, 32, requires_grad=True), torch.randn(96, 32, requires_grad=True)
    target = torch.randint(0, 96, (count,))
    both = []
    for function in (summed_cross_entropy, plain_summed_cross_entropy):
        loss, losses = function(h, head, target, 2 * count, z_loss)
        assert not losses.requires_grad and float(losses.sum() / (2 * count)) == pytest.approx(float(loss), rel=1e-5)
        both.append((loss, *gradients(3 * loss, (h, head))))
    close(*both)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("rows", [64, 4096])
def test_cross_entropy_as_on_an_accelerator(monkeypatch, rows, dtype, tolerance):
    """In chunks and in one, in each format. In fp16 the gradient of one target of many would be 0 without its scale."""
    count, divisor, scale = 200, 1 << 20, 2.0**16
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda device, vocab_size: rows)
    monkeypatch.setattr(cross_entropy, "fused_softmax", cross_entropy._softmax)  # compiled in test_fused_loss.py
    h, head = torch.randn(count, 32, requires_grad=True), torch.randn(96, 32, requires_grad=True)
    target = torch.randint(0, 96, (count,))
    plain, _ = plain_summed_cross_entropy(h, head, target, divisor, 1e-3)
    loss, losses = cross_entropy._CrossEntropy.apply(h, head, target, divisor, 1e-3, cross_entropy.Half(dtype))
    assert float(losses.sum() / divisor) == pytest.approx(float(loss), rel=1e-5)
    close((divisor * loss / count,), (divisor * plain / count,), tolerance)
    close(gradients(scale * loss, (h, head)), gradients(scale * plain, (h, head)), tolerance)


def test_cross_entropy_of_a_target_far_below_the_others_is_not_infinite():
    """Its probability has no float: the loss has to come by way of the likeliest id."""
    h, head = torch.tensor([[300.0]], requires_grad=True), torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss, _ = summed_cross_entropy(h, head, torch.tensor([1]), 1, 0.0)
    assert float(loss) == 600.0


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("tokens", [512, 128, 48])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_model(compiled, tokens, documents, qk_norm, plain):
    """Rows of 512 are two blocks of queries."""
    config = dataclasses.replace(CONFIG, qk_norm=qk_norm)
    model = Transformer.fresh(config, 1)
    ids = torch.randint(0, config.vocab_size, (3, tokens + 1))
    document = torch.sort(torch.randint(0, 3, (3, tokens)), 1).values if documents else None
    batch = Targets(ids[:, :-1], document, torch.arange(3 * tokens), ids[:, 1:].flatten())

    def both():
        loss = training_loss(model, batch, 100, z_loss=1e-3)
        return loss, *gradients(loss, list(model.parameters()))

    with contextlib.nullcontext() if compiled else in_torch():
        close(both(), plain(both), 1e-4)


def test_a_batch_without_targets_has_no_loss():
    model = Transformer.fresh(CONFIG, 1)
    nothing = torch.zeros(0, dtype=torch.int64)
    loss = training_loss(model, Targets(torch.zeros(1, 16, dtype=torch.int64), None, nothing, nothing), 1)
    loss.backward()
    assert float(loss) == 0.0


def test_summed_is_the_sum_of_token_losses():
    model = Transformer.fresh(CONFIG, 1)
    ids = torch.randint(0, CONFIG.vocab_size, (2, 65))
    batch = Targets(ids[:, :-1], None, torch.arange(0, 128, 3), ids[:, 1:].flatten()[::3])
    close([training_loss(model, batch, 7, z_loss=0.1)], [token_losses(model, batch, z_loss=0.1).sum() / 7])


def test_who_takes_over():
    x = torch.zeros(1)
    assert use_cpu_kernel(x) and not use_cpu_kernel(x.double())
    with torch.no_grad():
        assert not use_cpu_kernel(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not use_cpu_kernel(x)
    rows = torch.zeros(1, 1024, 8)
    assert not kernels.use_cpu_attention(rows)
    with products("bf16", rows.device):
        assert kernels.use_cpu_attention(rows)

"""bf16 on a CPU: fp32 tensors, products of rounded factors."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from athanor.model import rounded
from athanor.model.config import ModelConfig
from athanor.model.gpu_family import identify
from athanor.model.loss import targets, training_loss
from athanor.model.precision import autocast, products, rounds_products, without_effect
from athanor.model.transformer import Transformer

CPU = torch.device("cpu")
UNITS = "AMX" in identify(CPU).name  # with AVX512-BF16 alone oneDNN multiplies in fp32
SHAPE = ModelConfig(512, 2, 64, 4, 2, 16, 176, 128, 1e4, 1e-6, False)


@pytest.fixture(autouse=True)
def exact_outside():
    assert torch.get_float32_matmul_precision() == "highest"
    yield
    assert torch.get_float32_matmul_precision() == "highest"


def test_which_formats_round_inside_products():
    rounds = {(name, kind) for name in ("fp32", "bf16", "fp16") for kind in ("cpu", "cuda", "mps")
              if rounds_products(name, torch.device(kind))}  # fmt: skip
    assert rounds == {("bf16", "cpu")}


@pytest.mark.skipif(not UNITS, reason="this processor has no AMX")
@pytest.mark.parametrize("shape", [(256, 64, 48), (1024, 352, 128), (64, 512, 2048)])
def test_factors_are_rounded_and_sums_are_not(shape):
    M, N, K = shape
    a, b = torch.randn(M, K, generator=torch.manual_seed(1)), torch.randn(K, N)
    wanted = a.bfloat16().double() @ b.bfloat16().double()
    with products("bf16", CPU):
        told = a @ b
    assert told.dtype == torch.float32
    assert (told - wanted).abs().max() < 1e-6 * K  # sums in fp32
    assert (told - a.double() @ b.double()).abs().max() > 1e-4 * K**0.5, "nothing was rounded: the test tests nothing"


@pytest.mark.parametrize("fast", [True, False])
def test_it_is_known_when_nothing_is_gained(fast):
    with rounded.forced(fast):
        assert without_effect("bf16", CPU) != fast


def test_fp32_is_what_it_says():
    assert not without_effect("fp32", CPU)


def gradients(precision: str) -> list[torch.Tensor]:
    model = Transformer.fresh(SHAPE, 1)
    ids = np.random.default_rng(1).integers(0, SHAPE.vocab_size, (4, 129))
    batch = targets(ids, np.repeat(np.arange(2), [65, 64])[None].repeat(4, 0), None, document_mask=True)
    with products(precision, CPU):
        with autocast(precision, CPU):
            loss = training_loss(model, batch, len(batch.next_N))
        loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("fast", [True, False])
def test_loss_and_gradients_stay_near_those_of_fp32(fast):
    with rounded.forced(fast):
        exact, near, again = gradients("fp32"), gradients("bf16"), gradients("bf16")
    assert all(part.dtype == torch.float32 for part in near)
    assert 0 < abs(float(exact[0] - near[0])) < 1e-3 * float(exact[0])
    for one, other in zip(exact[1:], near[1:], strict=True):
        assert 0 < float((one - other).norm()) < 0.03 * float(one.norm())
    assert all(torch.equal(one, other) for one, other in zip(near, again, strict=True))


def test_bf16_means_the_same_with_units_and_without():
    """Emulated and not, gradients are nearer to each other than to fp32: only the order of sums differs."""
    exact = gradients("fp32")
    with rounded.forced(True):
        units = gradients("bf16")
    with rounded.forced(False):
        emulated = gradients("bf16")
    apart = [float((one - other).norm()) for one, other in zip(units, emulated, strict=True)]
    off = [float((one - other).norm()) for one, other in zip(units, exact, strict=True)]
    assert sum(apart) < 0.7 * sum(off)


def test_a_thread_that_leaves_does_not_end_the_mode_of_another():
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with products("bf16", CPU):
            inside.set()
            leave.wait(10)
            seen.append(torch.get_float32_matmul_precision())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with autocast("bf16", CPU), autocast("bf16", CPU):
        pass
    assert torch.get_float32_matmul_precision() == "medium"
    leave.set()
    thread.join(10)
    assert seen == ["medium"]


def test_a_failure_inside_ends_the_mode():
    with pytest.raises(ZeroDivisionError), products("bf16", CPU):
        raise ZeroDivisionError

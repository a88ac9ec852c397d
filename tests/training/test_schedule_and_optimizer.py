"""Schedules as functions of tokens; what decays; clipping; skipping on the device."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from athanor.base.errors import InputError, ParamsError
from athanor.model.precision import LossScale, autocast
from athanor.training.curve import MAX_ROWS, History
from athanor.training.optimizer import Optimizer, clip_gradients
from athanor.training.schedule import Schedule
from tests.training import micro

WSD = Schedule("wsd", 0.02, 0.001, 1000, 4000, 20000)
COSINE = Schedule("cosine", 0.02, 0.001, 1000, 4000, 20000)


ENDS = [
    WSD,
    dataclasses.replace(WSD, cooldown_shape="linear"),
    COSINE,
    dataclasses.replace(WSD, final=0.0),
    dataclasses.replace(WSD, warmup_tokens=0),
]


@pytest.mark.parametrize("schedule", ENDS)
def test_ends_are_exact(schedule):
    assert schedule.lr_at(schedule.total_tokens) == schedule.final
    assert schedule.lr_at(max(1, schedule.warmup_tokens)) == schedule.peak
    assert schedule.lr_at(1) > 0


def test_shapes():
    assert WSD.lr_at(500) == 0.01 and WSD.lr_at(1000) == WSD.lr_at(16000) == 0.02
    assert WSD.lr_at(17000) == pytest.approx(0.001 + 0.019 * 0.5)  # 1 - sqrt(1/4)
    linear = dataclasses.replace(WSD, cooldown_shape="linear")
    assert linear.lr_at(16000) == 0.02 and linear.lr_at(17000) == pytest.approx(0.001 + 0.019 * 0.75)
    assert COSINE.lr_at(10500) == pytest.approx(0.0105)
    for schedule in (WSD, COSINE):
        rates = [schedule.lr_at(tokens) for tokens in range(1000, 20001, 50)]
        assert all(a >= b for a, b in zip(rates, rates[1:], strict=False))


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_decay(tied):
    model = micro.make_model(tied_embeddings=tied)
    groups = Optimizer(model, micro.ADAMW).optimizers[0].groups
    decayed = {name for name, _ in model.named_parameters() if name.endswith("_proj.weight")}
    assert groups.keys() == {(0.1, 1.0), (0.0, 1.0)}
    assert set(groups[0.1, 1.0]) == decayed
    assert set(groups[0.0, 1.0]) == {name for name, _ in model.named_parameters()} - decayed


def test_half_width_master_weights_are_refused():
    with pytest.raises(InputError, match="float32"):
        Optimizer(micro.make_model().bfloat16(), micro.ADAMW)


def give_gradients(model: torch.nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=draw)


def test_weights_and_moments_are_those_of_torch():
    ours, theirs = micro.make_model(), micro.make_model()
    mine = Optimizer(ours, micro.ADAMW)
    names = dict(theirs.named_parameters())
    groups = [
        {"params": [names[name] for name in group], "weight_decay": rate}
        for (rate, _), group in mine.optimizers[0].groups.items()
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=micro.ADAMW.eps, fused=True)
    for step in range(5):
        for model in (ours, theirs):
            give_gradients(model, step)
        rate = 0.01 / (step + 1)
        for group in reference.param_groups:
            group["lr"] = rate
        mine.step_unless(torch.tensor(False), rate)
        reference.step()
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, names[name]), name
    state = {f"{name}.{key}": value for name, weight in names.items() for key, value in reference.state[weight].items()}
    assert mine.tensors().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in mine.tensors().items())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_embedding_and_head_have_rates_of_their_own(name):
    """An output matrix of its own is no matrix of a block, either."""

    class Untied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens, self.lm_head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
            self.norm = torch.nn.LayerNorm(4, bias=False)

    settings = dataclasses.replace(micro.ADAMW, name=name, weight_decay=0.0)
    moves = []
    for factors in ((1.0, 1.0), (0.5, 3.0)):
        torch.manual_seed(0)
        model = Untied()
        before = [weight.detach().clone() for weight in model.parameters()]
        factors = dict(zip(("embedding_lr_factor", "head_lr_factor"), factors, strict=True))
        optimizer = Optimizer(model, dataclasses.replace(settings, **factors))
        give_gradients(model, 1)
        optimizer.step_unless(torch.tensor(False), 0.001)
        after = [weight.detach() for weight in model.parameters()]
        moves.append([float((a - b).norm()) for a, b in zip(after, before, strict=True)])
    assert [b / a for a, b in zip(*moves, strict=True)] == pytest.approx([0.5, 3.0, 1.0], rel=1e-3)


def test_a_parameter_without_a_gradient_is_left_alone():
    model = micro.make_model()
    optimizer = Optimizer(model, micro.ADAMW)
    give_gradients(model, 1)
    model.head_weight.grad = None
    before = model.head_weight.detach().clone()
    optimizer.step_unless(torch.tensor(False), 0.1)
    assert torch.equal(model.head_weight, before)
    assert float(optimizer.tensors()["model.norm.weight.step"]) == 1


def test_training_does_not_load_the_compiler():
    """`torch.optim`'s classes import torch._dynamo, 1.0 to 1.7 s of each training stage."""
    code = """
import sys, torch, tests.training.micro as micro
from athanor.training.optimizer import Optimizer
model = micro.make_model()
optimizer = Optimizer(model, micro.ADAMW)
for weight in model.parameters():
    weight.grad = torch.ones_like(weight)
optimizer.step_unless(torch.tensor(False), 0.1)
sys.exit("torch._dynamo" in sys.modules)
"""
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_clipping_returns_the_norm_before():
    weights = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    for weight, value in zip(weights, (3.0, 4.0), strict=True):
        weight.grad = torch.zeros_like(weight)
        weight.grad.view(-1)[0] = value
    assert float(clip_gradients(weights, 1.0)) == pytest.approx(5.0)
    norm = math.hypot(float(weights[0].grad.norm()), float(weights[1].grad.norm()))
    assert norm == pytest.approx(1.0, abs=1e-5)
    kept = weights[0].grad.clone()
    clip_gradients(weights, 10.0)
    assert torch.equal(weights[0].grad, kept)


@pytest.mark.parametrize("options", micro.OPTIONS)
def test_a_skipped_step_changes_nothing(options):
    model = micro.make_model()
    optimizer = Optimizer(model, dataclasses.replace(micro.ADAMW, **options))
    give_gradients(model, 1)
    optimizer.step_unless(torch.tensor(False), 0.1)
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    before = [weight.detach().clone() for weight in model.parameters()]
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, float("nan"))
    optimizer.step_unless(torch.tensor(True), 0.1)
    assert all(torch.equal(weight, kept) for weight, kept in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.tensors().items())


def test_a_skipped_step_changes_nothing_where_the_fused_kernel_would_take_it():
    """No such device is here: the kernel is not even asked, or it would refuse this verdict."""
    model = micro.make_model()
    give_gradients(model, 1)
    Optimizer(model, micro.ADAMW).step_unless(SimpleNamespace(device=torch.device("mps")), 0.1)


def test_loss_scale_halves_and_grows():
    scale = LossScale("fp16", torch.device("cpu"))
    first = float(scale.scale)
    scale.update(torch.tensor(True))
    assert float(scale.scale) == first / 2 and float(scale.scaled(torch.tensor(2.0))) == first
    for _ in range(2000):
        scale.update(torch.tensor(False))
    assert float(scale.scale) == first and int(scale.good_steps) == 0
    other = LossScale("fp16", torch.device("cpu"))
    other.load(scale.tensors())
    assert torch.equal(other.scale, scale.scale)
    flat = LossScale("fp32", torch.device("cpu"))
    flat.update(torch.tensor(True))
    assert float(flat.scale) == 1
    with pytest.raises(ParamsError, match="bf16"):
        autocast("fp8", torch.device("cpu"))


@pytest.mark.parametrize("steps", [1, 7, MAX_ROWS, MAX_ROWS + 1, 3 * MAX_ROWS + 5])
def test_curve_is_bounded_and_survives_a_resume(steps):
    whole, resumed = History(), History()
    for step in range(1, steps + 1):
        for history in (whole, resumed):
            history.add(math.nan if step == 3 else 1 / step, 2.0, float(step == 3))
        if step % 500 == 0:
            resumed = History.load(resumed.tensors())
    rows = whole.curve(10, lambda tokens: 1 / tokens)
    assert rows == resumed.curve(10, lambda tokens: 1 / tokens)
    assert len(rows) <= MAX_ROWS and rows[-1]["tokens"] == steps * 10 and rows[-1]["lr"] == 1 / (steps * 10)
    assert [row["tokens"] for row in rows] == sorted({row["tokens"] for row in rows})
    if steps == 7:
        assert rows[2]["loss"] is None and rows[1]["loss"] == 0.5
    if steps == 3 * MAX_ROWS + 5:
        assert rows[0]["loss"] == pytest.approx((1 + 1 / 2 + 1 / 4) / 3)

"""Muon: directions, their pieces, state and options."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from athanor.base.errors import Interrupted
from athanor.model import rounded
from athanor.training import muon as muon_module
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.muon import Muon, orthogonal
from athanor.training.optimizer import Optimizer, decays
from tests.training import micro


def matrices(model):
    return {name: weight for name, weight in model.named_parameters() if decays(name, weight)}


def test_muon_is_torchs(monkeypatch):
    """With torch's quintic; rounding to bf16 in another place is all that differs."""
    monkeypatch.setattr(muon_module, "_QUINTICS", 5 * ((3.4445, -4.7750, 2.0315),))
    monkeypatch.setattr(muon_module, "_NORM_MARGIN", 1.0)
    ours, theirs = matrices(micro.make_model()), matrices(micro.make_model())
    mine = Muon(ours, 0.95, 0.1)
    reference = torch.optim.Muon(
        theirs.values(), lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    start = {name: weight.detach().clone() for name, weight in ours.items()}
    for _ in range(4):
        for name in ours:
            ours[name].grad = torch.randn_like(ours[name])
            theirs[name].grad = ours[name].grad.clone()
        mine.step_unless(torch.tensor(False), 0.02)
        reference.step()
    for name, weight in ours.items():
        moved = (theirs[name] - start[name]).norm()
        assert (weight - theirs[name]).norm() < 0.05 * moved and moved > 0, name


@pytest.mark.parametrize("fast", [False, True])
def test_muon_brings_singular_values_to_about_one(fast):
    draw = torch.Generator().manual_seed(1)
    with rounded.forced(fast):
        for shape in ((3, 8, 40), (2, 40, 8), (4, 64, 192)):
            values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=draw)))
            assert 0.84 < float(values.min()) and float(values.max()) < 1.16
        # The smallest that are brought there: a thousandth of the norm.
        left, right = torch.linalg.qr(torch.randn(2, 64, 64, generator=draw))[0]
        wide = left * torch.logspace(-2.6, 0, 64) @ right
        values = torch.linalg.svdvals(orthogonal(wide[None]))
        assert 0.8 < float(values.min()) and float(values.max()) < 1.16
    assert bool(torch.isfinite(orthogonal(torch.zeros(1, 4, 4))).all())


def test_muon_in_pieces_is_muon_for_any_number_of_threads(monkeypatch):
    """Four steps: bits are those of one thread, and up to rounding to bf16 those of whole groups at once."""
    monkeypatch.setattr(muon_module, "PIECE_ELEMENTS", 1024)  # several pieces of a shape, the last one smaller
    ends = []
    for threads in (0, 1, 2, 4):
        weights = matrices(micro.make_model())
        draw = torch.Generator().manual_seed(1)
        with CpuReplicas(micro.make_model(), max(1, threads)) as replicas:
            muon = Muon(weights, 0.95, 0.1, replicas.parallel_map if threads else None)
            for _ in range(4):
                for weight in weights.values():
                    weight.grad = torch.randn(weight.shape, generator=draw)
                muon.step_unless(torch.tensor(False), 0.02)
        ends.append([weight.detach() for weight in weights.values()])
    together, one, two, four = ends
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, two, four, strict=True))
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(together, one, strict=True))


@pytest.mark.parametrize("shape", [(3, 24, 40), (2, 40, 24), (2, 16, 16)])
def test_emulated_and_true_bf16_agree_up_to_the_order_of_sums(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with rounded.forced(True):
        true = orthogonal(x)
    with rounded.forced(False):
        emulated = orthogonal(x)
    assert torch.equal(emulated, emulated.bfloat16().float())
    assert float((true - emulated).abs().max()) <= 2**-7  # one bf16 rounding of the largest elements, which are above 1
    assert float((true == emulated).float().mean()) > 0.5


def test_fp16_serves_better_than_bf16(monkeypatch):
    """For gradients of one size and of sizes far apart; and no number comes near 65504."""
    x = torch.randn(2, 64, 192, generator=torch.Generator().manual_seed(1))
    x[1, 0] *= 1e4
    exact, largest, real = orthogonal(x, torch.float32), [], muon_module.rounded
    monkeypatch.setattr(muon_module, "rounded", lambda y, dtype: largest.append(y.abs().max()) or real(y, dtype))
    fp16, bf16 = ((orthogonal(x, dtype) - exact).norm() / exact.norm() for dtype in (torch.float16, torch.bfloat16))
    assert fp16 < 0.5 * bf16 < 0.01 and max(largest) < 8


def test_muon_leaves_matrices_without_a_gradient_alone():
    weights = matrices(micro.make_model())
    lonely = "model.layers.1.mlp.up_proj.weight"
    for name, weight in weights.items():
        weight.grad = None if name == lonely else torch.ones_like(weight)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    muon = Muon(weights, 0.95, 0.1)
    muon.step_unless(torch.tensor(False), 0.02)
    assert [name for name in weights if torch.equal(weights[name], before[name])] == [lonely]
    assert [name for name, state in muon.tensors().items() if not state.any()] == [f"{lonely}.momentum"]


@pytest.mark.parametrize("tied", [True, False])
def test_with_muon_every_weight_has_one_optimiser(tied):
    model = micro.make_model(tied_embeddings=tied)
    optimizer = Optimizer(model, dataclasses.replace(micro.ADAMW, name="muon"))
    keys = {name.rpartition(".")[::2] for name in optimizer.tensors()}
    for name, weight in model.named_parameters():
        mine = {key for parameter, key in keys if parameter == name}
        assert mine == ({"momentum"} if decays(name, weight) else {"step", "exp_avg", "exp_avg_sq"})


@pytest.mark.parametrize("options", micro.OPTIONS[1:])
def test_muon_learns_and_resumes(tmp_path, monkeypatch, options):
    monkeypatch.setattr(micro, "ADAMW", dataclasses.replace(micro.ADAMW, **options))
    whole = micro.run(tmp_path / "a")
    assert whole[1].curve[-1]["loss"] < whole[1].curve[0]["loss"] - 1
    calls = []
    stop = {"should_stop": lambda: calls.append(1) or len(calls) == 10}
    with pytest.raises(Interrupted):
        micro.run(tmp_path / "b", hooks=stop)
    assert micro.outcome(*micro.run(tmp_path / "b")) == micro.outcome(*whole)

"""Every gate before the first step, with its defect planted."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import athanor.training.preflight as preflight_module
from athanor.base.errors import GateError, InputError, ParamsError
from athanor.model import transformer
from athanor.model.config import ModelConfig
from athanor.model.device import micro_batch, prepare
from athanor.model.kernels import attention_by_torch
from athanor.model.loss import Targets
from athanor.model.transformer import Transformer
from athanor.runtime.machine import machine
from athanor.training.compiling import tune_blocks
from athanor.training.cpu_replicas import MAX_REPLICAS, replica_count
from athanor.training.preflight import preflight
from athanor.training.setup import Choices, DeviceSpec, ExecutionPlan, setup_device
from athanor.training.step import probe_batch
from athanor.training.world import SINGLE
from tests.training import micro

CPU = torch.device("cpu")
PLASMA = ModelConfig(32000, 18, 1024, 16, 4, 64, 2816, 1024, 1e4, 1e-6, False)


@pytest.fixture
def batch():
    return probe_batch(micro.CountingSampler().batch(0, 128), True)


@pytest.mark.parametrize("tied", [True, False])
def test_a_sound_model_passes_unchanged(batch, tied):
    model = micro.make_model(tied_embeddings=tied)
    before = [weight.detach().clone() for weight in model.parameters()]
    state = torch.get_rng_state()
    facts = preflight(model, batch)
    assert facts["overfit_loss"] < facts["initial_loss"] / 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))


def fails(gate, model, batch):
    with pytest.raises(GateError) as error:
        preflight(model, batch)
    assert error.value.gate == gate


@pytest.mark.parametrize(("tied", "factor"), [(True, 20), (False, 400)])
def test_wrong_initialisation(batch, tied, factor):
    model = micro.make_model(tied_embeddings=tied)
    with torch.no_grad():
        model.head_weight.mul_(factor)
    fails("initial loss", model, batch)
    assert preflight(model, batch, fresh=False)["initial_loss"] > 5


def test_text_full_of_repeats_is_no_sign_of_a_wrong_initialisation():
    """Indentation and tables repeat ids, and tied embeddings lean towards the id just read."""
    model = Transformer(ModelConfig(4096, 5, 192, 6, 2, 32, 512, 16, 1e4, 1e-6, False))
    model.initialise(torch.Generator().manual_seed(1))
    ids_BT = torch.arange(8).repeat_interleave(4).view(2, 16) + 30
    next_N = torch.cat((ids_BT[:, 1:], torch.tensor([[40], [41]])), 1).flatten()
    repeats = Targets(ids_BT, None, torch.arange(32), next_N)
    assert preflight(model, repeats, fresh=False)["initial_loss"] < 8.318 - 0.1
    preflight(model, repeats)


def test_a_parameter_out_of_the_graph(batch):
    model = micro.make_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()  # nothing before it can matter
    fails("gradients", model, batch)


def test_a_gradient_that_is_not_finite(batch):
    model = micro.make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("inf")
    fails("gradients", model, batch)


def test_a_look_into_the_future(batch, monkeypatch):
    """With torch's attention: that by hand sees no future, whatever the mask says."""
    monkeypatch.setattr(transformer, "block_mask", lambda document_BT: torch.ones(1, 1, 16, 16, dtype=torch.bool))
    with attention_by_torch():
        fails("causality", micro.make_model(), batch)


def test_a_look_across_documents(batch, monkeypatch):
    causal = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    monkeypatch.setattr(transformer, "block_mask", lambda document_BT: causal)
    fails("document mask", micro.make_model(), batch)


def test_attention_that_sees_too_little(batch, monkeypatch):
    real = transformer.block_mask
    near = torch.ones(16, 16, dtype=torch.bool).triu(-1)
    monkeypatch.setattr(transformer, "block_mask", lambda document_BT: real(document_BT) & near)
    model = Transformer.fresh(dataclasses.replace(micro.CONFIG, layers=1), 0)
    fails("attention", model, batch)


def test_targets_that_cannot_be_learnt(batch):
    ids = torch.zeros(32, 16, dtype=torch.int64)  # every row alike, every last target another
    noise = Targets(ids, None, torch.arange(32) * 16 + 15, torch.arange(32) * 2)
    fails("overfit", micro.make_model(), noise)


@pytest.mark.parametrize("shift", [0, 2])
def test_targets_that_are_not_the_next_ids(batch, shift):
    ids = torch.arange(40)[None] % 23
    fails("targets", micro.make_model(), Targets(ids[:, :16], None, torch.arange(16), ids[0, shift : 16 + shift]))
    preflight(micro.make_model(), Targets(ids[:, :16], None, torch.arange(16), ids[0, 1:17]))


@pytest.mark.parametrize(("tied", "most"), [(True, 2.5), (False, 1.02)])
def test_a_residual_stream_that_is_not_damped(batch, tied, most):
    config = ModelConfig(512, 5, 192, 6, 2, 32, 512, 16, 1e4, 1e-6, False, tied)
    model = Transformer.fresh(config, 0)
    assert 1.0 < preflight(model, batch)["residual_growth"] < most
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight *= 10**0.5
            block.mlp.down_proj.weight *= 10**0.5
    fails("initialisation", model, batch)


def test_a_mean_of_means_is_no_accumulation(batch, monkeypatch):
    """The classic: each micro-batch divided by its own number of targets."""
    real = preflight_module.token_losses

    def means(model, part):
        losses = real(model, part)
        return losses / len(losses) * 10

    monkeypatch.setattr(preflight_module, "token_losses", means)
    fails("accumulation", micro.make_model(), batch)


def test_a_model_that_never_looks_at_its_inputs(monkeypatch):
    """It can learn which targets are frequent, half of the loss and more."""
    model, ids = micro.make_model(), torch.arange(32).view(2, 16) % 3
    following = torch.cat((ids[:, 1:], (ids[:, -1:] + 1) % 3), 1).flatten()
    sound = preflight(model, Targets(ids, None, torch.arange(32), following))
    assert sound["shuffled_loss"] > 1.1 * sound["overfit_loss"]
    monkeypatch.setattr(preflight_module, "check_reach", lambda *_: None)  # the gate that would see it first
    blind = lambda self, ids_BT, **how: real(self, torch.zeros_like(ids_BT), **how) + 0 * real(self, ids_BT, **how)  # noqa: E731
    real = Transformer.hidden
    monkeypatch.setattr(Transformer, "hidden", blind)
    fails("inputs matter", model, Targets(ids, None, torch.arange(32), following))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_code_that_computes_something_else(batch, precision):
    """It serves micro-batches of four rows, here and nowhere else in preflight."""
    model, error = micro.make_model(), 0.0

    def compiled(block, x_BTD, *others):
        assert len(x_BTD) == 4
        return transformer.Block.forward(block, x_BTD, *others) + error * x_BTD.roll(1, 1)

    tune_blocks([model], compiled=compiled, rows_tokens=frozenset({(4, 16)}))
    preflight(model, batch, precision=precision)
    error = 0.3
    with pytest.raises(GateError, match="training path"):
        preflight(model, batch, precision=precision)


def test_an_attention_kernel_that_is_wrong_in_the_format_of_the_run(batch, monkeypatch):
    def wrong(q, *others, **options):
        return real(q * 2 if torch.get_float32_matmul_precision() == "medium" else q, *others, **options)

    real, model = F.scaled_dot_product_attention, micro.make_model()
    with attention_by_torch():
        preflight(model, batch, precision="bf16")
        monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
        preflight(model, batch)
        with pytest.raises(GateError, match="training path"):
            preflight(model, batch, precision="bf16")


def test_the_determinism_switch_is_on_in_what_every_training_stage_calls(tmp_path, monkeypatch):
    expected = micro.outcome(*micro.run(tmp_path / "off"))
    monkeypatch.setenv("ATHANOR_DETERMINISTIC", "on")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    settings = dataclasses.asdict(micro.SETTINGS)
    of_stage = {name: settings[name] for name in ("document_mask", "validation_every_tokens", "sample_every_tokens")}
    params = SimpleNamespace(**settings, seed=1, optimizer="adamw")
    try:
        ExecutionPlan.of("sft", params, machine(), SINGLE, Choices("fp32"), micro.CONFIG, total_tokens=128, **of_stage)
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert micro.outcome(*micro.run(tmp_path / "on")) == expected
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def test_placement():
    how, where = Choices("fp32"), DeviceSpec("cpu", 2, "sft", 1)
    with pytest.raises(ParamsError, match=r"sft.batch_tokens.*multiple of 1024"):
        setup_device(PLASMA, how, where, 1000, "adamw")
    small = dataclasses.replace(PLASMA, layers=2, dim=64, heads=1, kv_heads=1, vocab_size=512)
    assert (replica_count(small, CPU), replica_count(PLASMA, CPU)) == (MAX_REPLICAS, 1)
    assert replica_count(small, torch.device("cuda")) == 1
    assert [micro_batch(CPU, asked, 256, 8192) for asked in (0, 100, 2048, 1 << 20)] == [4, 1, 8, 32]
    assert [micro_batch(CPU, 0, 256, batch) for batch in (256, 1024, 2048, 1 << 20)] == [1, 1, 2, 4]
    for batch_tokens, replicas in ((1024, 1), (5000 * 1024, MAX_REPLICAS)):
        load = setup_device(small, how, where, batch_tokens, "muon")[1]
        assert load.optimizer == "muon" and not load.keeps_best
        assert setup_device(small, how, where, batch_tokens, "muon", True)[1].keeps_best
        state = torch.get_rng_state()
        torch.manual_seed(99)  # as at the start of a process, where torch seeds at random
        setup_device(small, how, where, batch_tokens, "muon")
        assert torch.equal(torch.get_rng_state(), state)
        assert (load.replicas, load.parallel, load.micro_batch_tokens) == (replicas, min(replicas, 2), 1024)
    assert prepare("auto", 1).type in ("cpu", "cuda")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="cuda"):
            prepare("cuda", 1)

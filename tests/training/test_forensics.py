"""A number that is not finite is traced to where it came to be. About 4 s."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from athanor.base.errors import GateError
from athanor.training import forensics
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.step import Stepper
from tests.training import micro, spiked


@pytest.fixture
def stepper():
    """After a step, so that the moments hold something."""
    with CpuReplicas(micro.make_model(), 1) as replicas:
        made = Stepper(replicas, micro.ADAMW, micro.SETTINGS)
        made.step(micro.CountingSampler().batch(0, 128), 0.01)
        yield made


@pytest.fixture
def rows():
    return micro.CountingSampler().batch(128, 128)


def spoil(stepper, name, value=math.nan):
    with torch.no_grad():
        dict(stepper.model.named_parameters())[name].view(-1)[5] = value


class Overflow(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def test_sound_numbers_are_not_reproduced_and_nothing_changes(stepper, rows):
    before = {name: tensor.clone() for name, tensor in {**stepper.optimizer.tensors()}.items()}
    weights = [weight.detach().clone() for weight in stepper.model.parameters()]
    state = torch.get_rng_state()
    assert forensics.nonfinite_state(stepper) is None
    assert forensics.examine(stepper, rows).kind == "not reproduced"
    assert all(torch.equal(tensor, before[name]) for name, tensor in stepper.optimizer.tensors().items())
    assert all(torch.equal(a, b) for a, b in zip(stepper.model.parameters(), weights, strict=True))
    assert all(weight.grad is None for weight in stepper.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in stepper.model.modules())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight(stepper, rows, value):
    name = "model.layers.1.self_attn.k_proj.weight"
    spoil(stepper, name, value)
    assert forensics.examine(stepper, rows) == ("weight", name) == forensics.nonfinite_state(stepper)


def test_a_moment_goes_before_the_weight_that_it_spoilt(stepper, rows):
    name = "model.layers.0.mlp.up_proj.weight"
    stepper.optimizer.tensors()[f"{name}.exp_avg_sq"].view(-1)[0] = math.nan
    assert forensics.examine(stepper, rows) == ("optimiser state", f"{name}.exp_avg_sq")
    stepper.step(rows, 0.01)
    assert not bool(torch.isfinite(dict(stepper.model.named_parameters())[name]).all())
    assert forensics.nonfinite_state(stepper) == ("optimiser state", f"{name}.exp_avg_sq")


def test_ids_that_the_model_does_not_have(stepper, rows):
    rows.tokens_BS[3, 4] = 64
    assert forensics.examine(stepper, rows) == ("input", "ids outside 0 to 63")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn", "model.embed_tokens"])
def test_the_first_module_of_the_forward_pass(stepper, rows, name):
    module = dict(stepper.model.named_modules())[name]
    hook = module.register_forward_hook(lambda _, inputs, out: out.index_fill(-1, torch.tensor([2]), math.nan))
    assert forensics.examine(stepper, rows) == ("forward", name)
    hook.remove()


def test_what_comes_to_be_between_modules_is_told_by_the_one_around(stepper, rows, monkeypatch):
    real = torch.nn.functional.scaled_dot_product_attention
    spoilt = lambda *given, **options: real(*given, **options) * math.nan  # noqa: E731
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", spoilt)
    found = forensics.examine(stepper, rows)
    assert found == ("forward", "model.layers.0.self_attn, on the way to model.layers.0.self_attn.o_proj")


def test_the_loss_itself(stepper, rows, monkeypatch):
    real = forensics.training_loss
    monkeypatch.setattr(forensics, "training_loss", lambda *a, **k: real(*a, **k) * math.nan)
    assert forensics.examine(stepper, rows) == ("forward", "logits or loss, after the last module")


def test_the_first_gradient_of_the_backward_pass(stepper, rows):
    module = dict(stepper.model.named_modules())["model.layers.1.mlp.down_proj"]
    hook = module.register_forward_hook(lambda _, inputs, out: Overflow.apply(out))
    found = forensics.examine(stepper, rows)
    hook.remove()
    assert found.kind == "backward" and "model.layers.1.mlp.down_proj" in found.where
    weight = dict(stepper.model.named_parameters())["model.layers.0.mlp.gate_proj.weight"]
    hook = weight.register_hook(lambda gradient: gradient * math.nan)
    found = forensics.examine(stepper, rows)
    hook.remove()
    assert found == ("backward", "gradient of model.layers.0.mlp.gate_proj.weight")


def test_documents_are_ordered_by_loss(stepper, rows):
    rows.tokens_BS[5] = np.random.Generator(np.random.PCG64(0)).integers(0, 64, 17)
    for _ in range(40):
        stepper.step(micro.CountingSampler().batch(0, 128), 0.01)
    found = forensics.suspects(stepper, rows, 100)
    places = {(row, int(d)) for row in range(8) for d in np.unique(rows.document_BS[row])}
    assert {one[1:] for one in found} <= places and len(found) > 12
    assert [one.loss for one in found] == sorted((one.loss for one in found), reverse=True)
    assert {one.row for one in found[:2]} == {5}
    with torch.no_grad():
        stepper.model.head_weight[int(rows.tokens_BS[6, 3])] = math.nan
    assert not math.isfinite(forensics.suspects(stepper, rows, 100)[0].loss)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_batch_that_is_not_finite_is_examined_in_the_run(tmp_path, monkeypatch, precision):
    """A module gives NaN when it meets one id, which lies in one document of three batches of the data."""
    marked, known = (9, 14, 19), 63
    real = spiked.micro.make_model

    class Marked(spiked.Garbage):
        def batch(self, position, tokens, skipped=0):
            rows = super().batch(position, tokens, skipped)
            ids = np.minimum(rows.tokens_BS, known - 1)
            if (position + skipped) // tokens in marked:
                ids[3, 8] = known
            return rows._replace(tokens_BS=ids)

    def model():
        made = real()
        embed, norm = made.model.embed_tokens, made.model.layers[1].post_attention_layernorm
        met = []
        embed.register_forward_hook(lambda module, inputs, out: met.append((inputs[0] == known).any(1)[:, None, None]))
        norm.register_forward_hook(lambda module, inputs, out: out.masked_fill(met[-1], math.nan))
        return made

    monkeypatch.setattr(spiked.micro, "make_model", model)
    monkeypatch.setattr("athanor.training.cpu_replicas.MAX_REPLICAS", 1)  # the hook's memory is of one replica
    events, notes = [], []
    hooks = {"on_event": lambda name, facts: events.append((name, facts)), "on_note": notes.append}
    _, result = spiked.run(tmp_path, Marked(()), hooks, precision=precision, rules=spiked.Rules())
    assert result.skipped_steps >= 3 and not result.skipped_ranges
    if precision == "fp16":
        return  # steps that overflow now and then find the loss scale
    assert [facts["step"] for _, facts in events] == [10, 15, 20]
    for name, facts in events:
        assert name == "forensics" and facts["kind"] == "forward"
        assert facts["where"] == "model.layers.1.post_attention_layernorm"
        document = facts["documents"][0]
        assert document["loss"] is None and document["document"].endswith(f"at {(facts['step'] - 1) * 128 + 3 * 16}")
    assert "post_attention_layernorm" in notes[0] and "document" in notes[0]
    assert math.isfinite(result.curve[-1]["loss"])


def test_only_the_first_few_events_are_examined(tmp_path, monkeypatch):
    from athanor.training import step

    real, calls, events = step.clip_gradients, [], []

    def clip(weights, limit, *joint):
        weights = list(weights)
        calls.append(1)
        if len(calls) > 5:
            weights[3].grad[0] = math.nan
        return real(weights, limit)

    monkeypatch.setattr(step, "clip_gradients", clip)
    monkeypatch.setattr("athanor.training.loop.MAX_SKIPPED_IN_A_ROW", 8)
    hooks = {"on_event": lambda name, facts: events.append(facts)}
    with pytest.raises(GateError, match="8 steps in a row"):
        spiked.run(tmp_path, hooks=hooks, max_rollbacks=0)
    assert [facts["step"] for facts in events] == [6, 7, 8]
    assert {facts["kind"] for facts in events} == {"not reproduced"}

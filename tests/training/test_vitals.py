"""Vital signs against values worked out by hand; that reading them changes nothing. About 4 s."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from athanor.base.errors import Interrupted
from athanor.model.transformer import Transformer, rotary_table, rotate
from athanor.training.meter import Meter
from athanor.training.vitals import SHARE, Vitals, twin_of
from tests.training import micro

IDS = np.arange(34).reshape(2, 17) % 23


def vitals_of(model):
    """Readings every ten steps."""
    return Vitals(model, Meter(torch.device("cpu")), "fp32", 160)


@pytest.mark.parametrize("tied", [True, False])
def test_values_by_hand(tied):
    config = dataclasses.replace(micro.CONFIG, layers=1, tied_embeddings=tied)
    model = Transformer.fresh(config, 0)
    with torch.no_grad():
        model.head_weight[3] *= 10  # one of 23 ids seen
        model.head_weight[60] *= 100  # not seen
        model.model.norm.weight[5] = -7.0
        model.model.layers[0].self_attn.q_proj.weight *= 1000
    told = vitals_of(model).read(10, IDS)
    norms = model.head_weight.detach()[:23].norm(dim=-1).sort().values
    assert told["vitals.embedding_spread"] == pytest.approx(float(norms[21] / norms[11]))
    assert told["vitals.final_norm_gain"] == 7.0
    with torch.no_grad():
        x = F.embedding(torch.from_numpy(IDS[:1, :16]), model.model.embed_tokens.weight)
        block = model.model.layers[0]
        h = block.input_layernorm(x)
        table = rotary_table(config, 16)
        q = rotate(block.self_attn.q_proj(h).unflatten(-1, (4, 4)), table)[0]
        k = rotate(block.self_attn.k_proj(h).unflatten(-1, (2, 4)), table)[0]
        highest = max(
            float(q[t, head] @ k[s, head // 2]) / 2 for head in range(4) for t in range(16) for s in range(t + 1)
        )
        after = block(x, table, None, None)
    assert told["vitals.attention_logit_max"] == pytest.approx(highest, rel=1e-4)
    growth = float(after.square().mean().sqrt() / x.square().mean().sqrt())
    assert told["vitals.residual_growth"] == pytest.approx(growth, rel=1e-4)
    assert "vitals.update_ratio_max" not in told  # nothing to compare with


def test_the_largest_relative_change_of_one_step():
    model = micro.make_model()
    vitals = vitals_of(model)
    vitals.before(10)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 1.25
    assert vitals.read(10, IDS)["vitals.update_ratio_max"] == pytest.approx(0.2, rel=1e-4)
    vitals.before(20)
    assert vitals.read(20, IDS)["vitals.update_ratio_max"] == 0.0
    assert "vitals.update_ratio_max" not in vitals.read(30, IDS)  # what it was before is not known
    vitals.before(15)
    assert vitals.read(15, IDS) == {}


def test_reading_changes_nothing():
    model = micro.make_model()
    before, state = [weight.detach().clone() for weight in model.parameters()], torch.get_rng_state()
    assert len(vitals_of(model).read(10, IDS)) == 4
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    twin = twin_of(model)
    ours, theirs = dict(model.state_dict(keep_vars=True)), dict(twin.state_dict(keep_vars=True))
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in ours)


@pytest.mark.parametrize(("batch_tokens", "every"), [(16, 100), (128, 20), (2048, 10), (500_000, 10)])
def test_readings_look_at_no_more_than_a_hundredth_of_the_tokens(batch_tokens, every):
    vitals = Vitals(micro.make_model(), Meter(torch.device("cpu")), "fp32", batch_tokens)
    assert [step for step in range(1, 1001) if vitals.due(step)] == list(range(every, 1001, every))
    assert vitals.length <= SHARE * batch_tokens * every


def test_a_killed_run_has_the_readings_of_one_that_was_not(tmp_path):
    """Each process once read at steps of its own choice, and its first change was over another number of steps."""

    def readings(folder, stops):
        rows = {}
        for stop in (*stops, 0):
            steps = []

            def on_step(row, stop=stop, steps=steps):
                steps.append(row["step"])
                told = {name: value for name, value in row.items() if name.startswith("vitals.")}
                if told:
                    rows.setdefault(row["step"], []).append(told)

            hooks = {
                "on_step": on_step,
                "should_stop": lambda stop=stop, steps=steps: bool(steps) and steps[-1] == stop,
            }
            with contextlib.suppress(Interrupted):
                micro.run(folder, hooks=hooks, log_every_steps=1)
        return rows

    whole = readings(tmp_path / "whole", ())
    assert whole and all("vitals.update_ratio_max" in row for (row,) in whole.values())
    for stops in ((7,), (19,), (20, 21)):
        assert readings(tmp_path / str(stops), stops) == whole

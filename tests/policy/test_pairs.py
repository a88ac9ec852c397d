"""DPO on packed pairs: what the sampler gives, that a pair stays whole, and that training prefers what was chosen."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from athanor.base.artifacts import new_dir, write_manifest
from athanor.base.errors import Interrupted
from athanor.data.rows import KIND, VERSION, pack, write_split
from athanor.export.parity import rebuilt
from athanor.model.loss import supervised
from athanor.policy.objectives import Dpo
from athanor.policy.pairs import PairSampler, validate
from athanor.text.conversations import Message
from athanor.tokenizer.chat import render
from athanor.training.loop import Hooks, train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.schedule import Schedule
from athanor.training.settings import LoopSettings
from tests.export.conftest import CONTEXT, question, reply
from tests.policy.batches import loss_and_gradient, reference_log_probs

BATCH = 4 * CONTEXT


@pytest.fixture(scope="module")
def model(qwen):  # noqa: F811
    return copy.deepcopy(rebuilt(qwen.source, "float32"))


@pytest.fixture(scope="module")
def folder(qwen, tmp_path_factory):  # noqa: F811
    """Pairs that prefer what the model would not say: the word "no" and not its right answer."""
    tokenizer, path = qwen.source.tokenizer, tmp_path_factory.mktemp("dpo") / "dpo"
    with new_dir(path) as made:
        for split, numbers in (("train", range(0, 100, 2)), ("val", range(1, 40, 2))):
            entries = []
            for number in numbers:
                for text in ("no", reply(number).content):
                    ids, mask = render(tokenizer, [*question(number), Message("assistant", text)])
                    entries.append((ids, mask))
            lengths = [len(entries[2 * k][0]) + len(entries[2 * k + 1][0]) for k in range(len(entries) // 2)]
            rows = [[e for k in row for e in (2 * k, 2 * k + 1)] for row in pack(lengths, CONTEXT + 1, 1)]
            write_split(made, split, entries, rows, tokenizer.vocab_size)
        facts = {"context_tokens": CONTEXT, "pad_id": tokenizer.pad, "stop_id": tokenizer.stop, "dtype": "uint16"}
        write_manifest(made, kind=KIND, version=VERSION, counts={}, **facts)
    return path


def test_every_target_has_the_reference_s_log_probability(folder, model):
    sampler = PairSampler(folder, model, "fp32", 1)
    batch = sampler.batch(0, BATCH)
    places = supervised(batch.document_BS, batch.mask_BS)
    scores = np.where(places, batch.values_BSK[:, 1:, 3], 0)
    row = sampler.order.sample_numbers(0, BATCH)[0]
    entries = [sampler.rows.conversation(entry) for entry in sampler.rows.numbers(row)]
    splits = [int(np.flatnonzero(mask)[0]) for _, mask in entries]
    expected = reference_log_probs(
        model, [ids[:at].tolist() for (ids, _), at in zip(entries, splits, strict=True)],
        [ids[at:].tolist() for (ids, _), at in zip(entries, splits, strict=True)],
    )  # fmt: skip
    assert scores[0][places[0]] == pytest.approx(np.concatenate(expected), abs=1e-4)
    sides, pairs = batch.values_BSK[..., 1][:, 1:][places], batch.values_BSK[..., 0][:, 1:][places]
    assert {(pair, side) for pair, side in zip(pairs, sides, strict=True)} == {
        (pair, side) for pair in range(batch.pairs) for side in (1, -1)
    }


def test_a_batch_is_the_same_whoever_asked_before(folder, model):
    one, two = (PairSampler(folder, model, "fp32", 1) for _ in range(2))
    two.batch(BATCH, BATCH)
    first, second = one.batch(0, BATCH), two.batch(0, BATCH)
    assert all(np.array_equal(a, b) for a, b in zip(first[:4], second[:4], strict=True))


@pytest.mark.parametrize("normalised", [True, False])
def test_micro_batches_change_nothing(folder, model, normalised):
    policy = copy.deepcopy(model)
    with torch.no_grad():
        policy.model.norm.weight *= 1.1
    batch, objective = PairSampler(folder, model, "fp32", 1).batch(0, BATCH), Dpo(0.5, normalised)
    losses = [loss_and_gradient(policy, objective, batch, rows) for rows in (1, 2, 4)]
    for loss, gradient in losses[1:]:
        assert loss == pytest.approx(losses[0][0], rel=1e-5)
        assert torch.allclose(gradient, losses[0][1], atol=1e-6)


def trained(folder, model, path, stop_after=None):
    sampler, objective = PairSampler(folder, model, "fp32", 1), Dpo(1.0, True)
    steps = 12
    adam = OptimizerSettings(0.9, 0.99, 1e-8, 0.0)
    recipe = SimpleNamespace(batch_tokens=BATCH, grad_clip=1.0, z_loss=0.0, spike_guard=True, max_rollbacks=0)
    settings = LoopSettings.of(
        recipe, SimpleNamespace(threads=1, log_every_steps=1, save_every_seconds=1e9), total_tokens=steps * BATCH,
        precision="fp32", micro_batch_rows=1, document_mask=True, validation_every_tokens=0, sample_every_tokens=0,
    )  # fmt: skip
    policy, done = copy.deepcopy(model), []
    hooks = Hooks(
        validate=lambda model: {}, on_step=done.append,
        should_stop=lambda: stop_after is not None and len(done) + 1 >= stop_after,
    )  # fmt: skip
    schedule = Schedule("cosine", 5e-4, 0.0, 0, 0, steps * BATCH)
    train(policy, sampler, adam, schedule, settings, path, hooks, objective=objective)
    return policy, done


def test_what_was_chosen_becomes_likelier_also_where_it_was_not_shown(folder, model, tmp_path):
    held_out, objective = PairSampler(folder, model, "fp32", 1, "val"), Dpo(1.0, True)
    before = validate(model, held_out, objective, "fp32")
    assert before["loss"] == pytest.approx(np.log(2), abs=1e-4) and before["pairs"] == 20
    policy, rows = trained(folder, model, tmp_path / "a")
    after = validate(policy, held_out, objective, "fp32")
    assert after["loss"] < 0.3 and after["accuracy"] == 1 and after["chosen"] > after["rejected"]
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-4) and rows[-1]["policy.accuracy"] == 1


def test_stopped_and_resumed_it_has_the_weights_of_one_run(folder, model, tmp_path):
    whole, _ = trained(folder, model, tmp_path / "whole")
    with pytest.raises(Interrupted):
        trained(folder, model, tmp_path / "parts", stop_after=5)
    parts, _ = trained(folder, model, tmp_path / "parts")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))

"""Rounds of answers: what is drawn, what is kept for a resume, and that training on them earns more."""

from __future__ import annotations

import copy
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from athanor.base.errors import GateError, Interrupted, ParamsError
from athanor.base.strict import build
from athanor.export.parity import rebuilt
from athanor.policy.objectives import Grpo
from athanor.policy.params import GrpoParams
from athanor.policy.rollouts import Asker, Rollouts, scores
from athanor.text.conversations import Item
from athanor.training.loop import Hooks, train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.schedule import Schedule
from athanor.training.settings import LoopSettings
from tests.export.conftest import CONTEXT, question, reply

BASE = {
    "seed": 1, "steps": 6, "questions_per_step": 4, "answers_per_question": 4, "steps_per_round": 2,
    "question_tries": 3.0, "max_new_tokens": 8, "rewards": {"correct": 1.0, "format": 0.2}, "kl_coefficient": 0.02,
    "lr": 1e-3, "optimizer": "adamw", "precision": "fp32",
}  # fmt: skip


def params_of(**more):
    return build(GrpoParams, BASE | more, "grpo")


@pytest.fixture(scope="module")
def items():
    rejected = ("no", "none!")
    return [
        Item("say", tuple(question(n)), "exact", reply(n).content, (reply(n).content,), rejected)
        for n in range(0, 100, 3)
    ]


@pytest.fixture(scope="module")
def unsure(qwen):  # noqa: F811
    """A model that knows the answers and now and then gives another one."""
    model = rebuilt(qwen.source, "float32")
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += 0.6 * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


class Training:
    """One training in a folder; `run` may be cut off and called again."""

    def __init__(self, folder, model, tokenizer, items, threads=1, **more):
        self.params = params_of(**more)
        self.folder, self.items, self.first = folder, items, model
        self.asker = Asker(tokenizer, self.params, 1, threads)
        self.batch = self.params.questions_per_step * self.params.answers_per_question * CONTEXT
        self.rows = []

    def rollouts(self, model):
        return Rollouts(self.asker, self.items, model, self.first, self.folder, self.batch, "fp32")

    def run(self, stop_after=None, threads=1):
        model, total = copy.deepcopy(self.first), self.params.steps * self.batch
        recipe = SimpleNamespace(
            **vars(self.params), batch_tokens=self.batch, z_loss=0.0, spike_guard=False, max_rollbacks=0
        )
        machine = SimpleNamespace(threads=threads, log_every_steps=1, save_every_seconds=1e9)
        settings = LoopSettings.of(
            recipe, machine, total_tokens=total, precision="fp32", micro_batch_rows=2, document_mask=True,
            validation_every_tokens=0, sample_every_tokens=0,
        )  # fmt: skip
        done = []
        hooks = Hooks(
            validate=lambda model: {}, on_step=lambda row: (done.append(row), self.rows.append(row)),
            should_stop=lambda: stop_after is not None and len(done) + 1 >= stop_after,
        )  # fmt: skip
        schedule = Schedule("cosine", self.params.lr, 0.0, 0, 0, total)
        train(
            model, self.rollouts(model), OptimizerSettings.of(self.params), schedule, settings, self.folder, hooks,
            objective=Grpo(self.params.kl_coefficient, self.params.clip_low, self.params.clip_high),
        )  # fmt: skip
        return model


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def same(one, two):
    return (
        all(np.array_equal(one._asdict()[name], two._asdict()[name]) for name in one._fields[:4])
        and one.known == two.known
    )


@pytest.fixture
def make(unsure, qwen, items, tmp_path):  # noqa: F811
    def made(name="a", **more):
        return Training(tmp_path / name, unsure, qwen.source.tokenizer, items, **more)

    return made


def test_a_round_is_a_function_of_weights_seed_and_number(make, unsure):
    one, two, other = (make(name).rollouts(unsure) for name in "abc")
    batch = one.batch(0, one.batch_tokens)
    assert same(batch, two.batch(0, one.batch_tokens)) and 0 < batch.known["policy.reward"] < 1.2
    with torch.no_grad():
        changed = copy.deepcopy(unsure)
        for weight in changed.parameters():
            weight *= 1.05
    other.model = changed
    assert not same(batch, other.batch(0, one.batch_tokens))
    assert not same(batch, one.batch(2 * one.batch_tokens, one.batch_tokens))


def test_the_second_step_of_a_round_comes_from_its_file(make, unsure):
    training = make()
    drawing = training.rollouts(unsure)
    drawing.batch(0, drawing.batch_tokens)
    second = drawing.batch(drawing.batch_tokens, drawing.batch_tokens)
    with torch.no_grad():
        changed = copy.deepcopy(unsure)
        changed.model.norm.weight *= 2
    resumed = training.rollouts(changed)
    assert same(second, resumed.batch(drawing.batch_tokens, drawing.batch_tokens))
    shutil.rmtree(training.folder / "rounds")
    with pytest.raises(GateError, match="cannot be read"):
        training.rollouts(changed).batch(drawing.batch_tokens, drawing.batch_tokens)


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
def test_stopped_and_resumed_it_has_the_weights_of_one_run(make, stop_after):
    """Inside a round and at its end."""
    whole = make("whole").run()
    parts = make("parts")
    with pytest.raises(Interrupted):
        parts.run(stop_after)
    assert equal(whole, parts.run())
    assert not equal(whole, parts.first)


def test_what_is_told_of_a_step_does_not_depend_on_a_resume(make):
    """The names came in another order from a round's file than from the drawing, beside the other's numbers."""
    whole, parts = make("whole"), make("parts")
    whole.run()
    with pytest.raises(Interrupted):
        parts.run(3)
    parts.run()
    told = {row["step"]: row for row in parts.rows}
    for row in whole.rows:
        names = [name for name in row if name.startswith("policy.")]
        assert names and all(told[row["step"]][name] == row[name] for name in names)


def test_threads_change_nothing(make):
    assert equal(make("one").run(threads=1), make("two", threads=2).run(threads=2))


def test_at_its_first_step_the_policy_is_what_drew_and_the_reference(make):
    training = make(steps=2)
    training.run()
    first, second = training.rows
    assert first["policy.kl"] == pytest.approx(0, abs=1e-6) and first["policy.clip_share"] == 0
    assert second["policy.kl"] > 0 and first["grad_norm"] > 0


def test_questions_whose_answers_earn_the_same_are_left_out(make, unsure, items):
    rollouts = make(question_tries=8.0).rollouts(unsure)
    batches = [rollouts.batch(step * rollouts.batch_tokens, rollouts.batch_tokens) for step in range(2)]
    assert 0 < batches[0].known["policy.tied_groups"] < 1
    for batch in batches:
        advantage_BS, mask_BS = batch.values_BSK[..., 0], batch.mask_BS.astype(bool)
        assert (advantage_BS[mask_BS] != 0).all() and (advantage_BS[~mask_BS] == 0).all()


def test_where_all_answers_earn_the_same_nothing_is_learned(make, unsure):
    training = make(rewards={"correct": 1e-12}, steps=2, kl_coefficient=0.0)
    assert equal(training.run(), unsure) and all(row["policy.tied_groups"] == 1 for row in training.rows)


def test_it_earns_more_afterwards(make, unsure, items):
    training = make(steps=24, questions_per_step=8, answers_per_question=8, lr=2e-3)
    before = scores(training.asker.greedy(unsure, items), items)
    after = scores(training.asker.greedy(training.run(), items), items)
    assert after["correct"] > before["correct"] + 0.1, (before, after)


@pytest.mark.parametrize(
    ("more", "where"),
    [({"steps": 5}, "steps"), ({"rewards": {"format": 1.0}}, "rewards")],
)  # fmt: skip
def test_params_that_make_no_sense_are_refused(more, where):
    with pytest.raises(ParamsError, match=where):
        params_of(**more)

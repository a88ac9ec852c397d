"""Runs that go wrong and heal: the same bytes whenever they are killed, and no false alarm. about 20 s."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from athanor.base.errors import GateError, InputError
from athanor.training import checkpoint, recovery
from athanor.training.schedule import Schedule
from athanor.training.world import World
from tests.training import micro, spiked

ROOT = Path(__file__).resolve().parents[2]


class Told:
    """What the hooks were told."""

    def __init__(self):
        self.back, self.events, self.notes, self.rows = [], [], [], {}
        self.hooks = {
            "on_rollback": self.on_rollback,
            "on_event": lambda name, facts: self.events.append((name, facts)),
            "on_note": self.notes.append,
            "on_step": self.on_row,
            "on_replay": self.on_row,
        }

    def on_row(self, row):
        self.rows[row["step"]] = row

    def on_rollback(self, step, facts):
        self.back.append((step, facts))
        self.rows = {number: row for number, row in self.rows.items() if number <= step}


@pytest.fixture(scope="session")
def healed(tmp_path_factory):
    """The run with garbage in its data, left alone."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    told, sampler = Told(), spiked.Garbage()
    model, result = spiked.run(tmp_path_factory.mktemp("healed"), sampler, told.hooks)
    return spiked.micro.outcome(model, result), result, told, sampler


def test_a_spike_is_undone_and_its_data_left_out(healed, tmp_path):
    _, result, told, sampler = healed
    (row,) = result.skipped_ranges
    assert row["found"] == 23 and row["step"] == 19 and (row["from"], row["to"]) == (18 * 128, 23 * 128)
    assert "does not recover" in row["reason"]
    assert [step for step, _ in told.back] == [16] and told.back[0][1]["skip"] == row
    # The way is one curve of 48 steps; the last read of each step's batch leaves the range out.
    assert sampler.read[-30:] == [*range(23, 53)] and sorted(told.rows) == list(range(1, 49))
    losses = [point["loss"] for point in result.curve]
    assert len(losses) == 48 and result.tokens == 48 * 128
    _, ill = spiked.run(tmp_path / "ill", max_rollbacks=0)
    _, well = spiked.run(tmp_path / "well", spiked.Garbage(()))
    assert not ill.skipped_ranges and not well.skipped_ranges
    assert abs(losses[-1] - well.curve[-1]["loss"]) < abs(ill.curve[-1]["loss"] - well.curve[-1]["loss"]) / 2


def test_the_documents_of_garbage_are_named_first(healed):
    _, _, told, _ = healed
    named = told.back[0][1]["documents"]
    assert len(named) == 8 and named[0]["document"].startswith("document ")
    assert {one["step"] for one in named} <= {21, 22, 23}  # of steps 19 to 23, those with garbage
    assert [one["loss"] for one in named] == sorted((one["loss"] for one in named), reverse=True)
    assert named[0]["document"] in told.notes[-1]


@pytest.mark.parametrize("changes", [{"log_every_steps": 7}, {"save_every_seconds": 0.0, "log_every_steps": 3}])
def test_when_the_device_is_looked_at_and_saved_does_not_matter(healed, tmp_path, changes):
    model, result = spiked.run(tmp_path, **changes)
    assert spiked.micro.outcome(model, result) == healed[0]
    assert result.skipped_ranges == healed[1].skipped_ranges


@pytest.mark.parametrize("when", ["resume", "drop", "20"])
def test_killed_on_the_way_back_or_after_it_the_bytes_are_the_same(healed, tmp_path, when):
    command = [sys.executable, str(ROOT / "tests/training/spiked.py"), str(tmp_path), when]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=300, capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    told = Told()
    model, result = spiked.run(tmp_path, hooks=told.hooks)
    assert spiked.micro.outcome(model, result) == healed[0]
    assert result.skipped_ranges == healed[1].skipped_ranges
    # A kill before the first checkpoint of the new way goes the old one again, one after it does not.
    assert len(told.back) == (0 if when.isdigit() else 1)
    assert sorted(told.rows) == list(range(1, 49))


def test_a_pocket_longer_than_the_rule_waits_is_left_behind_in_two_goes(tmp_path):
    told = Told()
    _, result = spiked.run(tmp_path, spiked.Garbage(range(20, 27)), told.hooks)
    assert 1 <= len(result.skipped_ranges) <= 3
    left_out = {n for row in result.skipped_ranges for n in range(row["from"] // 128, row["to"] // 128)}
    assert len(set(range(20, 27)) - left_out) <= 2 and result.curve[-1]["loss"] < 1.2


def test_going_back_is_bounded_and_the_error_says_what_was_tried(tmp_path):
    told = r"2 ranges of data were left out before: steps \d+ to \d+ .*lower lr.*qk_norm.*grad_clip"
    with pytest.raises(GateError, match=told):
        spiked.run(tmp_path, spiked.Garbage(range(20, 1000)), max_rollbacks=2)


@pytest.mark.parametrize("guarded", [False, True])
def test_no_false_alarm_in_20_healthy_runs(monkeypatch, tmp_path, guarded):
    """Half with the guard's short window, half with the rules of the host alone; weights and data differ."""
    micro = spiked.micro
    real = micro.make_model
    for seed in range(guarded, 20, 2):
        sampler = micro.CountingSampler(masked=seed % 4 == 0)
        shifted = SimpleNamespace(batch=lambda at, n, s=seed, real=sampler: real.batch(at + s * 10**6 * 128, n))
        monkeypatch.setattr(micro, "make_model", lambda s=seed: real(s))
        told = Told()
        rules = dataclasses.replace(spiked.RULES, anchor_every=256)
        _, result = spiked.run(tmp_path / str(seed), shifted, told.hooks, spike_guard=guarded, rules=rules)
        assert result.skipped_steps == 0 and not result.skipped_ranges and not told.back and not told.events, seed


def test_the_guard_refuses_a_batch_far_out_and_names_its_documents(healed, tmp_path):
    """A batch at the end, where garbage is five times the loss; the weights are as if there had been no such step."""
    told = Told()
    model, result = spiked.run(tmp_path, spiked.Garbage((38,)), told.hooks, spike_guard=True)
    assert result.skipped_steps == 1 and told.rows[39]["skipped"] == 1 and not told.back
    ((name, facts),) = told.events
    assert name == "refused_step" and facts["step"] == 39 and "step 39 was refused" in told.notes[-1]
    assert len(facts["documents"]) == 8 and facts["documents"][0]["loss"] > 4
    saved = checkpoint.load(checkpoint.steps(tmp_path)[0])
    assert float(saved.tensors["optimizer.model.norm.weight.step"]) == 47
    assert result.curve[38]["loss"] is None
    stops = iter([False] * 39 + [True] + [False] * 100)
    with pytest.raises(Exception, match="stopped at step 40"):
        spiked.run(tmp_path / "b", spiked.Garbage((38,)), {"should_stop": lambda: next(stops)}, spike_guard=True)
    again = spiked.run(tmp_path / "b", spiked.Garbage((38,)), spike_guard=True)
    assert spiked.micro.outcome(*again) == spiked.micro.outcome(model, result)


def test_a_pocket_that_the_guard_refuses_ends_in_a_way_back(tmp_path):
    told = Told()
    _, result = spiked.run(tmp_path, spiked.Garbage(range(34, 39)), told.hooks, spike_guard=True)
    (row,) = result.skipped_ranges
    assert row["reason"] == "4 steps in a row were skipped" and row["found"] == 38 and row["step"] == 33
    assert result.skipped_steps <= 1


def plant(when, what):
    """A hook that spoils the weights or the optimiser once, after a step."""
    once = []

    def on_step(row):
        if row["step"] == when and not once:
            once.append(1)
            what()

    return on_step


@pytest.mark.parametrize("place", ["weight", "optimiser state"])
@pytest.mark.parametrize("every", [1, 3])
def test_nan_in_a_weight_or_the_optimiser_is_undone_with_the_same_data(monkeypatch, tmp_path, place, every):
    steppers = []
    real = recovery.Recovery.__init__
    monkeypatch.setattr(
        recovery.Recovery, "__init__", lambda self, s, *rest: (steppers.append(s), real(self, s, *rest))[1]
    )
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil():
        parts = steppers[-1].optimizer
        weights = dict(steppers[-1].model.named_parameters())
        tensor = parts.tensors()[f"{name}.exp_avg"] if place == "optimiser state" else weights[name]
        with torch.no_grad():
            tensor.view(-1)[3] = float("nan")

    told = Told()
    clean = spiked.run(tmp_path / "a", spiked.Garbage(()))
    hooks = {**told.hooks, "on_step": plant(14, spoil)}
    done = spiked.run(tmp_path / "b", spiked.Garbage(()), hooks, log_every_steps=every)
    assert spiked.micro.outcome(*done) == spiked.micro.outcome(*clean)
    assert [step for step, _ in told.back] == [8] and not done[1].skipped_ranges
    where = f"{name}.exp_avg" if place == "optimiser state" else name
    assert f"{place}: {where}" in told.back[0][1]["reason"]
    saved = checkpoint.load(checkpoint.steps(tmp_path / "b")[0])
    assert saved.state["repairs"] == 1


def test_numbers_that_spoil_again_and_again_end_the_run(monkeypatch, tmp_path):
    models = []
    real = spiked.micro.make_model
    monkeypatch.setattr(spiked.micro, "make_model", lambda: models.append(real()) or models[-1])

    def on_step(row):
        if row["step"] == 14:
            with torch.no_grad():
                models[-1].head_weight[0, 0] = float("inf")

    with pytest.raises(GateError, match="weight: .*is not finite, for the 4th time.*test the memory"):
        spiked.run(tmp_path, spiked.Garbage(()), {"on_step": on_step})


ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("not enough memory")]


@pytest.mark.parametrize("error", ERRORS)
def test_out_of_memory_halves_the_micro_batch(monkeypatch, tmp_path, error):
    from athanor.training import step

    real, room = step.training_loss, 2

    def tight(model, batch, *divisor, **how):
        if len(batch.ids_BT) > room:
            raise error
        return real(model, batch, *divisor, **how)

    micro, told = spiked.micro, Told()
    expected = micro.outcome(*micro.run(tmp_path / "a", micro_batch_rows=2))
    monkeypatch.setattr(step, "training_loss", tight)
    done = micro.run(tmp_path / "b", micro_batch_rows=8, hooks=told.hooks, threads=2)
    assert micro.outcome(*done) == expected
    assert [facts["micro_batch_rows"] for _, facts in told.events] == [4, 2]
    assert "4 instead of 8 rows" in told.notes[0] and {name for name, _ in told.events} == {"out_of_memory"}
    room = 0
    with pytest.raises(InputError, match=r"out of memory in step 1 with one row.*1\. checkpointing: on.*model\.layers"):
        micro.run(tmp_path / "c")


def test_compiled_blocks_serve_the_halved_micro_batches(monkeypatch, tmp_path):
    from athanor.model.transformer import Block
    from athanor.training import compiling, step

    real, served = step.training_loss, []

    def tight(model, batch, *divisor, **how):
        if len(batch.ids_BT) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, batch, *divisor, **how)

    def compiled(block, x_BTD, *rest):
        served.append(len(x_BTD))
        return Block.forward(block, x_BTD, *rest)

    make_model, micro = spiked.micro.make_model, spiked.micro

    def tuned_model():
        model = make_model()
        compiling.tune_blocks([model], compiled=compiled, rows_tokens=frozenset({(6, model.config.context_tokens)}))
        return model

    monkeypatch.setattr(micro, "make_model", tuned_model)
    monkeypatch.setattr(step, "training_loss", tight)
    micro.run(tmp_path, micro_batch_rows=6)
    assert set(served) == {3, 2}  # 8 rows of a batch: two halves of 6, and what is left


def test_advice_begins_from_what_is_on_already(monkeypatch, tmp_path):
    """It once took no notice of recompute, Muon and the copy of the best weights, and advised what was on."""
    from athanor.training import step
    from athanor.training.memory import StepFootprint, training_bytes

    def no_room(*_, **__):
        raise MemoryError

    monkeypatch.setattr(step, "training_loss", no_room)
    config, asked = spiked.micro.CONFIG, []
    load = StepFootprint(8, config.context_tokens, "fp32", checkpointing=True, optimizer="muon", keeps_best=True)
    real = recovery.check_memory
    monkeypatch.setattr(
        recovery, "check_memory", lambda config, load, *rest: (asked.append(load), real(config, load, *rest))
    )
    with pytest.raises(InputError, match="with one row at a time") as told:
        spiked.micro.run(tmp_path, micro_batch_rows=1, footprint=load)
    assert "checkpointing" not in told.value.fix and "model.layers" in told.value.fix
    assert asked == [dataclasses.replace(load, micro_batch_rows=1)]
    plain, cpu = StepFootprint(1, config.context_tokens, "fp32"), torch.device("cpu")
    assert training_bytes(config, asked[0], cpu) != training_bytes(config, plain, cpu)


def test_out_of_memory_in_one_process_of_several_is_explained(monkeypatch, tmp_path):
    """No other could repeat the step with it; once the error came out as it was, with a traceback."""

    class Short:
        """A stepper in a world of two that has no room."""

        world, device = World(), torch.device("cpu")

        def step(self, rows, rate):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model = spiked.micro.make_model()
    stepper = Short()
    stepper.world.size, stepper.world.rank = 2, 1
    stepper.settings = dataclasses.replace(spiked.micro.SETTINGS, micro_batch_rows=8)
    stepper.guard, replicas = SimpleNamespace(judged=0), SimpleNamespace(models=[model], model=model, count=1)
    stepper.backend, stepper.optimizer = SimpleNamespace(replicas=replicas), SimpleNamespace(tensors=dict)
    left: list[tuple[int, set[str]]] = []
    hooks = SimpleNamespace(on_out_of_memory=lambda step, tensors: left.append((step, set(tensors))))
    one = recovery.Recovery(stepper, SimpleNamespace(step=4), None, hooks, 0)
    with pytest.raises(
        InputError, match=r"out of memory in step 5 of process 1 of 2 with 8 rows.*1\. micro_batch_tokens: \d+"
    ):
        one.step(None, 0.1)
    assert left == [(5, {name for name, _ in model.named_parameters()})]


def test_other_errors_pass_through(monkeypatch, tmp_path):
    from athanor.training import step

    def wrong(*_, **__):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(step, "training_loss", wrong)
    with pytest.raises(RuntimeError, match="shapes"):
        spiked.micro.run(tmp_path)


def lengths(steps):
    return Schedule("wsd", 0.01, 0.001, 256, 8 * 128, steps * 128)


def test_runs_of_all_lengths_share_a_trunk_that_went_back(tmp_path):
    """One trunk ends before the garbage is met, one between meeting and finding it, one after; in both orders."""
    outcome = spiked.micro.outcome
    plain = {steps: outcome(*spiked.run(tmp_path / f"{steps}", schedule=lengths(steps))) for steps in (27, 30, 40)}
    for order in ((40, 30, 27), (27, 30, 40)):
        trunk = micro.Trunk(tmp_path / f"trunk{order}")
        for steps in order:
            folder, save = tmp_path / f"run{order}{steps}", 0.0 if steps == 30 else 1e9
            done = spiked.run(folder, schedule=lengths(steps), trunk=trunk, save_every_seconds=save)
            assert outcome(*done) == plain[steps], (order, steps)


def test_a_spike_in_the_cooldown_never_goes_back_into_the_trunk(tmp_path):
    trunk, told = micro.Trunk(tmp_path / "trunk"), Told()
    schedule = Schedule("wsd", 0.01, 0.001, 256, 26 * 128, 48 * 128)  # the cooldown begins at step 22
    garbage = spiked.Garbage(range(34, 38))
    _, result = done = spiked.run(tmp_path / "a", garbage, told.hooks, schedule=schedule, trunk=trunk)
    (row,) = result.skipped_ranges
    assert 22 < row["step"] <= 34 and told.back[0][0] >= 22
    assert not any(path.name > "step_00000022" for path in checkpoint.steps(trunk.path))
    apart = spiked.run(tmp_path / "b", spiked.Garbage(range(34, 38)), schedule=schedule)
    assert spiked.micro.outcome(*done) == spiked.micro.outcome(*apart)
    # Without its history, nothing is found in the first steps of a cooldown.
    early = spiked.run(tmp_path / "c", spiked.Garbage(range(22, 24)), schedule=schedule)
    assert not early[1].skipped_ranges


def test_no_way_back_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "latest", lambda *_: None)
    with pytest.raises(GateError, match="no checkpoint up to step"):
        spiked.run(tmp_path)


def test_a_checkpoint_of_another_way_is_no_way_back(healed, tmp_path):
    """Anchors that a run with other data left in the folder are passed over."""
    spiked.run(tmp_path / "other", spiked.micro.CountingSampler(masked=True))
    (tmp_path / "run").mkdir()
    told = Told()

    def on_step(row):
        if row["step"] == 20:  # the other run's checkpoint, a step before the range begins
            source = checkpoint.load(checkpoint.steps(tmp_path / "other")[0])
            history = {name: tensor[:17] if "history" in name else tensor for name, tensor in source.tensors.items()}
            checkpoint.save(tmp_path / "run" / "anchors", 17, history, {**source.state, "step": 17})

    model, result = spiked.run(tmp_path / "run", hooks={**told.hooks, "on_step": on_step})
    assert told.back[0][0] == 16 and spiked.micro.outcome(model, result) == healed[0]


def test_anchors_go_when_nothing_can_need_them(tmp_path):
    seen = []

    def on_step(row):
        seen.append([checkpoint.step_of(path) for path in checkpoint.steps(tmp_path / "anchors")])

    spiked.run(tmp_path, spiked.Garbage(()), {"on_step": on_step})
    assert seen[0] == [0] and seen[9] == [8, 0] and seen[30] == [24, 16]
    assert np.array_equal(checkpoint.steps(tmp_path / "anchors"), [])

"""The loop: exact resume, threads, accumulation, skipping, stopping."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from athanor.base.errors import GateError, Interrupted
from athanor.model.loss import token_losses
from athanor.training import checkpoint
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.schedule import Schedule
from athanor.training.step import micro_batches
from tests.training import micro

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    return micro.outcome(*micro.run(tmp_path_factory.mktemp("whole")))


def test_runs_repeat_bit_for_bit_and_log_settings_do_not_matter(tmp_path, uninterrupted):
    assert micro.outcome(*micro.run(tmp_path, log_every_steps=7, save_every_seconds=0.0)) == uninterrupted


def test_threads_do_not_change_a_bit(tmp_path, uninterrupted):
    assert micro.outcome(*micro.run(tmp_path, threads=3)) == uninterrupted


def test_a_finished_run_returns_its_result_without_training(tmp_path, uninterrupted):
    micro.run(tmp_path)

    def fail(*_):
        raise AssertionError("trained again")

    again = micro.run(tmp_path, hooks={"before_first_step": fail, "on_step": fail, "validate": fail})
    assert micro.outcome(*again) == uninterrupted


def test_stop_saves_and_resume_is_exact(tmp_path, uninterrupted):
    seen = []

    def on_step(row):
        seen.append(row["step"])

    for stops in (4, 11):
        hooks = {"on_step": on_step, "should_stop": lambda s=stops: len(seen) >= s - 1}
        with pytest.raises(Interrupted, match=f"step {stops} of 24"):
            micro.run(tmp_path, hooks=hooks, log_every_steps=1)
        assert checkpoint.steps(tmp_path)[0].name == f"step_{stops:08d}"
    resumed = []
    done = micro.run(tmp_path, hooks={"on_step": on_step, "on_resume": resumed.append})
    assert micro.outcome(*done) == uninterrupted
    assert resumed == [11 * 128] and seen == list(range(1, 25))


def test_sigkill_and_resume_is_exact(tmp_path, uninterrupted):
    for kill_at in (6, 17):
        command = [sys.executable, str(ROOT / "tests/training/micro.py"), str(tmp_path), str(kill_at)]
        done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=120)
        assert done.returncode == -9
        assert checkpoint.steps(tmp_path)[0].name == f"step_{kill_at - 1:08d}"
    assert micro.outcome(*micro.run(tmp_path)) == uninterrupted


def test_global_random_state_is_restored(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    micro.run(tmp_path)
    assert torch.equal(torch.rand(3), expected)  # training itself draws nothing
    torch.manual_seed(6)
    micro.run(tmp_path)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("masked", [False, True])
def test_accumulated_gradient_equals_that_of_one_batch(masked):
    rows = micro.CountingSampler(masked).batch(0, 256)
    mask = rows.mask_BS
    if masked:
        mask[0] = 0  # a micro-batch with a single supervised target and one with none
        mask[1] = 0
        mask[2, 5:7] = 1
    gradients = {}
    for size in (1, 2, 5, 16):
        model = micro.make_model()
        parts = micro_batches(rows, size, True)
        count = sum(len(part.next_N) for part in parts)

        def loss_of(replica, part, count=count):
            loss = token_losses(replica, part).sum() / count
            loss.backward()
            return loss.detach()

        with CpuReplicas(model, 2) as replicas:
            loss = replicas.backward(parts, loss_of)
        gradients[size] = (loss, [weight.grad for weight in model.parameters()])
    for size in (1, 2, 5):
        assert torch.allclose(gradients[size][0], gradients[16][0], atol=1e-6, rtol=0)
        for a, b in zip(gradients[size][1], gradients[16][1], strict=True):
            assert torch.allclose(a, b, atol=1e-6, rtol=0)


def test_unsupervised_targets_do_not_matter(tmp_path):
    class Scrambled(micro.CountingSampler):
        """The last id of a row is only ever a target; change it where it is not supervised."""

        def batch(self, position, size):
            rows = super().batch(position, size)
            tokens = rows.tokens_BS.copy()
            off = (rows.mask_BS[:, -1] == 0) | (rows.document_BS[:, -1] != rows.document_BS[:, -2])
            assert off.any()
            tokens[off, -1] = 0
            return rows._replace(tokens_BS=tokens)

    plain = micro.run(tmp_path / "a", sampler=micro.CountingSampler(masked=True))
    assert micro.outcome(*plain) == micro.outcome(*micro.run(tmp_path / "b", sampler=Scrambled(masked=True)))
    rows = [micro.CountingSampler(True).batch(step * 128, 128) for step in range(24)]
    inside = [(r.document_BS[:, 1:] == r.document_BS[:, :-1]) & (r.mask_BS[:, 1:] == 1) for r in rows]
    assert plain[1].supervised_tokens == sum(int(i.sum()) for i in inside)


def poison(monkeypatch, steps):
    """Make the gradient of the given steps not finite."""
    from athanor.training import step

    real, calls = step.clip_gradients, []

    def clip(weights, limit, *joint):
        weights = list(weights)
        calls.append(1)
        if len(calls) in steps:
            weights[3].grad[0] = float("nan")
        return real(weights, limit, *joint)

    monkeypatch.setattr(step, "clip_gradients", clip)


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, monkeypatch):
    poison(monkeypatch, {4, 5})
    rows = []
    model, result = micro.run(tmp_path, hooks={"on_step": rows.append})
    assert result.skipped_steps == 2 and [row["skipped"] for row in rows[:6]] == [0, 0, 0, 1, 1, 0]
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    assert result.curve[3]["grad_norm"] is None and result.curve[5]["loss"] is not None
    saved = checkpoint.load(checkpoint.steps(tmp_path)[0])
    assert float(saved.tensors["optimizer.model.norm.weight.step"]) == 22


def test_nothing_but_skipped_steps_is_an_error(tmp_path, monkeypatch):
    poison(monkeypatch, set(range(1, 1000)))
    monkeypatch.setattr("athanor.training.loop.MAX_SKIPPED_IN_A_ROW", 6)
    with pytest.raises(GateError, match="6 steps in a row"):
        micro.run(tmp_path)


def test_a_final_rate_off_target_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(Schedule, "lr_at", lambda self, tokens: 0.0011)
    with pytest.raises(GateError, match="final learning rate"):
        micro.run(tmp_path)


def test_the_checkpoint_before_the_cooldown_is_pinned(tmp_path):
    micro.run(tmp_path, save_every_seconds=0.0)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step_00000024", "step_00000023", "step_00000016"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_formats_learn_with_wide_weights(tmp_path, precision):
    model, result = micro.run(tmp_path, precision=precision)
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert result.curve[-1]["loss"] < result.curve[0]["loss"]
    resumed, _ = micro.run(tmp_path, precision=precision)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_z_loss_lowers_the_log_sum_exp(tmp_path):
    ids = torch.arange(16)[None]
    with torch.no_grad():
        free = micro.run(tmp_path / "a")[0](ids).logsumexp(-1).square().mean()
        held = micro.run(tmp_path / "b", z_loss=0.05)[0](ids).logsumexp(-1).square().mean()
    assert held < free


def lengths(tokens):
    return Schedule("wsd", 0.01, 0.001, 256, tokens // 4 // 128 * 128, tokens)


def test_a_step_that_a_longer_run_saved_on_its_way_is_pinned_by_the_shorter_one(tmp_path):
    short, long, trunk, seen = lengths(24 * 128), lengths(48 * 128), micro.Trunk(tmp_path / "trunk"), []
    hooks = {"on_step": lambda row: seen.append(row["step"]), "should_stop": lambda: len(seen) >= 17}
    with pytest.raises(Interrupted, match="step 18 of 48"):  # where the shorter run's cooldown begins
        micro.run(tmp_path / "long", schedule=long, trunk=trunk, hooks=hooks, log_every_steps=1)
    assert micro.run(tmp_path / "short", schedule=short, trunk=trunk)[1].trained_tokens == 6 * 128
    micro.run(tmp_path / "long", schedule=long, trunk=trunk, save_every_seconds=0.0)
    kept = {path.name for path in checkpoint.steps(trunk.path)}
    assert {"step_00000018", "step_00000036"} <= kept
    other = dataclasses.replace(short, final=0.0)
    assert micro.run(tmp_path / "branch", schedule=other, trunk=trunk)[1].trained_tokens == 6 * 128


def test_a_cooldown_of_nothing_leaves_the_last_step_to_the_branch(tmp_path):
    schedule, trunk = Schedule("wsd", 0.01, 0.01, 256, 0, 8 * 128), micro.Trunk(tmp_path / "trunk")
    micro.run(tmp_path / "run", schedule=schedule, trunk=trunk)
    assert [path.name for path in checkpoint.steps(trunk.path)] == ["step_00000007"]
    longer = Schedule("wsd", 0.01, 0.001, 256, 4 * 128, 16 * 128)
    grown = micro.run(tmp_path / "long", schedule=longer, trunk=trunk)
    assert grown[1].trained_tokens == 9 * 128
    assert micro.outcome(*grown) == micro.outcome(*micro.run(tmp_path / "plain", schedule=longer))

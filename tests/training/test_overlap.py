"""The next batch is read and checkpoints are written beside the steps: the same bytes, and nothing is lost."""

from __future__ import annotations

import dataclasses
import errno
import threading
from types import SimpleNamespace

import pytest
import torch

from athanor.base.errors import Interrupted
from athanor.training import checkpoint
from athanor.training import overlap as overlap_module
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.guard import Rules
from athanor.training.overlap import Overlap
from athanor.training.state import RunState
from athanor.training.step import Stepper
from tests.training import micro

OFTEN = {"save_every_seconds": 0.0}


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("trunk", [False, True])
def test_a_run_ends_with_the_same_bytes_and_checkpoints(tmp_path, trunk):
    outcomes = []
    for overlap in (False, True):
        folder = tmp_path / str(overlap)
        parts = {"trunk": micro.Trunk(folder / "trunk")} if trunk else {}
        outcomes.append((micro.outcome(*micro.run(folder / "run", overlap=overlap, **OFTEN, **parts)), files(folder)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("stop_at", [1, 9, 17])
def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(tmp_path, stop_at):
    expected = micro.outcome(*micro.run(tmp_path / "whole"))
    steps = []
    hooks = {"on_step": lambda row: steps.append(row["step"]), "should_stop": lambda: len(steps) >= stop_at - 1}
    with pytest.raises(Interrupted):
        micro.run(tmp_path / "run", hooks=hooks, overlap=True, log_every_steps=1, **OFTEN)
    assert checkpoint.load(checkpoint.steps(tmp_path / "run")[0]).step == len(steps)  # whole when the run has ended
    assert micro.outcome(*micro.run(tmp_path / "run", overlap=True, **OFTEN)) == expected


def test_what_a_gpu_writes_in_an_hour(tmp_path, monkeypatch):
    """At 6.3 GB and 0.1 s a step: 80 GB, where an anchor each 256 steps would make 890."""
    now, saved_at, progress, written = 0.0, 0.0, RunState(), []
    monkeypatch.setattr(overlap_module, "time", SimpleNamespace(monotonic=lambda: now))
    settings = dataclasses.replace(micro.SETTINGS, save_every_seconds=300.0)
    with CpuReplicas(micro.make_model(), 1) as replicas, Overlap(None, active=False) as overlap:
        stepper = Stepper(replicas, micro.ADAMW, settings)
        stepper.device = torch.device("cuda")
        for progress.step in range(1, 36_001):
            now = progress.step / 10
            anchor = overlap.anchor_due(stepper, progress.step)
            if anchor or now - saved_at >= settings.save_every_seconds:  # as the loop
                overlap.save(tmp_path / ("anchors" if anchor else ""), stepper, progress)
                written.append(progress.step)
                saved_at = now
        stepper.device = torch.device("cpu")
        assert [overlap.anchor_due(stepper, step) for step in (256, 511, 512)] == [True, False, True]
    assert written[0] == 256  # a resumed run soon has an anchor again
    assert len(written) * 6.3 < 90


def test_copies_on_the_host_use_their_memory_again():
    before = overlap_module.host_copies({"weight": torch.ones(3), "history": torch.zeros(2)}, {})
    after = overlap_module.host_copies({"weight": torch.zeros(3), "history": torch.zeros(4)}, before)
    assert after["weight"] is before["weight"] and not after["weight"].any() and after["history"].shape == (4,)


def test_batches_are_those_of_the_sampler_wherever_the_run_goes_next():
    """After a step back, and where data is left out, what was read ahead is not what is wanted."""
    asked, main = [], threading.get_ident()

    class Sampler:
        def batch(self, *words):
            asked.append((words, threading.get_ident() == main))
            return words

    with Overlap(Sampler(), active=True) as overlap:
        for words in ((0, 4), (4, 4), (8, 4), (4, 4), (8, 4, 4), (12, 4, 4)):
            assert overlap.batch(*words) == words
    assert [words for words, here in asked if here] == [(0, 4), (4, 4), (8, 4, 4)]
    assert [words for words, here in asked if not here][:3] == [(4, 4), (8, 4), (12, 4)]


def test_an_error_of_the_sampler_comes_with_its_batch():
    class Sampler:
        def batch(self, position, tokens):
            if position:
                raise ValueError(position)

    with Overlap(Sampler(), active=True) as overlap:
        overlap.batch(0, 4)
        with pytest.raises(ValueError, match="4"):
            overlap.batch(4, 4)


def test_a_disk_that_is_full_ends_the_run_and_the_checkpoint_before_stays(tmp_path, monkeypatch):
    real, expected = checkpoint.write_tensors, micro.outcome(*micro.run(tmp_path / "whole"))

    def write(path, tensors):
        if "00000008" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", write)
        with pytest.raises(OSError, match="No space left"):
            micro.run(tmp_path / "run", overlap=True, log_every_steps=1, **OFTEN)
    assert checkpoint.steps(tmp_path / "run")[0].name == "step_00000007"
    assert micro.outcome(*micro.run(tmp_path / "run", overlap=True)) == expected


def test_what_is_written_is_the_state_of_its_step(tmp_path, monkeypatch):
    """However far the run has gone on until it is written: here two steps."""
    gate, real, written = threading.Event(), checkpoint.write_tensors, {True: [], False: []}

    def on_step(row):
        if row["step"] == 5:
            gate.set()

    for overlap in (False, True):

        def write(path, tensors, overlap=overlap):
            if overlap and "step_00000003" in str(path):
                assert gate.wait(60)
            checksum = real(path, tensors)
            written[overlap].append(checksum)
            return checksum

        monkeypatch.setattr(checkpoint, "write_tensors", write)
        rules = Rules(anchor_every=3)
        hooks = {"on_step": on_step} if overlap else {}
        micro.run(tmp_path / str(overlap), hooks=hooks, overlap=overlap, rules=rules, log_every_steps=1)
    assert written[True] == written[False] and len(written[True]) > 5

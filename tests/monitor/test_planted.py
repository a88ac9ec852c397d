"""Real trainings at micro size: what is planted is found, and healthy ones raise no alarm. About 40 s."""

from __future__ import annotations

import time

import pytest

from athanor.base.artifacts import read_json
from athanor.data.sampler import PretrainSampler
from athanor.runtime.watch import FILE
from tests.stages.test_train_stages import execute, inputs, work  # noqa: F401  (fixtures)

STEPS, BATCH_TOKENS = 240, 256  # of 64 tokens, a single document makes a burst of the gradient
# They compare the machine with itself: what else it does meanwhile is no property of a run.
OF_THE_MACHINE = {"throughput", "data_wait"}


def findings(**changes):
    tokens = STEPS * BATCH_TOKENS
    pretrain = {"tokens": tokens, "batch_tokens": BATCH_TOKENS, "lr": 3e-3, "validation_every_tokens": tokens // 4}
    run = execute("pretrain", pretrain=pretrain | changes)
    told = read_json(run.journal.folder / "files" / FILE)["findings"]
    return {each["rule"]: each for each in told if each["level"] != "info"}


@pytest.fixture
def loader(monkeypatch):
    """Let the loader do something else besides, from half of the run on."""

    def plant(what):
        real = PretrainSampler.batch

        def batch(self, position, *args, **settings):
            if position >= STEPS * BATCH_TOKENS // 2:
                what()
            return real(self, position, *args, **settings)

        monkeypatch.setattr(PretrainSampler, "batch", batch)

    return plant


def test_a_throttled_loader_is_named(work, loader):  # noqa: F811
    loader(lambda: time.sleep(0.05))
    found = findings()
    assert "data_wait" in found and "Waiting for data takes" in found["data_wait"]["diagnosis"], found
    assert found["data_wait"]["step"] > STEPS // 2


def test_a_leak_is_named(work, loader):  # noqa: F811
    leak = []
    loader(lambda: leak.append(bytes(bytearray(b"x") * (4 << 20))))
    found = findings()
    assert "host_memory" in found and "grew three times in a row" in found["host_memory"]["diagnosis"], found
    assert found["host_memory"]["step"] > STEPS // 2


@pytest.mark.parametrize("seed", range(20))
def test_no_false_alarm_in_a_healthy_run(work, seed):  # noqa: F811
    found = findings(seed=seed, optimizer=("adamw", "muon")[seed % 2])
    assert set(found) <= OF_THE_MACHINE, found

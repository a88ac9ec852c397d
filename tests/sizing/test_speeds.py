"""What was timed here is kept for plans, is no other machine's, and scales to shapes that were not timed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from athanor.base.artifacts import read_json, write_json
from athanor.cli.plan.first_run import before_first_run
from athanor.cli.plan.forecast import Forecast
from athanor.cli.plan.training import Training
from athanor.runtime import presets
from athanor.runtime.machine import machine
from athanor.runtime.schema import check_values
from athanor.sizing import speed, speeds
from athanor.sizing.shapes import LADDER
from athanor.sizing.speed import Measured

SMALL, LARGE = LADDER[1].config(4096, 256), LADDER[3].config(4096, 256)


def test_kept_for_this_host_alone(tmp_path):
    assert speeds.load(tmp_path) is None
    speeds.save(tmp_path, speeds.Speeds(1.5, 2, {SMALL: 1e-4}))
    speeds.save(tmp_path, speeds.Speeds(1.2, 2, {LARGE: 3e-4}))
    assert speeds.load(tmp_path) == speeds.Speeds(1.2, 2, {SMALL: 1e-4, LARGE: 3e-4})
    stored = read_json(tmp_path / speeds.FILE)
    assert stored["host"] == platform.node()
    write_json(tmp_path / speeds.FILE, stored | {"host": "another"})
    assert speeds.load(tmp_path) is None
    (tmp_path / speeds.FILE).write_text("{", encoding="utf-8")
    assert speeds.load(tmp_path) is None


def test_a_larger_model_takes_longer_and_the_nearest_measured_one_counts():
    assert speeds.scaled({SMALL: 1e-4}, SMALL) == 1e-4
    assert 2e-4 < speeds.scaled({SMALL: 1e-4}, LARGE) < 4e-4
    middle = LADDER[2].config(4096, 256)
    assert speeds.scaled({SMALL: 1e-4, LARGE: 9e-4}, middle) != speeds.scaled({SMALL: 1e-4}, middle)


def test_plan_has_times_before_the_first_run():
    built = check_values(presets.values(Path("presets/default.yaml")))
    config = built["model"].config(4096)
    measured = speeds.Speeds(1.0, 2, {config: 1e-4})
    nothing = Forecast(None, None, 0, 1_000_000, None)
    step = SimpleNamespace(stage="pretrain")
    training = Training(1_000_000, 2048, 1.0, config.parameter_count())
    assert before_first_run(nothing, step, built, training, measured).seconds == pytest.approx(105)
    assert before_first_run(nothing, step, built, training, None).seconds is None
    past = Forecast(None, 0.1, 1, 1_000_000, None)
    assert before_first_run(past, step, built, training, measured).seconds is None  # it has runs of its own
    sft = before_first_run(Forecast(None, None, 0, None, None), SimpleNamespace(stage="sft"), built, training, measured)
    assert 250 < sft.seconds < 600
    hub = check_values(presets.values(Path("presets/plasma-1.0.yaml")))
    for stage, known in (("download", False), ("eval", True)):
        found = before_first_run(nothing, SimpleNamespace(stage=stage), hub, None, measured)
        assert (found.seconds is not None) is known
    assert found.seconds > 400  # of 5 million tokens' work; the default's is half a minute


def test_steps_that_are_timed_again_give_the_same_recipe(monkeypatch, tmp_path):
    """Other programs make some steps slower, and a shape's place on the ladder turns at a few per cent."""
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    now = [0.0]
    pretrain = check_values(presets.values(Path("presets/default.yaml")))["pretrain"]
    for seconds, expected in ((0.1, 0.1), (0.107, 0.1), (0.13, 0.13)):
        measured, times = Measured(machine(), pretrain), itertools.cycle((seconds, 0.25, 0.25))
        with monkeypatch.context() as patched:
            steps = contextlib.nullcontext(lambda times=times: now.append(now[-1] + next(times)))
            patched.setattr(speed, "_stepper", lambda *_, steps=steps: steps)
            patched.setattr(speed.time, "perf_counter", lambda: now[-1])
            assert measured.measure(SMALL, 2048) == pytest.approx(expected / 2048)
        measured.keep()


def test_memory_is_known_where_the_device_chooses_the_precision():
    """`athanor recipe --from plasma-1.0` on the machine at hand."""
    pretrain = check_values(presets.values(Path("presets/default.yaml")))["pretrain"]
    parts = [
        Measured(machine(), dataclasses.replace(pretrain, precision=precision)).footprint(SMALL, 2048)
        for precision in ("auto", "fp32")
    ]
    assert parts[0] == parts[1]

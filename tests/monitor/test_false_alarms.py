"""A healthy run is left in peace: synthetic ones of many lengths and noises, and four real ones. About 6 s."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from athanor.monitor.monitor import Monitor, Reader
from athanor.monitor.rule import Plan
from athanor.monitor.thresholds import Thresholds
from tests.monitor.curves import change, findings, healthy, schedule, trouble

REAL = Path(__file__).parent / "real"
LENGTHS = (30, 48, 120, 490, 2000)
NOISE = (("gaussian", 0.01), ("student", 0.01), ("gaussian", 0.03), ("student", 0.03))


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize(("tail", "noise"), NOISE)
def test_healthy_synthetic_runs_have_no_finding(steps, tail, noise):
    for phase in ("pretrain", "sft"):
        rows = healthy(steps, seed=steps + len(phase), phase=phase, tail=tail, noise=noise)
        assert trouble(findings(rows, steps, phase)) == []
        # An interruption that restored everything is no event either.
        assert trouble(findings(rows, steps, phase, resumes=(steps // 3, steps // 2))) == []


@pytest.mark.parametrize("name", ["pretrain", "sft"])
def test_real_micro_runs_have_no_finding(name):
    """Journals of presets/micro.yaml as a stage wrote them on two cores: 48 and 73 steps."""
    reader = Reader(name, Thresholds())
    for line in (REAL / f"micro_{name}.jsonl").read_text().splitlines():
        reader.line(json.loads(line))
    assert reader.plan is not None and reader.last_step > 40
    assert reader.findings == []


@pytest.mark.parametrize("phase", ["pretrain", "sft"])
def test_hard_batch_in_a_real_run_is_no_loss_spike(phase):
    """Losses and gradient norms of the default preset. In fine-tuning one batch has 2.7 times the median loss."""
    curve = np.load(REAL / f"default_{phase}.npy")
    pairs = enumerate(curve.astype(float).tolist(), 1)
    rows = [{"step": step, "loss": loss, "grad_norm": norm} for step, (loss, norm) in pairs]
    assert trouble(findings(rows, len(rows), phase)) == []
    if phase == "pretrain":  # and the rule is awake
        spike = change(rows, "loss", lambda step, value: 1.5 * value, 300, 302)
        assert [each.rule for each in trouble(findings(spike, len(rows), phase))] == ["loss_spike"]


def test_a_real_fine_tuning_has_no_spike_and_a_planted_one_is_found():
    """Losses of the default preset, of each source; its total jumps from 0.4 to 3 and more again and again."""
    columns = np.load(REAL / "default_sft_sources.npz")
    names, table = columns.files, np.stack([columns[name] for name in columns.files], axis=1).astype(float).tolist()
    rows = [
        {"step": step} | {name: value for name, value in zip(names, values, strict=True) if value == value}
        for step, values in enumerate(table, 1)
    ]
    assert trouble(findings(rows, len(rows), "sft")) == []
    for at in (800, 1200, 1900):
        spike = rows
        for name in names[:-1]:  # the gradient norm comes last
            spike = change(spike, name, lambda step, value: 3.0 * value, at, at + 11)
        found = trouble(findings(spike, len(rows), "sft"))
        assert {each.rule for each in found} == {"loss_spike"} and at <= found[0].step <= at + 11


def test_short_history_is_silence():
    """What a long run would call broken says nothing after a few steps."""
    rows = [{"step": step, "loss": 8.3 if step < 10 else 30.0, "grad_norm": 1.0} for step in range(1, 20)]
    assert findings(rows, 1000) == []


def test_missing_inputs_let_rules_sleep():
    assert Monitor(Plan("pretrain")).feed({"step": 1}) == []
    assert Monitor(Plan("pretrain", rate=schedule(100).lr_at)).feed({"step": 1, "surprise": 1.0}) == []
    for name in healthy(30)[0]:
        rows = [{key: value for key, value in row.items() if key in ("step", name)} for row in healthy(200)]
        assert trouble(findings(rows, 200)) == [], name


def test_a_row_costs_little():
    """The aim is 100 microseconds; ten times that is allowed for a slow or busy machine, once in three tries."""
    rows = healthy(1000)
    costs = []
    for _ in range(3):
        started = time.process_time()
        findings(rows, 1000)
        costs.append((time.process_time() - started) / len(rows))
    assert min(costs) < 1e-3

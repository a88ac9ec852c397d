"""`athanor health`: which run it takes, what it prints, its exit status. About 3 s."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from athanor.base.artifacts import write_json
from athanor.base.errors import InputError
from athanor.cli import health
from athanor.monitor.monitor import RULES
from athanor.monitor.thresholds import Thresholds
from athanor.runtime.journal import Journal
from tests.monitor.curves import change, healthy, plan
from tests.runtime.view import ROOT, meta

STEPS = 300


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Two runs of pretrain, the later one with a spike that stays, one of sft, one of clean."""
    root = tmp_path_factory.mktemp("checkout")
    good = healthy(STEPS, seed=31)
    bad = change(good, "loss", lambda step, value: 2.5 * value, 150)
    tuned = change(healthy(STEPS, seed=32, phase="sft"), "grad_norm", lambda step, value: 15 * value, 200, 200)
    runs = [("pretrain-1", good, 1), ("pretrain-2", bad, 2), ("sft-1", tuned, 3), ("clean-1", [], 4)]
    for name, curve, started in runs:
        stage = name.split("-")[0]
        folder = root / ".athanor" / "runs" / name
        write_json(folder / "meta.json", meta(name, stage, started_ms=started))
        journal = Journal(folder)
        if curve:
            journal.event("training", **plan(stage, STEPS))
        for row in curve:
            journal.scalars(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
        journal.close("FINISHED", seconds=1.0)
    return root


def athanor(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "DVC_ROOT"}
    command = [sys.executable, "-m", "athanor", "health", *words]
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)


def test_exit_status_and_text(checkout):
    done = athanor(checkout, "pretrain")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "pretrain-2: FINISHED, 300 steps, in trouble"
    assert lines[2] == "  step 150  CRITICAL  loss_spike"
    assert "Try: " in done.stdout and done.stdout.index("loss_spike") < done.stdout.index("spike_recovery")
    done = athanor(checkout, "pretrain-1")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "pretrain-1: FINISHED, 300 steps, healthy")
    done = athanor(checkout, "sft", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["status"] == "warning" and told["state"] == "FINISHED"
    assert [(each["rule"], each["step"]) for each in told["findings"]] == [("gradient_spike", 200)]
    for word in ("clean", "nothing", "pretrain-"):
        done = athanor(checkout, word)
        assert done.returncode == 2 and "Fix: " in done.stderr, done


def test_latest_training_is_the_default_and_a_folder_is_taken_as_it_is(checkout, tmp_path):
    assert health.choose(checkout, "").name == "sft-1"
    assert health.choose(checkout, "pretrain").name == "pretrain-2"
    folder = checkout / ".athanor" / "runs" / "pretrain-1"
    assert health.choose(tmp_path, str(folder)) == folder
    with pytest.raises(InputError, match="2 runs begin with 'pre'.*pretrain-1, pretrain-2"):
        health.choose(checkout, "pre")
    with pytest.raises(InputError, match="no training ran here"):
        health.choose(tmp_path, "")


def test_running_run_with_a_torn_line(checkout):
    folder = checkout / ".athanor" / "runs" / "pretrain-3"
    write_json(folder / "meta.json", meta("pretrain-3", "pretrain", started_ms=0))
    journal = Journal(folder)
    journal.scalars(1, {"loss": 8.3})
    journal._file.write('{"t": 1, "s": 2, "m": {"lo')
    journal._file.flush()
    reader = health.read(folder, Thresholds())
    assert reader.last_step == 1 and "RUNNING, 1 steps, healthy so far" in health.text(folder, reader)
    assert "tells no plan" in health.text(folder, reader)
    journal._file.close()
    assert "DIED, 1 steps" in health.text(folder, reader)


def test_documentation_names_every_rule_and_threshold():
    text = (ROOT / "docs" / "health.md").read_text()
    named = set(re.findall(r"`(\w+)`", text))
    assert set(RULES) <= named, set(RULES) - named
    settings = {field.name for field in fields(Thresholds)}
    assert settings <= named, settings - named


def test_thresholds_are_all_used():
    """A threshold that no rule reads would be parsed and ignored."""
    code = "".join(path.read_text() for path in (ROOT / "athanor" / "monitor").glob("*_rules.py"))
    for field in fields(Thresholds):
        line = re.sub("_(warning|critical)$", "", field.name)
        uses = [f"limits.{field.name}", f'"{field.name}"', f'level("{line}"', f'line = "{line}"', f'"{line}", ']
        if field.name != "off":
            assert any(use in code for use in uses), field.name


def test_monitor_imports_quickly_and_without_torch():
    code = "import sys, athanor.monitor.monitor; print(sorted({'torch', 'numpy', 'mlflow'} & set(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done

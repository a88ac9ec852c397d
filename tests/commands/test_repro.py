"""Ctrl-C on `make repro`: everything gets the signal, and the stage must have the time to save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGE = '''
import time
from athanor.errors import Interrupted
from athanor.pipeline.process import stage_main
from athanor.pipeline.run import Run

def run(run: Run) -> None:
    with run.slot({"lr": 1}, {}) as slot:
        (slot.path / "started").touch()
        while not run.stop_requested():
            time.sleep(0.05)
        time.sleep(1.5)  # saving takes a while
        (slot.path / "saved").touch()
        raise Interrupted("stopped, checkpoint saved")

if __name__ == "__main__":
    stage_main("toy", run)
'''


def test_an_interrupt_of_the_whole_group_lets_the_stage_save(tmp_path):
    """The wrapper once died of the signal before dvc and the stage; in a container that killed both in mid-save."""
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "__init__.py").touch()
    (tmp_path / "stages" / "toy.py").write_text(STAGE)
    (tmp_path / "params.yaml").write_text((ROOT / "presets" / "micro.yaml").read_text())
    (tmp_path / "dvc.yaml").write_text(
        "stages:\n  toy:\n    cmd: python -m stages.toy\n    deps: [stages/toy.py]\n    outs: [o]\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "MLFLOW_", "ATHANOR_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**clean, "PYTHONPATH": str(ROOT), "PATH": path, "ATHANOR_TRACKING": "off"}
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=tmp_path, env=env, check=True)
    child = subprocess.Popen(
        [sys.executable, "-m", "athanor.commands.repro"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".athanor/slots/toy/*/started")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(child.pid, signal.SIGINT)
    output, _ = child.communicate(timeout=90)
    assert child.returncode not in (0, -signal.SIGINT) and "Traceback" not in output, output
    assert list(tmp_path.glob(".athanor/slots/toy/*/saved")) and "stopped, checkpoint saved" in output
    end = json.loads(next(tmp_path.glob(".athanor/runs/*/end.json")).read_text())
    assert end["status"] == "KILLED" and "did not finish" in output


def test_a_slip_in_params_is_told_before_dvc_deletes_anything(tmp_path):
    """DVC removes a stage's outputs and only then starts it, so the stage's own check came too late for them."""
    text = (ROOT / "presets" / "micro.yaml").read_text()
    (tmp_path / "params.yaml").write_text(text.replace("\npretrain:\n", "\npretrain:\n  learning_rat: 1\n"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ATHANOR_TRACKING": "off"}
    done = subprocess.run(
        [sys.executable, "-m", "athanor", "repro"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "pretrain.learning_rat: unknown key" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["params.yaml"]

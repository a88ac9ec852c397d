"""A training that the page starts: a process of its own, one at a time, whose end is reported."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from athanor.serving.feedback import Feedback
from athanor.serving.retraining import BACK, LOCK, LOG, ROWS, Retraining, Running
from tests.serving.judging import asked, judge
from tests.serving.live import ROOT


@pytest.fixture
def retraining(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    retraining = Retraining(tmp_path, tmp_path / "feedback.jsonl")
    retraining.folder.mkdir(parents=True)
    return retraining


def hold(retraining: Retraining):
    """Its lock, once no process has it; leave the context to let it go."""
    lock = (retraining.folder / LOCK).open("ab")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


KEPT, RIGHT, BUSY = BACK.format("before"), "talks, your own questions: 8 of 8", "ERROR: 'x' is busy, blocked by PID 7"
STORE = "store: down. Fix: x. Training continues without it"
LONG = "\n".join([KEPT, *["x" * 100] * 500, f"  {RIGHT}", "Data  data/report.html\n"])


@pytest.mark.parametrize(
    ("log", "state", "text"),
    [
        (f"{LONG}ended with 0", "done", f"{RIGHT}\n{KEPT}"),
        (f"{LONG}ended with 75", "stopped", KEPT),
        ("\n".join([STORE, BUSY, *"0123456", "ended with 1"]), "failed", BUSY),
        ("killed", "failed", "killed"),
    ],
)
def test_its_end_is_told_with_the_line_that_says_why(retraining, log, state, text):
    Path(ROWS).parent.mkdir()
    Path(ROWS).write_text("1\n2\n3\n")
    (retraining.folder / LOG).write_text(log)
    assert retraining.state() == {"state": state, "text": text, "taught": 3}
    Path("dvc.lock").touch()  # by another command: `dvc exp apply` has brought back the model before
    os.utime(retraining.folder / LOG, (1, 1))
    assert retraining.state() == {"state": "none", "text": "", "taught": 3}


def test_one_runs_at_a_time_and_none_while_the_pipeline_runs(retraining):
    """It wrote params.yaml and ran stages below a first `make repro`, whose export then named corrections it never saw."""
    with hold(retraining):
        with pytest.raises(Running, match="under way here: athanor repro"):
            retraining.start()
        found = b"INFO at step 3, throughput: It fell. Try: nothing\n"
        (retraining.folder / LOG).write_bytes(b"one\n\x1b[1mtwo\x1b[0m 10 %\r\x1b[2Ktwo 20 %\r" + found)
        assert retraining.state() == {"state": "running", "text": "two 20 %", "taught": 0}
    lock = retraining.root / ".dvc/tmp/rwlock"
    lock.parent.mkdir(parents=True)
    lock.write_text(json.dumps({"write": {"data/raw": {"pid": os.getpid(), "cmd": "dvc repro"}}}))
    with pytest.raises(Running, match=r"under way here: dvc repro \(PID"):
        retraining.start()


def test_what_is_accepted_is_written_where_training_reads_it(retraining):
    """`athanor repro` then fails for want of a pipeline; what it does in one is tests/e2e's."""
    assert retraining.state()["state"] == "none"
    shutil.copy(ROOT / "presets/default.yaml", "params.yaml")
    feedback = Feedback(retraining.feedback)
    feedback.settle(judge(feedback, asked("What is 3 + 4?", "8"), "down", "7"), "accepted")
    assert retraining.start()["state"] == "running"
    with hold(retraining):
        log = (retraining.folder / LOG).read_text()
    assert "written to params.yaml" in log and retraining.state()["state"] == "failed"
    assert '"7"' in Path(ROWS).read_text() and ROWS in Path("params.yaml").read_text()

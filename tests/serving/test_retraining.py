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
    return Retraining(tmp_path, tmp_path / "feedback.jsonl")


def ended(retraining: Retraining) -> dict:
    """Its state once its process has let the lock go."""
    with (retraining.folder / LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    return retraining.state()


def test_it_ends_with_the_line_that_says_why_and_one_runs_at_a_time(retraining):
    assert retraining.state() == {"state": "none", "text": "", "taught": 0}
    assert retraining.start()["state"] == "running"
    assert ended(retraining)["state"] == "failed" and "there is no feedback yet" in retraining.state()["text"]
    with (retraining.folder / LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Running, match="under way here: athanor repro"):
            retraining.start()
        found = b"INFO at step 3, throughput: It fell. Try: nothing\n"
        (retraining.folder / LOG).write_bytes(b"one\n\x1b[1mtwo\x1b[0m 10 %\r\x1b[2Ktwo 20 %\r" + found)
        assert retraining.state() == {"state": "running", "text": "two 20 %", "taught": 0}
    assert retraining.state()["state"] == "failed"  # killed, it wrote no end
    (retraining.root / "corpus").mkdir()
    (retraining.root / ROWS).write_text("1\n2\n3\n")
    kept, right = BACK.format("before"), "talks, your own questions: 8 of 8"
    long = "\n".join(["x" * 100] * 500)
    for status, state, text in (("0", "done", f"{right}\n{kept}"), ("75", "stopped", kept)):
        (retraining.folder / LOG).write_text(
            f"{kept}\n{long}\n  {right}\nData  data/report.html\nended with {status}\n"
        )
        assert retraining.state() == {"state": state, "text": text, "taught": 3}
    (retraining.root / "dvc.lock").touch()  # by another command: `dvc exp apply` has brought back the model before
    os.utime(retraining.folder / LOG, (1, 1))
    assert retraining.state() == {"state": "none", "text": "", "taught": 3}
    log = ["store: down. Fix: x. Training continues without it", "ERROR: 'x' is busy, blocked by PID 7", *"0123456"]
    (retraining.folder / LOG).write_text("\n".join([*log, "ended with 1"]))
    assert retraining.state()["text"] == "ERROR: 'x' is busy, blocked by PID 7"


def test_none_starts_while_the_pipeline_runs(retraining):
    """It wrote params.yaml and ran stages below a first `make repro`, whose export then named corrections it never saw."""
    lock = retraining.root / ".dvc/tmp/rwlock"
    lock.parent.mkdir(parents=True)
    lock.write_text(json.dumps({"write": {"data/raw": {"pid": os.getpid(), "cmd": "dvc repro"}}}))
    with pytest.raises(Running, match=r"under way here: dvc repro \(PID"):
        retraining.start()
    assert retraining.state()["state"] == "none"


def test_what_is_accepted_is_written_where_training_reads_it(retraining, monkeypatch):
    """`athanor repro` then fails for want of a pipeline; what it does in one is tests/e2e's."""
    monkeypatch.chdir(retraining.root)
    shutil.copy(ROOT / "presets/default.yaml", "params.yaml")
    feedback = Feedback(retraining.feedback)
    feedback.settle(judge(feedback, asked("What is 3 + 4?", "8"), "down", "7"), "accepted")
    retraining.start()
    assert ended(retraining)["state"] == "failed"
    assert '"7"' in Path(ROWS).read_text() and ROWS in Path("params.yaml").read_text()
    assert "written to params.yaml" in (retraining.folder / LOG).read_text()

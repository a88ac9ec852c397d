"""A training that the page starts: a process of its own, one at a time, with an end that is told."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from athanor.base.artifacts import write_json
from athanor.serving.page_api import page_router
from athanor.serving.requests import Limit
from athanor.serving.retraining import END, LOCK, LOG, Retraining, Running
from athanor.serving.store import Store
from tests.serving.live import ROOT
from tests.serving.test_page_api import Scripted

STATS = {"tokens": 3, "seconds": 0.1, "reason": "stop", "prompt_tokens": 5, "forgotten": 0}


@pytest.fixture
def retraining(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Retraining(tmp_path, tmp_path / "chat.sqlite3")


def ended(retraining: Retraining) -> dict:
    """Its state once its process has let the lock go."""
    with (retraining.folder / LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    return retraining.state()


def test_it_ends_with_the_line_that_says_why_and_one_runs_at_a_time(retraining):
    client = TestClient(FastAPI())
    client.app.include_router(page_router(Store(retraining.root / "c"), Scripted(), Limit(9), retraining=retraining))
    told = lambda: client.get("/api/state").json()["retraining"]  # noqa: E731
    assert told() == {"state": "none", "text": ""}
    assert client.post("/api/retraining", content=b"{}").status_code == 415 and told()["state"] == "none"
    assert client.post("/api/retraining", json={}).json()["state"] == "running"
    assert ended(retraining)["state"] == "failed" and "there are no chats yet" in told()["text"]
    with (retraining.folder / LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = client.post("/api/retraining", json={})
        assert answer.status_code == 409 and "under way" in answer.json()["error"]["message"]
        (retraining.folder / LOG).write_bytes(b"one\n\x1b[1mtwo\x1b[0m 10 %\r\x1b[2Ktwo 20 %\r")
        assert told() == {"state": "running", "text": "two 20 %"}
    assert told()["state"] == "failed"  # killed, it wrote no end
    write_json(retraining.folder / END, {"status": 0, "taught": 3})
    (retraining.folder / LOG).write_bytes(b"  talks, your own questions: 8 of 8\nData  data/report.html\n")
    assert told() == {"state": "done", "text": "talks, your own questions: 8 of 8", "taught": 3}
    write_json(retraining.folder / END, {"status": 1})
    log = ["store: down. Fix: x. Training continues without it", "ERROR: 'x' is busy, blocked by PID 7", *"0123456"]
    (retraining.folder / LOG).write_text("\n".join(log))
    assert told()["text"] == "ERROR: 'x' is busy, blocked by PID 7"


def test_none_starts_while_the_pipeline_runs(retraining):
    """It wrote params.yaml and ran stages below a first `make repro`, whose export then named corrections it never saw."""
    lock = retraining.root / ".dvc/tmp/rwlock"
    lock.parent.mkdir(parents=True)
    lock.write_text(json.dumps({"write": {"data/raw": {"pid": os.getpid(), "cmd": "dvc repro"}}}))
    with pytest.raises(Running, match=r"the pipeline runs in this checkout: dvc repro \(PID"):
        retraining.start()
    lock.unlink()
    run = retraining.root / ".athanor/runs/sft-1"
    write_json(run / "meta.json", {"pid": os.getpid(), "stage": "sft"})
    with (run / "journal.jsonl").open("wb") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(Running, match="the pipeline runs in this checkout: sft"):
            retraining.start()
    assert retraining.state()["state"] == "none"


def test_a_server_that_others_reach_starts_none(tmp_path):
    client = TestClient(FastAPI())
    client.app.include_router(page_router(Store(tmp_path / "c"), Scripted(), Limit(9)))
    assert client.get("/api/state").json()["retraining"] is None
    assert client.post("/api/retraining", json={}).status_code == 403


@pytest.mark.parametrize(
    "header", [{"Origin": "https://public.example"}, {"X-Forwarded-For": "10.0.0.7"}, {"Via": "1.1 p"}]
)
def test_a_request_that_comes_from_elsewhere_starts_none(retraining, tmp_path, header):
    client = TestClient(FastAPI())
    client.app.include_router(page_router(Store(tmp_path / "c"), Scripted(), Limit(9), retraining=retraining))
    assert client.post("/api/retraining", json={}, headers=header).status_code == 403
    assert retraining.state()["state"] == "none"


def test_what_is_accepted_is_written_where_training_reads_it(retraining, monkeypatch):
    """`athanor repro` then fails for want of a pipeline; what it does in one is tests/e2e's."""
    monkeypatch.chdir(retraining.root)
    shutil.copy(ROOT / "presets/default.yaml", "params.yaml")
    store = Store(retraining.store)
    made = store.answer(store.create()["id"], (None, "What is 3 + 4?"), "8", model="m", stats=STATS)[1]["id"]
    store.feedback(made, "down", "7")
    store.settle(made, "accepted")
    store.close()
    retraining.start()
    assert ended(retraining)["state"] == "failed"
    (row,) = map(json.loads, Path("corpus/corrections.jsonl").read_text().splitlines())
    assert row["messages"][-1]["content"] == "7"
    assert "corpus/corrections.jsonl" in Path("params.yaml").read_text()
    assert json.loads((retraining.folder / END).read_text())["taught"] == 1
    assert "written to params.yaml" in (retraining.folder / LOG).read_text()

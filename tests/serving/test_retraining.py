"""A training that the page starts: a process of its own, one at a time, whose end is reported.

The result that it replaces is kept as a DVC experiment, to compare with and to return to.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from athanor.catalog.keeping import BACK, ROWS, keep
from athanor.runtime.locks import lock
from athanor.serving.retraining import LOCK, LOG, Retraining, Running
from tests.e2e.clone import ROOT, Clone, commit


@pytest.fixture
def retraining(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    retraining = Retraining(tmp_path, tmp_path / "feedback.jsonl")
    retraining.folder.mkdir(parents=True)
    return retraining


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
def test_its_end_is_reported_with_the_line_that_says_why(retraining, log, state, text):
    (retraining.folder / LOG).write_text(log)
    assert retraining.state() == {"state": state, "text": text, "taught": 0}
    Path("dvc.lock").touch()  # by another command: `dvc exp apply` has brought back the model before
    os.utime(retraining.folder / LOG, (1, 1))
    assert retraining.state() == {"state": "none", "text": "", "taught": 0}


def test_one_runs_at_a_time_and_none_while_the_pipeline_runs(retraining):
    """It wrote params.yaml and ran stages below a first `make repro`, whose export then named corrections it never saw."""
    with os.fdopen(lock(retraining.folder / LOCK, print)):
        with pytest.raises(Running, match="under way here: athanor repro"):
            retraining.start()
        found = b"INFO at step 3, throughput: It fell. Try: nothing\n"
        (retraining.folder / LOG).write_bytes(b"one\n\x1b[1mtwo\x1b[0m 10 %\r\x1b[2Ktwo 20 %\r" + found)
        assert retraining.state() == {"state": "running", "text": "two 20 %", "taught": 0}
    pipeline = Path(".dvc/tmp/rwlock")
    pipeline.parent.mkdir(parents=True)
    pipeline.write_text(json.dumps({"write": {"data/raw": {"pid": os.getpid(), "cmd": "dvc repro"}}}))
    with pytest.raises(Running, match=r"under way here: dvc repro \(PID"):
        retraining.start()


# -- the result before -----------------------------------------------------------------

GRAPH = """
stages:
  sft:
    cmd: mkdir -p models/sft && cat params.yaml corpus/*.jsonl > models/sft/weights
    deps: [corpus]
    params: [instruct, sft_data]
    outs: [models/sft]
  export:
    cmd: mkdir -p models/export && cp models/sft/weights models/export/weights
    deps: [models/sft]
    outs: [models/export]
  eval:
    cmd: >-
      mkdir -p metrics/runs && echo '{"run": "eval-1", "code": "c"}' > metrics/runs/eval.json &&
      echo '{"n": '$(wc -l < models/sft/weights)'}' > metrics/eval.json
    deps: [models/sft]
    outs: [metrics/eval.json, metrics/runs/eval.json]
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Clone:
    """With a result, of which HEAD has nothing."""
    monkeypatch.chdir(tmp_path)
    clone = Clone(tmp_path)
    for name, text in {
        "dvc.yaml": GRAPH,
        "params.yaml": (ROOT / "presets/default.yaml").read_text(),
        "corpus/own.jsonl": "{}\n",
        ".gitignore": "/models\n/metrics\n/.athanor\n",
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    clone.run("git", "init", "-q")
    for name in ("user.name", "user.email"):  # `dvc exp apply` wants both
        clone.run("git", "config", name, "t@localhost")
    clone.dvc("init", "-q")
    assert keep(tmp_path) == "no result is kept: there is no commit yet"
    commit(clone, "start")
    assert "dvc.lock has no finished one" in keep(tmp_path)
    clone.dvc("repro", "-q")
    return clone


def result() -> list[bytes]:
    return [Path(name).read_bytes() for name in ("params.yaml", "models/export/weights", ROWS)]


def test_the_result_before_is_compared_with_and_returned_to(checkout):
    Path(ROWS).touch()
    before = result()
    status = ("git", "status", "--porcelain")
    now, kept = checkout.run(*status).stdout, keep(checkout.path)
    assert "is the experiment before-corrections (to compare: athanor compare before-corrections" in kept
    # It is kept once, it is not recorded as made from the rows of now, and nothing else changed.
    assert (keep(checkout.path), checkout.run(*status).stdout) == (kept, now)
    assert "sft:" in checkout.dvc("status").stdout
    Path(ROWS).write_text("{}\n")
    with Path("params.yaml").open("a") as params:
        params.write("# other\n")
    checkout.dvc("repro", "-q")
    after = result()
    compare = (sys.executable, "-P", "-m", "athanor", "compare", "before-corrections")
    assert "Inputs    corpus: other content" in checkout.run(*compare, PYTHONPATH=str(ROOT)).stdout
    assert "before-corrections-2 (" in keep(checkout.path)
    for name, then in (("before-corrections", before), ("before-corrections-2", after)):
        checkout.dvc("exp", "apply", name)
        assert result() == then and f"the experiment {name} (" in keep(checkout.path)

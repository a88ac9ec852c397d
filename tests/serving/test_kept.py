"""The result that a training on corrections replaces: a DVC experiment, to compare with and to return to."""

from __future__ import annotations

import sys

import pytest

from athanor.base import strict
from athanor.serving.feedback import FILE, Feedback
from athanor.serving.retraining import keep
from tests.e2e.clone import ROOT, Clone, commit
from tests.serving.judging import asked, judge

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
ROWS = "corpus/corrections.jsonl"


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
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    clone.run("git", "init", "-q")
    clone.dvc("init", "-q")
    commit(clone, "start")
    assert "dvc.lock has no finished one" in keep(tmp_path)
    clone.dvc("repro", "-q")
    return clone


def athanor(clone: Clone, *words: str, check: bool = True) -> str:
    done = clone.run(sys.executable, "-P", "-m", "athanor", *words, check=check, PYTHONPATH=str(ROOT))
    return done.stdout + done.stderr


def test_the_result_before_is_compared_with_and_returned_to(checkout):
    feedback = Feedback(checkout.path / FILE)
    number = judge(feedback, asked("What is 3 + 4?", "8"), "down", "7")
    feedback.settle(number, "accepted")
    params, weights = checkout.path / "params.yaml", checkout.path / "models/export/weights"
    before, staged = (
        (strict.read_yaml(params), weights.read_bytes()),
        checkout.run("git", "status", "--porcelain").stdout,
    )
    for word in ("written to params.yaml", "reads the file already"):
        said = athanor(checkout, "chat", "export", ROWS, "--write")
        assert word in said and "is the experiment before-corrections (to compare: athanor compare before-c" in said
    # Nothing is recorded as run with the new parameters, and nothing else changed.
    assert "sft:" in checkout.dvc("status").stdout
    changed = sorted({*staged.splitlines(), "?? " + ROWS, " M params.yaml"})
    assert sorted(checkout.run("git", "status", "--porcelain").stdout.splitlines()) == changed
    checkout.dvc("repro", "-q")
    assert weights.read_bytes() != before[1]
    assert "Fix: to compare with an experiment of it: athanor compare before-corrections" in athanor(
        checkout, "compare", check=False
    )
    said = athanor(checkout, "compare", "before-corrections")
    assert "Inputs    corpus: other content" in said and "before-corrections" in checkout.dvc("exp", "list").stdout

    # The last one is taken back, and what trains on it goes, too.
    feedback.settle(number, "rejected")
    said = athanor(checkout, "chat", "export", ROWS, "--write")
    assert "no correction is left to train on" in said and "experiment before-corrections-2 (" in said
    assert strict.read_yaml(params) == before[0] and not (checkout.path / ROWS).exists()
    assert "nothing was written" in athanor(checkout, "chat", "export", ROWS, "--write", check=False)
    checkout.dvc("repro", "-q")
    assert weights.read_bytes() == before[1]

    for name, same in (("before-corrections-2", False), ("before-corrections", True)):
        checkout.dvc("exp", "apply", name)
        assert (weights.read_bytes() == before[1], strict.read_yaml(params) == before[0]) == (same, same)
        assert (checkout.path / ROWS).exists() or same
        assert keep(checkout.path).startswith(f"the result before is the experiment {name} (")


def test_without_a_commit_nothing_is_kept(checkout):
    checkout.run("git", "update-ref", "-d", "HEAD")
    assert keep(checkout.path) == "no result is kept: there is no commit yet"

"""The result that a training on corrections replaces: a DVC experiment, to compare with and to return to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from athanor.serving.retraining import ROWS, keep
from tests.e2e.clone import ROOT, Clone, commit

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
    clone.dvc("init", "-q")
    assert keep(tmp_path) == "no result is kept: there is no commit yet"
    commit(clone, "start")
    assert "dvc.lock has no finished one" in keep(tmp_path)
    clone.dvc("repro", "-q")
    return clone


def compare(clone: Clone, *names: str) -> str:
    command = (sys.executable, "-P", "-m", "athanor", "compare", *names)
    done = clone.run(*command, check=False, PYTHONPATH=str(ROOT))
    return done.stdout + done.stderr


def status(clone: Clone) -> str:
    return clone.run("git", "status", "--porcelain").stdout


def result() -> list[bytes]:
    return [Path(name).read_bytes() for name in ("params.yaml", "models/export/weights", ROWS)]


def test_the_result_before_is_compared_with_and_returned_to(checkout):
    Path(ROWS).touch()
    before = result()
    now, kept = status(checkout), keep(checkout.path)
    assert "is the experiment before-corrections (to compare: athanor compare before-corrections" in kept
    # It is kept once, it is not recorded as made from the rows of now, and nothing else changed.
    assert (keep(checkout.path), status(checkout)) == (kept, now) and "sft:" in checkout.dvc("status").stdout
    Path(ROWS).write_text("{}\n")
    with Path("params.yaml").open("a") as params:
        params.write("# other\n")
    checkout.dvc("repro", "-q")
    after = result()
    assert "experiment of it: athanor compare before-corrections" in compare(checkout)
    assert "Inputs    corpus: other content" in compare(checkout, "before-corrections")
    assert "before-corrections-2 (" in keep(checkout.path)
    for name, then in (("before-corrections", before), ("before-corrections-2", after)):
        checkout.dvc("exp", "apply", name)
        assert result() == then and f"the experiment {name} (" in keep(checkout.path)

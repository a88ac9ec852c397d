"""`athanor rl` beside a built micro pipeline: what it makes, what it runs again, and that the main graph stays as it is."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from athanor.base.artifacts import read_json
from athanor.catalog.discover import discover
from athanor.model.weights import load_model
from tests.e2e.clone import Clone

PAIRS = """
  sources:
  - {type: pairs, name: chat, files: corpus/pairs.jsonl}
"""


@pytest.fixture(scope="module")
def clone(micro, tmp_path_factory) -> Clone:
    """A copy, so that other tests find the build as they left it."""
    path = tmp_path_factory.mktemp("rl") / "clone"
    shutil.copytree(micro.path, path, symlinks=True)
    return Clone(path)


def rl(clone: Clone, *words: str, check: bool = True):
    return clone.run(sys.executable, "-m", "athanor", "rl", *words, check=check, ATHANOR_TRACKING="off")


def test_grpo_is_trained_measured_exported_and_served(clone):
    done = rl(clone, "grpo")
    assert "before" in done.stdout and "bits per byte" in done.stdout and "models/grpo-export" in done.stdout
    trained = read_json(clone.path / "metrics/grpo.json")
    assert trained["steps"] == 6 and set(trained["validation"]["categories"]) == {
        "comparison", "counting", "word_problems", "worked_addition",
    }  # fmt: skip
    (sft, _), (grpo, _) = (load_model(clone.path / "models" / name) for name in ("sft", "grpo"))
    assert any((a != b).any() for a, b in zip(sft.parameters(), grpo.parameters(), strict=True))
    served = {Path(model.path).parent.name: model.problem for model in discover(clone.path, ())}
    assert served["grpo-export"] == "" and served["export"] == ""
    health = clone.run(sys.executable, "-m", "athanor", "health", "grpo").stdout
    assert "FINISHED" in health
    assert not (clone.path / "rl/dvc.yaml").exists()
    assert "up to date" in clone.dvc("status").stdout  # of the main graph


def test_what_is_there_is_not_made_again_and_a_parameter_runs_what_it_touches(clone):
    assert "Running stage" not in rl(clone, "grpo").stdout
    params = clone.path / "params.yaml"
    text = params.read_text()
    params.write_text(text.replace("kl_coefficient: 0.0", "kl_coefficient: 0.5"))
    done = rl(clone, "grpo").stdout
    assert "rl/dvc.yaml:grpo'" in done and "rl/dvc.yaml:grpo-export'" in done
    assert "Running stage 'rl/dvc.yaml:grpo-data'" not in done and "Running stage 'sft'" not in done
    params.write_text(text)


def test_dpo_says_what_is_missing_then_learns_from_pairs(clone):
    refused = rl(clone, "dpo", check=False)
    assert refused.returncode and "athanor chat pairs corpus/pairs.jsonl" in refused.stderr + refused.stdout
    rows = [{"prompt": f"Name {n}", "chosen": f"It is {n}.", "rejected": f"{n} or not"} for n in range(60)]
    (clone.path / "corpus/pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    params = clone.path / "params.yaml"
    params.write_text(params.read_text().replace("  sources: []", PAIRS.strip("\n"), 1))
    done = rl(clone, "dpo")
    assert "models/dpo-export" in done.stdout
    trained = read_json(clone.path / "metrics/dpo.json")
    assert trained["validation"]["pairs"] > 0 and trained["validation"]["loss"] < 0.6931

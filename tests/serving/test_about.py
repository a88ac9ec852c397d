"""What an evaluation says of a model: questions to begin with, and the page's panel about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from athanor.base.artifacts import manifest_digest, write_json, write_manifest
from athanor.catalog.discover import AvailableModel
from athanor.serving.about import about, starters

NOTHING = {"card": "", "topics": [], "commit": "", "health": {}}


def row(category: str, question: str, correct: bool = True, kind: str = "exact", turns: int = 1, **more: str):
    prompt = [{"role": "user", "content": question}] * turns
    return {"category": category, "prompt": prompt, "correct": correct, "kind": kind, "model": "sft", **more}


ROWS = (
    row("birds", "Which bird talks most of all?"),
    row("birds", "Which bird talks?"),
    row("birds", "Says?", turns=2),
    row("fish", "Which fish swims?"),
    row("sums", "What is 3 + 4?", kind="numeric"),
    row("sums", "What is 1 + 1?", correct=False, kind="numeric"),
    row("hard", "What was it?", correct=False),
    row("hard", "What is it?", correct=False),
    row("hard", "What will it be?"),
    row("identity", "Who are you?", kind="format"),
    row("base_only", "Who is asked?", model="base"),
    row("prose", "no sentence"),
    row("texts", "The key", kind="likelihood"),
    row("by_hand", "say goodbye", origin="written"),
)
OWN = [row("talks", text, origin="taught") for text in ("what is a crate", "What is a crate?", "WHAT IS A CRTE?")]


def checkout(root: Path, rows=ROWS) -> Path:
    """A checkout's export folder with athanor.json alone, made with this evaluation."""
    evaluation, export = root / "data/eval", root / "models/export"
    evaluation.mkdir(parents=True)
    (evaluation / "battery.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    write_manifest(evaluation, kind="eval", version=1, counts={})
    (export / "hf").mkdir(parents=True)
    write_json(export / "hf/athanor.json", {"lineage": {"eval": manifest_digest(evaluation)}})
    return export


def test_they_are_answered_questions_of_several_kinds_one_s_own_and_itself_first(tmp_path: Path) -> None:
    export = checkout(tmp_path / "a")
    offered = starters(export / "hf")
    expected = ["Who are you?", "Which bird talks?", "What is 3 + 4?", "Which fish swims?"]
    assert [one["text"] for one in offered] == expected and starters(export / "model-q8_0.gguf") == offered
    own = starters(checkout(tmp_path / "b", [*ROWS, *OWN]) / "hf")
    assert own == [{"title": "Talks", "text": "What is a crate?"}, *(offered[place] for place in (0, 2, 1))]
    assert starters(checkout(tmp_path / "c", [one | {"correct": False} for one in ROWS]) / "hf") == []


@pytest.mark.parametrize("broken", ["other", "gone", "torn", "none"])
def test_nothing_comes_from_an_evaluation_of_other_weights_or_a_broken_one(tmp_path: Path, broken: str) -> None:
    export, evaluation = checkout(tmp_path), tmp_path / "data/eval"
    if broken == "other":
        write_json(export / "hf/athanor.json", {"lineage": {"eval": "0" * 64}})
    elif broken == "gone":
        (evaluation / "battery.jsonl").unlink()
    elif broken == "torn":
        (evaluation / "battery.jsonl").write_text('{"model": "sf')
    path = Path("/") if broken == "none" else export / "hf"
    assert starters(path) == [] == about(tmp_path, model(path))["topics"]


def model(path: Path) -> AvailableModel:
    return AvailableModel("own", "own", str(path), "path", 0.0)


def test_about_an_export_there_is_its_card_its_topics_its_commit_and_the_health_of_its_training(tmp_path: Path) -> None:
    export = checkout(tmp_path)
    (export / "MODEL_CARD.md").write_text("# own")
    runs = {
        "export/meta": {"commit": "abc"},
        "pretrain/files/health": {"status": "ok"},
        "sft/files/health": {"status": "warning"},
    }
    for name, facts in runs.items():
        stage = name.partition("/")[0]
        for path, value in ((f"metrics/runs/{stage}.json", {"run": stage}), (f".athanor/runs/{name}.json", facts)):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            write_json(tmp_path / path, value)
    said = about(tmp_path, model(export / "hf"))
    assert said == about(tmp_path, model(export / "model-q8_0.gguf"))
    assert (said["card"], said["commit"], said["health"]) == ("# own", "abc", {"pretrain": "ok", "sft": "warning"})
    topics = {topic["name"]: (topic["taught"], topic["question"]) for topic in said["topics"]}
    assert topics["sums"] == (True, "What is 3 + 4?") and topics["by_hand"] == (False, "say goodbye")
    assert topics["texts"] == (False, "The key")
    write_json(export / "hf/athanor.json", {"lineage": {"eval": "0" * 64}})
    assert about(tmp_path, model(export / "hf")) == NOTHING | {"card": "# own"}


def test_about_a_foreign_directory_there_is_its_readme_or_nothing(tmp_path: Path) -> None:
    assert about(tmp_path, model(tmp_path)) == NOTHING == about(tmp_path, model(tmp_path / "gone.gguf"))
    (tmp_path / "README.md").write_bytes(b"# A bird\xff")
    assert about(tmp_path, model(tmp_path))["card"] == "# A bird\ufffd"

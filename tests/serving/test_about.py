"""Facts about a model from its evaluation: questions to begin with, and the page's panel."""

from __future__ import annotations

from pathlib import Path

import pytest

from athanor.base.artifacts import write_json
from athanor.catalog.discover import AvailableModel
from athanor.serving.about import about, starters
from tests.serving.judging import BATTERY, write_evaluation

NOTHING = {"card": "", "topics": [], "commit": "", "health": {}}
GENERAL = [line for line in BATTERY if "taught" not in line]  # no question of one's own


def put(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, value)


def export_of(root: Path, answers=GENERAL) -> Path:
    """A checkout's export folder with athanor.json alone, made with this evaluation."""
    export = root / "models/export"
    put(export / "hf/athanor.json", {"lineage": {"eval": write_evaluation(root, answers)}})
    return export


def panel(path: Path) -> dict:
    return about(path, AvailableModel("own", "own", str(path), "path", 0.0))


def test_they_are_answered_questions_of_several_kinds_one_s_own_and_itself_first(tmp_path):
    export = export_of(tmp_path / "a")
    offered = starters(export / "hf")
    assert starters(export / "model-q8_0.gguf") == offered
    texts = [one["text"] for one in offered]
    assert texts == ["Who are you?", "Which bird talks?", "What is 3 + 4?", "Which fish swims?"]
    own = starters(export_of(tmp_path / "b", BATTERY) / "hf")
    assert own == [{"title": "Talks", "text": "What is a crate?"}, *(offered[place] for place in (0, 2, 1))]
    assert starters(export_of(tmp_path / "c", [line.replace("true", "false") for line in BATTERY]) / "hf") == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("models/export/hf/athanor.json", '{"lineage": {"eval": "0"}}'),
        ("data/eval/manifest.json", ""),
        ("data/eval/battery.jsonl", '{"model": "sf'),
    ],
)
def test_nothing_comes_from_an_evaluation_of_other_weights_or_a_broken_one(tmp_path, file, text):
    path = export_of(tmp_path) / "hf"
    (tmp_path / file).write_text(text)
    assert starters(path) == [] == panel(path)["topics"]


def test_about_an_export_there_is_its_card_its_topics_its_commit_and_the_health_of_its_training(tmp_path):
    export = export_of(tmp_path)
    (export / "MODEL_CARD.md").write_text("# own")
    for stage, file, facts in (
        ("export", "meta", {"commit": "abc"}),
        ("pretrain", "files/health", {"status": "ok"}),
        ("sft", "files/health", {"status": "warning"}),
    ):
        put(tmp_path / f"metrics/runs/{stage}.json", {"run": f"{stage}-1"})
        put(tmp_path / f".athanor/runs/{stage}-1/{file}.json", facts)
    said = panel(export / "hf")
    assert said == panel(export / "model-q8_0.gguf")
    assert (said["card"], said["commit"], said["health"]) == ("# own", "abc", {"pretrain": "ok", "sft": "warning"})
    topics = {(topic["name"], topic["taught"], topic["question"]) for topic in said["topics"]}
    assert topics > {("sums", True, "What is 3 + 4?"), ("by_hand", False, "say goodbye"), ("texts", False, "The key")}
    (tmp_path / "data/eval/manifest.json").unlink()
    assert panel(export / "hf") == NOTHING | {"card": "# own"}


def test_about_a_foreign_model_there_is_its_readme_or_nothing(tmp_path):
    assert panel(tmp_path / "gone.gguf") == NOTHING
    (tmp_path / "README.md").write_bytes(b"# A bird\xff")
    assert panel(tmp_path)["card"] == "# A bird\ufffd"

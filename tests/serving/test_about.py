"""What the page can say of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from athanor.base.artifacts import write_json
from athanor.serving.about import about
from athanor.serving.discover import AvailableModel
from tests.serving.test_starters import checkout, row


def model(path: Path) -> AvailableModel:
    return AvailableModel("own", "own", str(path), "export", "path", 0.0)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """With a card, an evaluation, and the runs that made it."""
    rows = [row("sums", "What is 3 + 4?"), row("texts", "The key", kind="likelihood"), row("memory", "And?", turns=2)]
    export = checkout(tmp_path, [*rows, row("by_hand", "Say goodbye.") | {"origin": "written"}])
    (export / "MODEL_CARD.md").write_text("# own")
    for stage, name, facts in (
        ("export", "meta.json", {"commit": "abc"}),
        ("pretrain", "files/health.json", {"status": "ok"}),
        ("sft", "files/health.json", {"status": "warning"}),
    ):
        for path, value in ((f"metrics/runs/{stage}.json", {"run": stage}), (f".athanor/runs/{stage}/{name}", facts)):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            write_json(tmp_path / path, value)
    return export


def test_an_export_has_its_card_its_topics_its_commit_and_the_health_of_its_training(export: Path) -> None:
    told = about(export.parents[1], model(export / "hf"))
    assert told == about(export.parents[1], model(export / "model-q8_0.gguf"))
    assert (told["card"], told["commit"], told["health"]) == ("# own", "abc", {"pretrain": "ok", "sft": "warning"})
    topics = {topic["name"]: (topic["taught"], topic["question"]) for topic in told["topics"]}
    assert topics == {
        "sums": (True, "What is 3 + 4?"),
        "texts": (False, "The key"),
        "memory": (True, ""),
        "by_hand": (False, "Say goodbye."),
    }


def test_what_lies_beside_weights_of_another_run_is_not_theirs(export: Path) -> None:
    write_json(export / "hf/athanor.json", {"lineage": {"eval": "0" * 64}})
    told = about(export.parents[1], model(export / "hf"))
    assert told == {"card": "# own", "topics": [], "commit": "", "health": {}}


def test_of_a_foreign_directory_there_is_its_readme_or_nothing(tmp_path: Path) -> None:
    nothing = {"card": "", "topics": [], "commit": "", "health": {}}
    assert about(tmp_path, model(tmp_path)) == nothing == about(tmp_path, model(tmp_path / "gone.gguf"))
    (tmp_path / "README.md").write_bytes(b"# A bird\xff")
    assert about(tmp_path, model(tmp_path))["card"] == "# A bird\ufffd"

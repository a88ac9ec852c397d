"""Which right answers of a battery are called recall, on a few texts; the table and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from athanor.base.artifacts import manifest_digest, write_manifest, write_text
from athanor.base.errors import InputError
from athanor.cli.cli import call
from athanor.origins.recall import right_answers
from tests.evaluation.tiny import make_model, save, write_tiny_tokenizer
from tests.origins.world import write_data

KETTLE = "A copper kettle sings louder than the whole kitchen on a winter morning."
ANSWERS = {
    KETTLE: "verbatim",
    f" {KETTLE}\n": "verbatim",
    f"{KETTLE} Really!": "pieces",
    f"{KETTLE[:45]}, but only when nobody listens, which seldom happens here nowadays": "own words",
    "Seven purple submarines argued about cheese.": "own words",
    "7": "too short to tell",
    "": "too short to tell",
}


def row(text: str, number: int, **other: object) -> dict[str, object]:
    facts = {
        "category": "tea" if number else "first",
        "item": str(number),
        "text": text,
        "model": "sft",
        "correct": True,
    }
    return {**facts, "log_likelihoods": [], "origin": "generated", **other}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    tokenizer = write_tiny_tokenizer(tmp_path / "models/tokenizer")
    write_data(tmp_path, tokenizer, [f"Well.\n{KETTLE} So."], [("Sure?", "Quite sure, yes.")])
    save(tmp_path / "models/sft", make_model(tokenizer), tokenizer)
    others = ({"model": "base"}, {"correct": False}, {"log_likelihoods": [-1.0, -2.0]}, {"origin": "taught"})
    rows = [row(text, number) for number, text in enumerate(ANSWERS)] + [row(KETTLE, 9, **other) for other in others]
    write_text(tmp_path / "data/eval/battery.jsonl", "".join(json.dumps(each) + "\n" for each in rows))
    parents = {"models/sft": manifest_digest(tmp_path / "models/sft")}
    write_manifest(tmp_path / "data/eval", kind="eval", version=1, counts={}, parents=parents)
    return tmp_path


def test_each_right_answer_that_was_written_has_its_kind_and_the_table_counts_them(root: Path, capsys) -> None:
    assert call("trace", ["--battery", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {answer["text"]: answer["recall"] for answer in told["answers"]} == ANSWERS
    assert told["categories"]["all"] == {"verbatim": 2, "pieces": 1, "own words": 2, "too short to tell": 2}
    assert call("trace", ["--battery"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["first", "1", "1", "100.0%", "–", "–", "–"] and lines[3][:4] == ["all", "7", "2", "28.6%"]
    with pytest.raises(InputError, match="leave the text out"):
        call("trace", ["a text", "--battery"])


def test_answers_that_are_missing_or_of_another_model_are_refused(root: Path) -> None:
    (root / "models/sft/manifest.json").write_text("{}\n")
    with pytest.raises(InputError, match="data/eval: its answers are those of another model"):
        right_answers(root)
    (root / "data/eval/manifest.json").unlink()
    with pytest.raises(InputError, match="data/eval: .*Fix: dvc checkout data/eval"):
        right_answers(root)

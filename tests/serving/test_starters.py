"""The questions that the chat page offers to begin with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from athanor.base.artifacts import manifest_digest, write_json, write_manifest
from athanor.serving.starters import starters


def row(category: str, question: str, correct: bool = True, kind: str = "exact", model: str = "sft", turns: int = 1):
    prompt = [{"role": "user", "content": question}] * turns
    return {"category": category, "prompt": prompt, "correct": correct, "kind": kind, "model": model}


ROWS = (
    row("birds", "Which bird talks most of all?"),
    row("birds", "Which bird talks?"),
    row("birds", "Says?", turns=2),
    row("fish", "Which fish swims?"),
    row("sums", "What is 3 + 4?", kind="numeric"),
    row("sums", "What is 1 + 1?", correct=False, kind="numeric"),
    row("hard", "What is it?", correct=False),
    row("hard", "What was it?", correct=False),
    row("hard", "What will it be?"),
    row("identity", "Who are you?", kind="format"),
    row("base_only", "Who is asked?", model="base"),
    row("prose", "no sentence"),
)


def checkout(root: Path, rows=ROWS) -> Path:
    """A checkout's export folder with athanor.json alone, made with this evaluation."""
    evaluation, export = root / "data/eval", root / "models/export"
    evaluation.mkdir(parents=True)
    (evaluation / "battery.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    write_manifest(evaluation, kind="eval", version=1, counts={})
    (export / "hf").mkdir(parents=True)
    write_json(export / "hf/athanor.json", {"lineage": {"eval": manifest_digest(evaluation)}})
    return export


def test_they_are_answered_questions_of_the_model_of_several_kinds_and_itself_first(tmp_path: Path) -> None:
    export = checkout(tmp_path)
    offered = starters(export / "hf")
    assert [one["text"] for one in offered] == [
        "Who are you?",
        "Which bird talks?",
        "What is 3 + 4?",
        "Which fish swims?",
    ]
    assert offered[0]["title"] == "Identity" and starters(export / "model-q8_0.gguf") == offered


def test_questions_of_one_s_own_conversations_come_first(tmp_path: Path) -> None:
    own = [
        row("talks", text) | {"origin": "taught", "expected": answer}
        for text, answer in (
            *(("What is a crate?", "A"), ("WHAT IS A CRTE?", "A"), ("tell me what a crate is", "A")),
            *(("Union?", "B"), ("What is a union?", "B"), ("what is a union", "B"), ("What is a trait object?", "C")),
        )
    ]
    offered = starters(checkout(tmp_path, [*own, *ROWS]) / "hf")
    assert [one["text"] for one in offered] == [
        "What is a crate?",
        "What is a union?",
        "Who are you?",
        "Which bird talks?",
    ]
    assert [one["title"] for one in offered][:2] == ["Talks", "Talks"]


def test_a_model_that_answers_nothing_offers_nothing(tmp_path: Path) -> None:
    assert starters(checkout(tmp_path, [one | {"correct": False} for one in ROWS]) / "hf") == []


@pytest.mark.parametrize("broken", ["other", "gone", "torn", "none"])
def test_no_question_comes_from_an_evaluation_of_other_weights_or_a_broken_one(tmp_path: Path, broken: str) -> None:
    export, evaluation = checkout(tmp_path), tmp_path / "data/eval"
    if broken == "other":
        write_json(export / "hf/athanor.json", {"lineage": {"eval": "0" * 64}})
    elif broken == "gone":
        (evaluation / "battery.jsonl").unlink()
    elif broken == "torn":
        (evaluation / "battery.jsonl").write_text('{"model": "sf')
    assert starters(Path("/") if broken == "none" else export / "hf") == []

"""Feedback as the page sends it, with the conversation that it knows; and the evaluation of an export."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from athanor.base.artifacts import manifest_digest, write_manifest
from athanor.serving.feedback import Feedback

Answer = dict[str, Any]
_numbers = map(str, itertools.count())


def asked(question: str, answer: str, *, after: Answer | None = None, system: str = "") -> Answer:
    """An answer that is not judged yet: the first of a new chat, or one further down."""
    prompt = [{"role": "system", "content": system}] if system else []
    path, chat = [], f"chat{next(_numbers)}"
    if after:
        prompt = [*after["prompt"], {"role": "assistant", "content": after["answer"]}]
        path, chat = [*after["path"], after["message"]], after["chat"]
    parent = f"question{next(_numbers)}"
    return {
        "chat": chat, "title": question, "message": f"answer{next(_numbers)}", "parent": parent, "path": [*path, parent],
        "model": "small-1", "prompt": [*prompt, {"role": "user", "content": question}], "answer": answer,
    }  # fmt: skip


def again(answer: Answer, text: str) -> Answer:
    """Another answer to the same question."""
    return {**answer, "message": f"answer{next(_numbers)}", "answer": text}


def judge(feedback: Feedback, answer: Answer, verdict: str | None, correction: str | None = None) -> int:
    return feedback.record({**answer, "verdict": verdict, "correction": correction})["id"]


def item(category: str, question: str, correct: bool = True, kind: str = "exact", turns: int = 1, **more: str) -> Answer:
    """An answer of the chat model to an item of the battery, as an evaluation keeps it."""
    prompt = [{"role": "user", "content": question}] * turns
    return {"category": category, "prompt": prompt, "correct": correct, "kind": kind, "model": "sft", **more}


def write_evaluation(root: Path, items: list[Answer]) -> str:
    """Of the checkout `root`; returns its digest, which an export made with it names."""
    folder = root / "data/eval"
    folder.mkdir(parents=True)
    (folder / "battery.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in items), encoding="utf-8")
    write_manifest(folder, kind="eval", version=1, counts={})
    return manifest_digest(folder)

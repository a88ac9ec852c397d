"""Feedback as the page sends it, with the conversation that it knows, and an evaluation as its stage writes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from athanor.base.artifacts import manifest_digest, write_manifest
from athanor.serving.feedback import Feedback

BATTERY = Path(__file__).with_name("battery.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
_numbers = map(str, itertools.count())


def asked(question: str, answer: str, *, after: dict | None = None, system: str = "") -> dict:
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


def again(answer: dict, text: str) -> dict:
    """Another answer to the same question."""
    return {**answer, "message": f"answer{next(_numbers)}", "answer": text}


def judge(feedback: Feedback, answer: dict, verdict: str | None, correction: str | None = None) -> int:
    return feedback.record({**answer, "verdict": verdict, "correction": correction})["id"]


def write_evaluation(root: Path, answers: Iterable[str] = BATTERY) -> str:
    """Write the evaluation of the checkout `root`; returns its digest, which an export made with it names."""
    folder = root / "data/eval"
    folder.mkdir(parents=True)
    (folder / "battery.jsonl").write_text("".join(answers), encoding="utf-8")
    write_manifest(folder, kind="eval", version=1, counts={})
    return manifest_digest(folder)

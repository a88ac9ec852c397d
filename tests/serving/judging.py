"""Feedback as the page sends it: with the conversation that it knows."""

from __future__ import annotations

import itertools
from typing import Any

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

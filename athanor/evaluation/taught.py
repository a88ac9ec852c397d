"""What of a person's own conversations a model gives back: their first questions, in the words that were taught.

No part of the battery, whose items are held out: of what was trained on this says only that it was learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_manifest
from athanor.evaluation.report import Answer
from athanor.text.conversations import Conversation, Item, Message, Messages, read_conversations
from athanor.tokenizer.chat import render
from athanor.tokenizer.tokenizer import Tokenizer

ORIGIN = "taught"
MOST = 200  # questions of a source
SPLITS = {"train": "taught", "val": "held_out"}


def taught_items(instruct: Path, tokenizer: Tokenizer, context_tokens: int) -> list[Item]:
    """The first questions of every source of one's own files in data/instruct, each once; a draw where there are many.

    What is longer than a row of training is left out, as sft-data does.
    """
    own = read_manifest(instruct, "instruct", 1).get("own", [])
    items = [item for source in own for item in _items(source, read_conversations(instruct / f"{source}.jsonl"))]
    pairs = ((item, (*item.prompt, Message("assistant", item.answer))) for item in items)
    return [item for item, pair in pairs if len(render(tokenizer, pair)[0]) <= context_tokens + 1]


def _items(source: str, conversations: Iterable[Conversation]) -> list[Item]:
    answers: dict[tuple[str, Messages], list[str]] = {}
    for conversation in conversations:
        first = next(n for n, message in enumerate(conversation.messages) if message.role == "assistant")
        said = answers.setdefault((conversation.split, conversation.messages[:first]), [])
        said.append(conversation.messages[first].content)
    items = [
        Item(source, prompt, "exact", said[0], tuple(said), ("", " "), split=split, origin=ORIGIN)
        for (split, prompt), said in answers.items()
    ]
    return sorted(items, key=lambda item: item.id)[:MOST]  # ids are hashes: a draw by content


def marked(items: Sequence[Item], answers: Sequence[Answer]) -> list[Answer]:
    """The answers, right where they are one of those taught to the question."""
    by_id = {item.id: item for item in items}
    return [
        replace(answer, correct=answer.text.strip() in [text.strip() for text in by_id[answer.item].accepted])
        for answer in answers
    ]


def taught_facts(items: Sequence[Item], answers: Sequence[Answer]) -> dict[str, Any]:
    """By source, of the questions that were trained on and of those held out: how many, and how many came right."""
    split_of: Mapping[str, str] = {item.id: SPLITS[item.split] for item in items}
    facts: dict[str, Any] = {}
    for answer in answers:
        row = facts.setdefault(answer.category, {}).setdefault(split_of[answer.item], {"n": 0, "right": 0})
        row["n"] += 1
        row["right"] += bool(answer.correct)
    return facts

"""Replies as conversations, which of them are kept, and the gates that all of them together must pass."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from athanor.base.errors import GateError, InputError
from athanor.cleaning import near
from athanor.synthesis.params import SyntheticGates
from athanor.synthesis.requests import Request
from athanor.text import habits
from athanor.text.conversations import Message, Messages, check_messages
from athanor.words.decontaminate import ItemIndex
from athanor.words.words import words_of

HABITS = (habits.identity_leak, habits.refusal_opening, habits.hedge_opening, habits.truncated)
SIMILARITY = 0.8  # of near duplicates: Jaccard similarity of the 5-grams of words, as for documents
CLAUSE = re.compile(r"[.,:;!?\n]")
OPENING_WORDS = 3  # at most, of the first clause: "Great question!" is one, whatever follows
OPENING_MIN_ANSWERS = 20  # of fewer, a few that begin alike prove nothing


@dataclass(frozen=True)
class Row:
    """A line of the result."""

    messages: Messages
    category: str
    request: str
    document: str
    document_license: str
    left_out: str | None  # why: habit, leaked or near_duplicate


def parse(text: str) -> list[Messages]:
    """The conversations of a reply, user first; none at all if anything is not of the form that was asked for."""
    # Some models put every JSON into a code fence, against the instructions.
    bare = text.strip().removeprefix("```json").removesuffix("```")
    try:
        found = [tuple(Message(**message) for message in row["messages"]) for row in json.loads(bare)["conversations"]]
        for messages in found:
            check_messages((Message("system", "none"), *messages), "")
            text_of(messages).encode()  # a lone surrogate cannot be written
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, InputError):
        return []
    return found


def text_of(messages: Messages) -> str:
    return "\n".join(message.content for message in messages)


def answers(messages: Messages) -> list[str]:
    return [message.content for message in messages[1::2]]


def sift(parsed: Mapping[Request, Sequence[Messages]], index: ItemIndex, max_ngram_conversations: int) -> list[Row]:
    """A row of each conversation, with the reason to leave it out, if any."""
    chats = [(request, messages) for request, found in parsed.items() for messages in found]
    leaked = index.conversation_matches([chat for _, chat in chats], max_ngram_documents=max_ngram_conversations)
    repeats = near.repeating([text_of(chat) for _, chat in chats], SIMILARITY)
    rows = []
    for number, (request, chat) in enumerate(chats):
        habit = any(has_habit(answer) for has_habit in HABITS for answer in answers(chat))
        why = "habit" if habit else "leaked" if leaked[number] else "near_duplicate" if number in repeats else None
        rows.append(Row(chat, request.category, request.identity, request.document, request.document_license, why))
    return rows


def check(gates: SyntheticGates, rows: Sequence[Row], replies: int, malformed: int) -> dict[str, float]:
    """Measures of all well-formed conversations; GateError with every gate that does not hold.

    `replies` are all that were asked for, also those that did not come; `malformed` counts these, too.
    """
    drops, total = Counter(row.left_out for row in rows), max(len(rows), 1)
    given = [answer for row in rows for answer in answers(row.messages)]
    openings = Counter(tuple(words_of(CLAUSE.split(answer.strip())[0])[:OPENING_WORDS]) for answer in given)
    measures = {
        "max_malformed_share": malformed / max(replies, 1),
        "max_habit_share": drops["habit"] / total,
        "max_leaked_share": drops["leaked"] / total,
        "max_near_duplicate_share": drops["near_duplicate"] / total,
        "max_opening_share": max(openings.values(), default=0) / max(len(given), OPENING_MIN_ANSWERS),
        "min_distinct_prompts": len({tuple(words_of(row.messages[0].content)) for row in rows}) / total,
        "min_conversations": drops[None],
    }
    failing = []
    for name, value in measures.items():
        limit = getattr(gates, name)
        if value > limit if name.startswith("max") else value < limit:
            failing.append(f"{value:.3g} for gates.{name}: {limit:g}")
    if failing:
        fix = "change the tasks, the model or the gate (docs/synthetic.md, Gates); every reply is kept"
        raise GateError("synthetic data", ", ".join(failing), where="synthetic", fix=fix)
    return measures

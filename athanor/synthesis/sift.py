"""Replies as conversations, which of them are kept, and the gates that all of them together must pass."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from athanor.base.errors import GateError, InputError
from athanor.cleaning import near
from athanor.synthesis.params import SyntheticGates
from athanor.text import habits
from athanor.text.conversations import Message, Messages, check_messages
from athanor.words.decontaminate import ItemIndex
from athanor.words.words import words_of

HABITS = (habits.identity_leak, habits.refusal_opening, habits.hedge_opening, habits.truncated)
SIMILARITY = 0.8  # of near duplicates: Jaccard similarity of the 5-grams of words, as for documents
CLAUSE = re.compile(r"[.,:;!?\n]")
OPENING_WORDS = 3  # at most, of the first clause: "Great question!" is one, whatever follows
OPENING_MIN_ANSWERS = 20  # of fewer, a few that begin alike prove nothing


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


def reasons(chats: Sequence[Messages], index: ItemIndex, max_ngram_conversations: int) -> list[str | None]:
    """For each conversation the reason to leave it out (habit, leaked, near_duplicate), or None."""
    leaked = index.conversation_matches(chats, max_ngram_documents=max_ngram_conversations)
    repeats = near.repeating([text_of(messages) for messages in chats], SIMILARITY)
    found = []
    for number, messages in enumerate(chats):
        if any(has_habit(answer) for has_habit in HABITS for answer in answers(messages)):
            found.append("habit")
        else:
            found.append("leaked" if leaked[number] else "near_duplicate" if number in repeats else None)
    return found


def measure(chats: Sequence[Messages], why: Sequence[str | None], replies: int, malformed: int) -> dict[str, float]:
    """The measure of each gate, over all well-formed conversations. `replies` are all, malformed and missing ones too."""
    drops, total = Counter(why), max(len(chats), 1)
    openings = Counter(
        tuple(words_of(CLAUSE.split(answer.strip())[0])[:OPENING_WORDS])
        for messages in chats
        for answer in answers(messages)
    )
    return {
        "max_malformed_share": malformed / max(replies, 1),
        "max_habit_share": drops["habit"] / total,
        "max_leaked_share": drops["leaked"] / total,
        "max_near_duplicate_share": drops["near_duplicate"] / total,
        "max_opening_share": max(openings.values(), default=0) / max(openings.total(), OPENING_MIN_ANSWERS),
        "min_distinct_prompts": len({tuple(words_of(messages[0].content)) for messages in chats}) / total,
        "min_conversations": drops[None],
    }


def check(gates: SyntheticGates, measures: Mapping[str, float]) -> None:
    """GateError with every gate that does not hold."""
    failing = []
    for name, value in measures.items():
        limit = getattr(gates, name)
        if value > limit if name.startswith("max") else value < limit:
            failing.append(f"{value:.3g} for gates.{name}: {limit:g}")
    if failing:
        fix = "change the tasks, the model or the gate (docs/synthetic.md, Gates); every reply is kept"
        raise GateError("synthetic data", ", ".join(failing), where="synthetic", fix=fix)

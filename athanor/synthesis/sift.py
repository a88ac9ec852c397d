"""Which conversations are kept, and the gates: data that repeats itself, leaks or has a bad habit is not written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from athanor.base.errors import GateError
from athanor.cleaning import near
from athanor.synthesis.params import SyntheticGates
from athanor.synthesis.requests import Request
from athanor.text import habits
from athanor.text.conversations import Messages
from athanor.words.decontaminate import ItemIndex
from athanor.words.words import Words, ngrams, tokenise, words_of

HABITS: dict[str, Callable[[str], bool]] = {
    "identity": habits.identity_leak,
    "refusal": habits.refusal_opening,
    "hedge": habits.hedge_opening,
    "truncated": habits.truncated,
}
DROPS = (*HABITS, "leaked", "near_duplicate")
NEAR_DUPLICATE_SIMILARITY = 0.8  # Jaccard similarity of the 5-grams of words, as for documents
GRAM, BLOCK_GRAMS = 4, 10_000  # in blocks of one size, for the share of different n-grams falls with the length
OPENING_WORDS = 3  # at most, of the first clause: "Great question!" is one, whatever follows
CLAUSE = re.compile(r"[.,:;!?\n]")
OPENING_MIN_ANSWERS = 20  # answers: of fewer, a few that begin alike prove nothing


@dataclass(frozen=True)
class Row:
    """One conversation of an answer."""

    messages: Messages
    request: Request

    @property
    def text(self) -> str:
        return "\n".join(message.content for message in self.messages)

    def answers(self) -> Iterator[str]:
        return (message.content for message in self.messages if message.role == "assistant")


@dataclass(frozen=True)
class Measures:
    """Measures of all well-formed conversations, before any is left out."""

    distinct_prompts: float
    distinct_4grams: float
    opening: str  # the commonest first words of answers
    opening_share: float


def sift(rows: Sequence[Row], index: ItemIndex, max_ngram_conversations: int) -> list[str | None]:
    """For each row the reason to leave it out, one of DROPS, or None."""
    reasons = [
        next((name for name, has_habit in HABITS.items() if any(map(has_habit, row.answers()))), None) for row in rows
    ]

    def remaining_numbers() -> list[int]:
        return [number for number, reason in enumerate(reasons) if reason is None]

    def mark_leaks() -> None:
        numbers = remaining_numbers()
        chats = [rows[number].messages for number in numbers]
        matches = index.conversation_matches(chats, max_ngram_documents=max_ngram_conversations)
        for number, item in zip(numbers, matches, strict=True):
            reasons[number] = "leaked" if item is not None else None

    # Before the repeats, which would hide how often an item came, and after: of fewer conversations more n-grams count.
    mark_leaks()
    numbers = remaining_numbers()
    for repeat in _repeats([rows[number].text for number in numbers]):
        reasons[numbers[repeat]] = "near_duplicate"
    mark_leaks()
    return reasons


def _repeats(texts: Sequence[str]) -> list[int]:
    """Numbers of the texts that nearly repeat an earlier one."""
    return sorted(near.repeating(texts, NEAR_DUPLICATE_SIMILARITY))


def measure(rows: Sequence[Row]) -> Measures:
    prompts = {" ".join(words_of(row.messages[0].content)) for row in rows}
    openings = Counter(_opening(answer) for row in rows for answer in row.answers())
    answers = sum(openings.values())
    opening, count = min(openings.items(), key=lambda item: (-item[1], item[0]), default=("", 0))
    return Measures(
        distinct_prompts=len(prompts) / max(len(rows), 1),
        distinct_4grams=_distinct_grams(tokenise([row.text for row in rows]).words),
        opening=opening,
        opening_share=count / answers if answers >= OPENING_MIN_ANSWERS else 0.0,
    )


def _opening(answer: str) -> str:
    first = next((words for clause in CLAUSE.split(answer) if (words := words_of(clause))), [])
    return " ".join(first[:OPENING_WORDS])


def _distinct_grams(words: Words) -> float:
    """Different n-grams among all, the mean over blocks of BLOCK_GRAMS; a rest under half a block counts nowhere."""
    grams = ngrams(words, GRAM).hashes
    blocks = [grams[start : start + BLOCK_GRAMS] for start in range(0, len(grams), BLOCK_GRAMS)]
    blocks = [block for block in blocks if len(block) >= BLOCK_GRAMS / 2] or blocks
    return float(np.mean([len(np.unique(block)) / len(block) for block in blocks])) if blocks else 0.0


def check(
    gates: SyntheticGates, measures: Measures, drops: Counter[str], conversations: int, malformed: int, answers: int
) -> None:
    """GateError with everything that is out of line, and what to change. `answers` includes requests without one."""
    total = max(conversations, 1)
    remaining = conversations - sum(drops.values())
    habit_counts = {name: drops[name] for name in HABITS if drops[name]}
    maxima = (
        ("max_malformed_share", malformed / max(answers, 1), "malformed answers",
         "raise max_output_tokens, ask for fewer conversations_per_request, or use a model that keeps to a form"),
        ("max_habit_share", sum(habit_counts.values()) / total, f"bad habits ({_listed(habit_counts)})",
         "say in the task what to avoid, raise max_output_tokens if they are cut off, or use another model"),
        ("max_leaked_share", drops["leaked"] / total, "conversations with an item of the battery",
         "reword the task: it asks for what the battery asks"),
        ("max_near_duplicate_share", drops["near_duplicate"] / total, "near duplicates",
         "show more (passages, more examples), more categories, fewer conversations_per_request, a higher temperature"),
        ("max_opening_share", measures.opening_share, f"answers that begin with '{measures.opening}'",
         "ask for other openings in the tasks, or add categories"),
    )  # fmt: skip
    minima = (
        ("min_distinct_prompts", measures.distinct_prompts, "different first questions",
         "show more (passages, more examples), more categories, fewer conversations_per_request"),
        ("min_distinct_4grams", measures.distinct_4grams, "different 4-grams of words",
         "show more (passages, more examples), more categories, a higher temperature"),
    )  # fmt: skip
    bad = [row for row in maxima if row[1] > getattr(gates, row[0])]
    bad += [row for row in minima if row[1] < getattr(gates, row[0])]
    failing = [
        (f"{what} are {value:.1%}, gates.{key} is {getattr(gates, key):.1%}", fix) for key, value, what, fix in bad
    ]
    if remaining < gates.min_conversations:
        what = f"{remaining:,} conversations are left, gates.min_conversations is {gates.min_conversations:,}"
        failing.append((what, "raise synthetic.requests or the budget"))
    if failing:
        fixes = "; ".join(dict.fromkeys(fix for _, fix in failing))
        raise GateError("synthetic data", "; ".join(what for what, _ in failing), where="synthetic", fix=fixes)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"

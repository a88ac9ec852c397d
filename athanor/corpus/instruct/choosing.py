"""Which conversations are fit to train on: habits of the answers, and one copy across sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from athanor.corpus.conversations import Conversation
from athanor.corpus.instruct import habits

QUESTION_CHARS, ANSWER_CHARS = 150, 200  # of the first question and answer, by which copies are known
TELLING_CHARS = 150  # a first question and answer shorter than this together, like a greeting, prove no copy alone


def _any_answer(judge: Callable[[str], bool]) -> Callable[[Conversation], bool]:
    return lambda row: any(judge(message.content) for message in row.messages if message.role == "assistant")


# In the order in which they are asked; a conversation is counted by the first that drops it.
FILTERS: dict[str, Callable[[Conversation], bool]] = {
    "identity_leak": _any_answer(habits.identity_leak),
    "hedge_opening": _any_answer(habits.hedge_opening),
    "refusal_opening": _any_answer(habits.refusal_opening),
    "cut_answer": lambda row: habits.truncated(row.messages[-1].content),
}


def drop_habits(
    conversations: Iterable[Conversation], exceptions: Mapping[str, Sequence[str]], losses: Mapping[str, Counter[str]]
) -> list[Conversation]:
    """Leave out what a filter finds, of both splits, but not in the sources that are `exceptions[filter]`."""
    kept = []
    for row in conversations:
        found = next((f for f, finds in FILTERS.items() if row.source not in exceptions[f] and finds(row)), None)
        if found is None:
            kept.append(row)
        else:
            losses[row.source][found] += 1
    return kept


def prefix_of(row: Conversation) -> tuple[str, ...]:
    """What copies of a conversation in other sources share: the beginnings of the first question and answer.

    Where these are short, it is the beginning of the whole conversation, as one text with its turns apart.
    """
    turns = [" ".join(message.content.split()).casefold() for message in row.messages if message.role != "system"]
    question, answer = turns[:2]
    if len(question) + len(answer) < TELLING_CHARS:
        return ("\n".join(turns)[: QUESTION_CHARS + ANSWER_CHARS],)
    return question[:QUESTION_CHARS], answer[:ANSWER_CHARS]


def one_source_each(
    conversations: Iterable[Conversation], priority: Sequence[str], losses: Mapping[str, Counter[str]]
) -> list[Conversation]:
    """Of conversations that begin alike in several sources, keep those of the best source, in either split.

    Sources that `priority` does not name come after those it does, by name.
    Copies inside a source are the business of `deduplicate`, which comes after it: facts are drawn several times
    on purpose.
    """
    rows = list(conversations)
    order = {name: number for number, name in enumerate(priority)}
    rank = {name: (order.get(name, len(order)), name) for name in {row.source for row in rows}}
    best: dict[tuple[str, ...], str] = {}
    prefixes = [prefix_of(row) for row in rows]
    for row, prefix in zip(rows, prefixes, strict=True):
        best[prefix] = min(best.get(prefix, row.source), row.source, key=lambda name: rank[name])
    kept = []
    for row, prefix in zip(rows, prefixes, strict=True):
        if best[prefix] == row.source:
            kept.append(row)
        else:
            losses[row.source]["in_better_source"] += 1
    return kept

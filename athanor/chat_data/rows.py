"""Conversations to training rows: filter, deduplicate, encode and truncate, decontaminate, cap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from athanor.base.work import Facts, ignore
from athanor.chat_data.gates import check_shares
from athanor.chat_data.params import SftDataParams
from athanor.chat_data.rendering import Renderer, render, supervised_turns
from athanor.data.order import permutation
from athanor.data.rows import fit_turns
from athanor.text import habits
from athanor.text.conversations import Conversation
from athanor.text.questions import Taught, last_pair
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.words.decontaminate import ItemIndex

QUESTION_CHARS, ANSWER_CHARS = 150, 200  # of the first question and answer, by which copies are known
MIN_PREFIX_CHARS = 150  # a first question and answer shorter than this together, like a greeting, prove no copy alone

Dropped = Mapping[str, Counter[str]]  # source -> reason -> conversations left out
T = TypeVar("T", Conversation, "Encoded")


def _any_answer(predicate: Callable[[str], bool]) -> Callable[[Conversation], bool]:
    return lambda row: any(predicate(message.content) for message in row.messages if message.role == "assistant")


# In the order in which they are asked; a conversation is counted by the first that drops it.
FILTERS: dict[str, Callable[[Conversation], bool]] = {
    "identity_leak": _any_answer(habits.identity_leak),
    "hedge_opening": _any_answer(habits.hedge_opening),
    "refusal_opening": _any_answer(habits.refusal_opening),
    "cut_answer": lambda row: habits.truncated(row.messages[-1].content),
}
OWN_HABITS = ("refusal_opening", "cut_answer")  # what a person wrote is not cut, and what it declines it means
# In the order in which they take place.
REASONS = (*FILTERS, "in_better_source", "duplicates", "too_long", "truncated", "contaminated", "over_cap")
OWN_REASONS = ("contradicted",)  # where there are conversations of one's own


@dataclass(frozen=True)
class Encoded:
    """A conversation as it is trained (after truncation) with its ids and loss mask, uint32 and uint8 [tokens].

    `follows`: it begins with another conversation, so it is there once and not `repeats` times.
    """

    conversation: Conversation
    ids: np.ndarray
    mask: np.ndarray
    follows: bool = False

    @property
    def source(self) -> str:
        return self.conversation.source

    @property
    def supervised(self) -> int:
        return int(self.mask.sum())


def choose(
    tokenizer: Tokenizer | Renderer,
    conversations: Iterable[Conversation],
    params: SftDataParams,
    index: ItemIndex,
    dropped: Dropped,
    contaminated: Counter[str],
    own: Sequence[str] = (),
    note: Callable[[str], None] = ignore,
) -> list[Encoded]:
    """The conversations to train on and to hold out; those that are left out are counted in `dropped`.

    `contaminated` counts the conversations that held a battery item, by item. `own`: the sources that a person wrote,
    which no other contradicts; of several the last. `note` gets a line for what they leave out or lose.

    Caps come after all that leaves out, so that a source fills its cap.
    """
    sources = {name: params.sources[name] for name in dropped}
    max_conversations = params.decontamination.max_ngram_conversations
    exceptions = {name: getattr(params.filter_exceptions, name) for name in FILTERS}
    for name in OWN_HABITS:
        exceptions[name] = (*exceptions[name], *own)
    # In this order, or an exact copy would stay in the source that is read first and not in the better one.
    best = [*reversed(own), *params.source_priority]
    remaining = one_source_each(drop_habits(conversations, exceptions, dropped), best, dropped)
    remaining = deduplicate(remaining, {name: source.max_copies for name, source in sources.items()}, dropped)
    remaining = agree(remaining, own, dropped)
    encoded = encode(tokenizer, remaining, params.context_tokens + 1, dropped)
    rows = decontaminate(encoded, index, max_conversations, dropped, contaminated)
    caps = {name: source.max_supervised_tokens for name, source in sources.items()} | own_caps(rows, params, own)
    capped = cap_supervised(rows, caps, params.seed, dropped)
    # Once more after a cap: an n-gram that too few of what is left share is no template any more.
    if len(capped) < len(rows):
        capped = decontaminate(capped, index, max_conversations, dropped, contaminated)
    for line in own_notes(dropped, own):
        note(line)
    return capped + follow_ups(tokenizer, capped, params)


def _drop_with_reason(rows: Iterable[T], reasons: Iterable[str | None], dropped: Dropped) -> list[T]:
    """The rows without a reason to drop them; the others are counted by reason."""
    remaining = []
    for row, reason in zip(rows, reasons, strict=True):
        if reason is None:
            remaining.append(row)
        else:
            dropped[row.source][reason] += 1
    return remaining


def drop_habits(
    conversations: Iterable[Conversation], exceptions: Mapping[str, Sequence[str]], dropped: Dropped
) -> list[Conversation]:
    """Leave out the conversations that a filter matches, in both splits, except in the sources `exceptions[filter]`."""
    rows = list(conversations)
    reasons = (
        next((name for name, matches in FILTERS.items() if row.source not in exceptions[name] and matches(row)), None)
        for row in rows
    )
    return _drop_with_reason(rows, reasons, dropped)


def prefix_of(row: Conversation) -> tuple[str, ...]:
    """What copies of a conversation in other sources share: the beginnings of the first question and answer.

    Where these are short, it is the beginning of the whole conversation, as one text with its turns apart.
    """
    turns = [" ".join(message.content.split()).casefold() for message in row.messages if message.role != "system"]
    question, answer = turns[:2]
    if len(question) + len(answer) < MIN_PREFIX_CHARS:
        return ("\n".join(turns)[: QUESTION_CHARS + ANSWER_CHARS],)
    return question[:QUESTION_CHARS], answer[:ANSWER_CHARS]


def one_source_each(
    conversations: Iterable[Conversation], priority: Sequence[str], dropped: Dropped
) -> list[Conversation]:
    """Of conversations that begin alike in several sources, keep those of the best source, in either split.

    Sources that `priority` does not name come after those it does, by name.
    Copies inside a source are the business of `deduplicate`, which comes after it: facts are drawn several times
    on purpose.
    """
    rows = list(conversations)
    names = [*priority, *sorted({row.source for row in rows} - set(priority))]
    best: dict[tuple[str, ...], str] = {}
    prefixes = [prefix_of(row) for row in rows]
    for row, prefix in zip(rows, prefixes, strict=True):
        best[prefix] = min(best.get(prefix, row.source), row.source, key=names.index)
    pairs = zip(rows, prefixes, strict=True)
    reasons = (None if best[prefix] == row.source else "in_better_source" for row, prefix in pairs)
    return _drop_with_reason(rows, reasons, dropped)


def deduplicate(
    conversations: Iterable[Conversation], max_copies: Mapping[str, int], dropped: Dropped
) -> list[Conversation]:
    """Keep `max_copies[source]` of equal training conversations and one of equal validation ones, in the given order.

    A training conversation whose text is also in validation goes, wherever it comes from.
    """
    rows = list(conversations)
    val = {row.id for row in rows if row.split == "val"}
    seen: Counter[tuple[str, str]] = Counter()

    def reason(row: Conversation) -> str | None:
        train = row.split == "train"
        if (train and row.id in val) or seen[row.split, row.id] >= (max_copies[row.source] if train else 1):
            return "duplicates"
        seen[row.split, row.id] += 1
        return None

    return _drop_with_reason(rows, map(reason, rows), dropped)


def agree(rows: list[Conversation], own: Sequence[str], dropped: Dropped) -> list[Conversation]:
    """Leave out what answers the last question of one's own conversations otherwise, in any turn."""
    ranks = {name: rank for rank, name in enumerate(own, 1)}
    mine = ((last_pair(row.messages), ranks[row.source]) for row in rows if row.source in ranks)
    taught = Taught((*pair, rank) for pair, rank in mine if pair)

    def contradicted(row: Conversation) -> bool:
        turns = row.messages[1:] if row.messages[0].role == "system" else row.messages
        pairs = zip(turns[::2], turns[1::2], strict=True)
        return any(taught.contradicts(asked.content, said.content, ranks.get(row.source, 0)) for asked, said in pairs)

    reasons = ("contradicted" if ranks and contradicted(row) else None for row in rows)
    return _drop_with_reason(rows, reasons, dropped)


def own_notes(dropped: Dropped, own: Sequence[str]) -> Iterator[str]:
    """Lines about the conversations that one's own leave out, and about those of one's own that are not taught."""
    others = {name: counts["contradicted"] for name, counts in dropped.items() if counts["contradicted"]}
    if others:
        listed = ", ".join(f"{count:,} of {name}" for name, count in others.items())
        yield f"left out, because they answer questions of {', '.join(own)} otherwise: {listed}"
    for name in own:
        lost = {
            reason: dropped[name][reason] for reason in (*FILTERS, "too_long", "contaminated") if dropped[name][reason]
        }
        if lost:
            counts = ", ".join(f"{count:,} {reason}" for reason, count in lost.items())
            yield f"{name}: not taught: {counts} (docs/own-data.md tells the reasons)"


def own_caps(rows: Sequence[Encoded], params: SftDataParams, own: Sequence[str]) -> dict[str, int]:
    """The caps of the sources that are to be no larger than so many times one's own conversations."""
    bounds = {name: source.times_own for name, source in params.sources.items() if source.times_own is not None}
    times = {name: source.repeats + source.follow_ups for name, source in params.sources.items()}
    taught = (row for row in rows if bounds and row.source in own and row.conversation.split == "train")
    size = sum(row.supervised * times[row.source] for row in taught)
    caps = {name: int(bound * size / max(times[name], 1)) for name, bound in bounds.items()} if size else {}
    return {name: min(cap, params.sources[name].max_supervised_tokens or cap) for name, cap in caps.items()}


def encode(
    tokenizer: Tokenizer | Renderer, conversations: Iterable[Conversation], capacity: int, dropped: Dropped
) -> list[Encoded]:
    """Render each conversation, cut after the last assistant turn that fits `capacity` tokens; drop those with none."""
    encoded = []
    for row in conversations:
        ids, mask = render(tokenizer, row.messages)
        length = fit_turns(mask, capacity)
        if length == 0:
            dropped[row.source]["too_long"] += 1
            continue
        if length < len(ids):
            dropped[row.source]["truncated"] += 1
            row = replace(row, messages=supervised_turns(row.messages, mask[:length]))
        encoded.append(Encoded(row, np.array(ids[:length], np.uint32), np.array(mask[:length], np.uint8)))
    return encoded


def cap_supervised(
    rows: Sequence[Encoded], caps: Mapping[str, int | None], seed: int, dropped: Dropped
) -> list[Encoded]:
    """Keep a seeded choice of each source's training conversations with at most its cap of supervised tokens."""
    reasons: list[str | None] = [None] * len(rows)
    for source, cap in sorted(caps.items()):
        if cap is None:
            continue
        source_and_split = (source, "train")
        numbers = [i for i, row in enumerate(rows) if (row.source, row.conversation.split) == source_and_split]
        used_tokens = 0
        for index in permutation(len(numbers), seed, source, "cap").tolist():
            number = numbers[index]
            if used_tokens + rows[number].supervised > cap:
                reasons[number] = "over_cap"
            else:
                used_tokens += rows[number].supervised
    return _drop_with_reason(rows, reasons, dropped)


def decontaminate(
    rows: Sequence[Encoded],
    index: ItemIndex,
    max_conversations: int,
    dropped: Dropped,
    contaminated: Counter[str],
) -> list[Encoded]:
    """Drop the conversations that hold a battery item; `contaminated` counts them by item."""
    matches = index.conversation_matches(
        [row.conversation.messages for row in rows], max_ngram_documents=max_conversations
    )
    contaminated.update(item for item in matches if item is not None)
    return _drop_with_reason(rows, (item and "contaminated" for item in matches), dropped)


def follow_ups(tokenizer: Tokenizer | Renderer, rows: Sequence[Encoded], params: SftDataParams) -> list[Encoded]:
    """Training conversations once more as later turns, as often as their source asks.

    What a small model has seen as a first question alone it does not answer later: of 28 taught questions it knew all
    as the first, and 8 as the second. Every other one follows a conversation of its own source.
    """
    train = [row for row in rows if row.conversation.split == "train"]
    result = []
    for name in sorted(params.sources):
        source, own = params.sources[name], [row for row in train if row.source == name]
        others = [row for row in train if row.source != name] or own
        for k in range(source.follow_ups):
            pool = own if k % 2 else others
            order = permutation(len(pool), params.seed, name, "follow_ups", k)
            for number, row in enumerate(own):
                drawn = [pool[order[(number * _DRAWS + i) % len(pool)]] for i in range(_DRAWS)]
                if joined := _after(tokenizer, drawn, row, params.context_tokens + 1):
                    result.append(joined)
    return result


_DRAWS = 8  # conversations that are tried for one that leaves room


def _after(tokenizer: Tokenizer | Renderer, before: Sequence[Encoded], row: Encoded, capacity: int) -> Encoded | None:
    """The conversation after the first of `before` that leaves room for it; None where there is none."""
    turns = tuple(message for message in row.conversation.messages if message.role != "system")
    for earlier in before:
        if earlier is not row and len(earlier.ids) + len(row.ids) <= capacity:
            conversation = replace(row.conversation, messages=earlier.conversation.messages + turns)
            ids, mask = render(tokenizer, conversation.messages)
            return Encoded(conversation, np.array(ids, np.uint32), np.array(mask, np.uint8), follows=True)
    return None


def repeats(row: Encoded, params: SftDataParams) -> int:
    """How often a training conversation is in an epoch."""
    return 1 if row.follows else params.sources[row.source].repeats


def supervised_tokens(rows: Sequence[Encoded], params: SftDataParams, names: Iterable[str]) -> dict[str, int]:
    """Supervised training tokens of each source in `names`, repeats counted."""
    tokens = dict.fromkeys(names, 0)
    for row in rows:
        if row.conversation.split == "train":
            tokens[row.source] += row.supervised * repeats(row, params)
    return tokens


def source_report(
    params: SftDataParams,
    read: Mapping[str, int],
    dropped: Dropped,
    supervised: Mapping[str, int],
    own: Sequence[str] = (),
) -> Facts:
    """How many conversations each source had and lost, and its share; GateError if one source makes up too much."""
    shares = check_shares(supervised, params.max_source_share)
    return {
        "supervised_tokens": sum(supervised.values()),
        "contaminated": sum(counts["contaminated"] for counts in dropped.values()),
        "sources": {
            name: {
                "read": read[name],
                **{reason: dropped[name][reason] for reason in (*REASONS, *(OWN_REASONS if own else ()))},
                "supervised_tokens": supervised[name],
                "supervised_share": shares[name],
            }
            for name in dropped
        },
    }

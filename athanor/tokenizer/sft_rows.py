"""Conversations to training rows: deduplicate, encode and truncate, decontaminate, cap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from athanor.corpus.conversations import Conversation
from athanor.corpus.decontaminate import ItemIndex
from athanor.corpus.instruct import choosing
from athanor.corpus.instruct.choosing import FILTERS
from athanor.data.order import permutation
from athanor.data.rows import fit_turns
from athanor.params.sft_data import SftDataParams
from athanor.tokenizer.chat import render
from athanor.tokenizer.sft_gates import check_shares
from athanor.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """A conversation as it is trained (after truncation) with its ids and loss mask, uint32 and uint8 [tokens]."""

    conversation: Conversation
    ids: np.ndarray
    mask: np.ndarray

    @property
    def supervised(self) -> int:
        return int(self.mask.sum())


def choose(
    tokenizer: Tokenizer,
    conversations: Iterable[Conversation],
    params: SftDataParams,
    index: ItemIndex,
    losses: Mapping[str, Counter[str]],
    touched: Counter[str],
) -> list[Encoded]:
    """What is trained and held out of the sources' conversations; what is left out is counted in `losses` by reason.

    `touched` counts the conversations that held a battery item, by item.

    Caps come after all that leaves out, so that a source fills its cap.
    """
    sources = {name: params.sources[name] for name in losses}
    most = params.decontamination.max_ngram_conversations
    exceptions = {name: getattr(params.filter_exceptions, name) for name in choosing.FILTERS}
    fit = choosing.drop_habits(conversations, exceptions, losses)
    # In this order, or an exact copy would stay in the source that is read first and not in the better one.
    kept = choosing.one_source_each(fit, params.source_priority, losses)
    kept = deduplicate(kept, {name: source.max_copies for name, source in sources.items()}, losses)
    rows = decontaminate(encode(tokenizer, kept, params.context_tokens + 1, losses), index, most, losses, touched)
    caps = {name: source.max_supervised_tokens for name, source in sources.items()}
    capped = cap_supervised(rows, caps, params.seed, losses)
    # Once more after a cap: an n-gram that too few of what is left share is no template any more.
    return capped if len(capped) == len(rows) else decontaminate(capped, index, most, losses, touched)


def deduplicate(
    conversations: Iterable[Conversation], max_copies: Mapping[str, int], losses: Mapping[str, Counter[str]]
) -> list[Conversation]:
    """Keep `max_copies[source]` of equal training conversations and one of equal validation ones, in the given order.

    A training conversation whose text is also in validation goes, wherever it comes from.
    """
    rows = list(conversations)
    val = {row.id for row in rows if row.split == "val"}
    seen: Counter[tuple[str, str]] = Counter()
    kept = []
    for row in rows:
        most = max_copies[row.source] if row.split == "train" else 1
        if (row.split == "train" and row.id in val) or seen[row.split, row.id] >= most:
            losses[row.source]["duplicates"] += 1
            continue
        seen[row.split, row.id] += 1
        kept.append(row)
    return kept


def encode(
    tokenizer: Tokenizer, conversations: Iterable[Conversation], capacity: int, losses: Mapping[str, Counter[str]]
) -> list[Encoded]:
    """Render each conversation, cut after the last assistant turn that fits `capacity` tokens; drop those with none."""
    made = []
    for row in conversations:
        ids, mask = render(tokenizer, row.messages)
        keep = fit_turns(mask, capacity)
        if keep == 0:
            losses[row.source]["too_long"] += 1
            continue
        if keep < len(ids):
            losses[row.source]["truncated"] += 1
            stops = ids[:keep].count(tokenizer.stop)
            row = replace(row, messages=row.messages[:stops])
        made.append(Encoded(row, np.array(ids[:keep], np.uint32), np.array(mask[:keep], np.uint8)))
    return made


def cap_supervised(
    rows: Sequence[Encoded], caps: Mapping[str, int | None], seed: int, losses: Mapping[str, Counter[str]]
) -> list[Encoded]:
    """Keep a seeded choice of each source's training conversations with at most its cap of supervised tokens."""
    dropped: set[int] = set()
    for source, most in sorted(caps.items()):
        if most is None:
            continue
        mine = (source, "train")
        numbers = [i for i, row in enumerate(rows) if (row.conversation.source, row.conversation.split) == mine]
        used = 0
        for rank in permutation(len(numbers), seed, source, "cap").tolist():
            number = numbers[rank]
            if used + rows[number].supervised > most:
                dropped.add(number)
                losses[source]["over_cap"] += 1
            else:
                used += rows[number].supervised
    return [row for number, row in enumerate(rows) if number not in dropped]


def decontaminate(
    rows: Sequence[Encoded],
    index: ItemIndex,
    max_conversations: int,
    losses: Mapping[str, Counter[str]],
    touched: Counter[str],
) -> list[Encoded]:
    """Drop the conversations that hold a battery item; `touched` counts them by item."""
    found = index.conversation_matches(
        [row.conversation.messages for row in rows], max_ngram_documents=max_conversations
    )
    for row, item in zip(rows, found, strict=True):
        if item is not None:
            losses[row.conversation.source]["contaminated"] += 1
            touched[item] += 1
    return [row for row, item in zip(rows, found, strict=True) if item is None]


# In the order in which they take place.
REASONS = (*FILTERS, "in_better_source", "duplicates", "too_long", "truncated", "contaminated", "over_cap")


def supervised_tokens(rows: Sequence[Encoded], params: SftDataParams, names: Iterable[str]) -> dict[str, int]:
    """Supervised training tokens of each source in `names`, repeats counted."""
    tokens = dict.fromkeys(names, 0)
    for row in rows:
        source = row.conversation.source
        if row.conversation.split == "train":
            tokens[source] += row.supervised * params.sources[source].repeats
    return tokens


def of_sources(
    params: SftDataParams, read: Mapping[str, int], losses: Mapping[str, Counter[str]], supervised: Mapping[str, int]
) -> dict[str, Any]:
    """What each source had and lost, and its share; GateError if one source makes up too much."""
    shares = check_shares(supervised, params.max_source_share)
    return {
        "supervised_tokens": sum(supervised.values()),
        "contaminated": sum(lost["contaminated"] for lost in losses.values()),
        "sources": {
            name: {
                "read": read[name],
                **{reason: losses[name][reason] for reason in REASONS},
                "supervised_tokens": supervised[name],
                "supervised_share": shares[name],
            }
            for name in losses
        },
    }

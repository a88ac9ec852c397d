"""Conversations to training rows: encode and truncate, deduplicate, cap, decontaminate; and the gates on the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from athanor.corpus.conversations import Conversation, Message
from athanor.corpus.decontaminate import ItemIndex
from athanor.data.order import permutation
from athanor.data.packing import fit_turns
from athanor.data.rows import PackedRows
from athanor.errors import GateError
from athanor.tokenizer.chat import prompt_ids, render
from athanor.tokenizer.tokenizer import ROLE_PIECES, Tokenizer

PAD_GATE_ROWS = 200  # with fewer rows the last, half-empty ones weigh too much to judge
FIX = "run dvc repro --force sft-data; if it fails again, this is a bug"


@dataclass(frozen=True)
class Encoded:
    """A conversation as it is trained (after truncation) with its ids and loss mask, uint32 and uint8 [tokens]."""

    conversation: Conversation
    ids: np.ndarray
    mask: np.ndarray

    @property
    def supervised(self) -> int:
        return int(self.mask.sum())


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
    rows: Sequence[Encoded], index: ItemIndex, max_conversations: int, losses: Mapping[str, Counter[str]]
) -> list[Encoded]:
    """Drop the conversations that hold a battery item."""
    found = index.conversation_matches(
        [row.conversation.messages for row in rows], max_ngram_documents=max_conversations
    )
    for row, item in zip(rows, found, strict=True):
        if item is not None:
            losses[row.conversation.source]["contaminated"] += 1
    return [row for row, item in zip(rows, found, strict=True) if item is None]


def messages_of(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[Message, ...]:
    """The messages of a rendered conversation, read back from its ids; GateError if they do not have its layout."""
    roles = {tokenizer.control_ids[piece]: role for role, piece in ROLE_PIECES.items()}
    messages: list[Message] = []
    at = 1
    while ids[0] == tokenizer.bos and at < len(ids) and ids[at] in roles and tokenizer.stop in ids[at:]:
        end = ids.index(tokenizer.stop, at)
        messages.append(Message(roles[ids[at]], tokenizer.decode(ids[at + 1 : end])))
        at = end + 1
    if at != len(ids):
        raise GateError("template", f"ids {list(ids[:20])} are not a rendered conversation", where="data/sft", fix=FIX)
    return tuple(messages)


def check_split_keys(conversations: Iterable[Conversation]) -> None:
    """No key on both sides of the line."""
    sides: dict[str, set[str]] = {"train": set(), "val": set()}
    for row in conversations:
        sides[row.split].add(row.key)
    if both := sides["train"] & sides["val"]:
        raise GateError(
            "split",
            f"{len(both)} keys are in train and val, as '{min(both)}'",
            where="data/instruct",
            fix="derive the split from the key",
        )


def check_packed(tokenizer: Tokenizer, packed: PackedRows, where: str) -> list[tuple[Message, ...]]:
    """Check the rows as written; returns every conversation as read back from its ids.

    For every assistant turn the ids a server would send are the trained ids
    before it, its content and one stop are supervised and nothing else is, and
    every row is within its size and has something to learn from.
    """
    read = []
    for number in range(packed.conversation_count):
        ids, mask = (array.tolist() for array in packed.conversation(number))
        messages = messages_of(tokenizer, ids)
        expected = [0] * len(ids)
        turns = 0
        for place, message in enumerate(messages):
            if message.role != "assistant":
                continue
            turns += 1
            prompt = prompt_ids(tokenizer, messages[:place])
            if ids[: len(prompt)] != prompt:
                what = f"the ids before message {place} of conversation {number} are not what a server sends"
                raise GateError("prompt-ids", what, where=where, fix=FIX)
            end = ids.index(tokenizer.stop, len(prompt)) + 1
            expected[len(prompt) : end] = [1] * (end - len(prompt))
        stops = sum(m for i, m in zip(ids, mask, strict=True) if i == tokenizer.stop)
        if stops != turns:
            what = f"conversation {number} has {turns} assistant turns, {stops} supervised stops"
            raise GateError("stops", what, where=where, fix=FIX)
        if mask != expected:
            what = f"conversation {number} supervises other tokens than its assistant turns"
            raise GateError("mask", what, where=where, fix=FIX)
        read.append(messages)
    lengths, supervised = packed.lengths(), packed.supervised()
    for row in range(len(packed)):
        numbers = packed.numbers(row)
        if lengths[numbers].sum() > packed.context_tokens + 1:
            raise GateError("rows", f"row {row} is longer than the context", where=where, fix=FIX)
        if supervised[numbers].sum() == 0:
            raise GateError("rows", f"row {row} has no supervised token", where=where, fix=FIX)
    return read


def check_clean(conversations: Sequence[Sequence[Message]], index: ItemIndex, max_conversations: int) -> None:
    """No battery item in what is trained, searched in the text read back from the ids."""
    found = index.conversation_matches(conversations, max_ngram_documents=max_conversations)
    hits = [item for item in found if item is not None]
    if hits:
        what = f"{len(hits)} conversations hold a battery item, as item {hits[0]}"
        raise GateError("contamination", what, where="data/sft", fix=FIX)


def check_shares(supervised: Mapping[str, int], most: float) -> dict[str, float]:
    """Each source's share of the supervised tokens; GateError above `most`."""
    total = sum(supervised.values())
    shares = {source: tokens / total for source, tokens in sorted(supervised.items())}
    for source, share in shares.items():
        if share > most:
            raise GateError(
                "source-share",
                f"source '{source}' makes up {share:.3f} of the supervised tokens, limit {most}",
                where="sft_data.sources",
                fix=f"lower sft_data.sources.{source}.max_supervised_tokens",
            )
    return shares


def check_padding(packed: PackedRows, most: float, where: str) -> float:
    """Share of row tokens that are padding; GateError above `most` when there are rows enough to judge."""
    lengths = packed.lengths()
    used = sum(int(lengths[packed.numbers(row)].sum()) for row in range(len(packed)))
    share = 1 - used / (len(packed) * (packed.context_tokens + 1))
    if len(packed) > PAD_GATE_ROWS and share > most:
        raise GateError(
            "padding",
            f"{share:.3f} of the rows is padding, limit {most}",
            where=where,
            fix="raise sft_data.context_tokens, add short conversations, or raise sft_data.max_pad_share",
        )
    return share

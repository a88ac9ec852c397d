"""The gates on packed rows as written: layout, mask, prompts, habits, battery, shares and padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from athanor.base.errors import GateError
from athanor.data.rows import PackedRows
from athanor.text.conversations import Conversation, Message, Messages
from athanor.text.habits import hedge_opening, identity_leak
from athanor.tokenizer.chat import layout_of, prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.words.decontaminate import ItemIndex

PAD_GATE_ROWS = 200  # with fewer rows the last, half-empty ones weigh too much to judge
FIX = "run dvc repro --force sft-data; if it fails again, this is a bug"


def messages_of(tokenizer: Tokenizer, ids: Sequence[int]) -> Messages:
    """The messages of a rendered conversation, read back from its ids; GateError if they do not have its layout."""
    layout, ids = layout_of(tokenizer), list(ids)
    start, after_stop = list(layout.start), list(layout.closing[1:])
    messages: list[Message] = []
    position = len(start)
    while ids[: len(start)] == start and position < len(ids) and layout.stop in ids[position:]:
        openings = [
            (role, len(o)) for role, o in layout.opening.items() if tuple(ids[position : position + len(o)]) == o
        ]
        if not openings:
            break
        (role, size), end = openings[0], ids.index(layout.stop, position)
        messages.append(Message(role, tokenizer.decode(ids[position + size : end])))
        # What follows the stop is missing only after the last turn, where a long conversation was cut.
        position = end + 1 + (len(after_stop) if ids[end + 1 : end + 1 + len(after_stop)] == after_stop else 0)
        if after_stop and position == end + 1:
            break
    if position != len(ids):
        raise GateError("template", f"ids {list(ids[:20])} are not a rendered conversation", where="data/sft", fix=FIX)
    return tuple(messages)


def check_split_keys(conversations: Iterable[Conversation]) -> None:
    """GateError for a key that is in both train and val."""
    keys_of: dict[str, set[str]] = {"train": set(), "val": set()}
    for row in conversations:
        keys_of[row.split].add(row.key)
    if both := keys_of["train"] & keys_of["val"]:
        raise GateError(
            "split",
            f"{len(both)} keys are in train and val, as '{min(both)}'",
            where="data/instruct",
            fix="derive the split from the key",
        )


def check_packed(tokenizer: Tokenizer, packed: PackedRows, where: str) -> dict[int, Messages]:
    """Check the rows as written; returns every conversation, by entry number, as read back from its ids.

    For every assistant turn the ids a server would send are the trained ids
    before it, its content and one stop are supervised and nothing else is, and
    every row is within its size and has something to learn from. Pieces of
    text are checked by `check_text`.
    """
    conversations = {}
    for number in range(packed.conversation_count):
        if packed.is_text(number):
            check_text(tokenizer, packed, number, where)
        else:
            conversations[number] = _check_conversation(tokenizer, packed, number, where)
    lengths, supervised = packed.lengths(), packed.supervised()
    for row in range(len(packed)):
        numbers = packed.numbers(row)
        if lengths[numbers].sum() > packed.context_tokens + 1:
            raise GateError("rows", f"row {row} is longer than the context", where=where, fix=FIX)
        if supervised[numbers].sum() == 0:
            raise GateError("rows", f"row {row} has no supervised token", where=where, fix=FIX)
    return conversations


def _check_conversation(tokenizer: Tokenizer, packed: PackedRows, number: int, where: str) -> Messages:
    ids, mask = (array.tolist() for array in packed.conversation(number))
    messages = messages_of(tokenizer, ids)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer.check_rendered(messages)  # a foreign one, which other runtimes ask about whole texts
    expected = [0] * len(ids)
    turns = 0
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        turns += 1
        prompt = prompt_ids(tokenizer, messages[:index])
        if ids[: len(prompt)] != prompt:
            what = f"the ids before message {index} of conversation {number} are not what a server sends"
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
    return messages


def check_text(tokenizer: Tokenizer, packed: PackedRows, number: int, where: str) -> None:
    """Check a piece of pretraining text: no control id but `<|bos|>` and `<|eos|>` at its ends, all else supervised."""
    ids, mask = packed.conversation(number)
    content_ids = ids[int(ids[0] == tokenizer.bos) : len(ids) - int(ids[-1] == tokenizer.eos)]
    if np.isin(content_ids, list(tokenizer.control_ids.values())).any():
        raise GateError("replay-text", f"text {number} has a control id inside", where=where, fix=FIX)
    if mask[0] != 0 or not mask[1:].all() or len(mask) < 2:
        what = f"text {number} supervises other tokens than all but its first"
        raise GateError("replay-mask", what, where=where, fix=FIX)


def check_replay(
    tokenizer: Tokenizer, packed: PackedRows, share: float, index: ItemIndex, max_documents: int, where: str
) -> dict[str, int]:
    """Supervised tokens of each source of text; GateError if their share is not `share`, or an item stands in one."""
    numbers = [number for number in range(packed.conversation_count) if packed.is_text(number)]
    entries = Counter(number for row in range(len(packed)) for number in packed.numbers(row))
    supervised = packed.supervised()
    total = sum(int(supervised[number]) * repeats for number, repeats in entries.items())
    tokens: Counter[str] = Counter()
    for number in numbers:
        tokens[packed.source(number)] += int(supervised[number]) * entries[number]
    if abs(sum(tokens.values()) - share * total) > 1:
        what = f"{sum(tokens.values())} of {total} supervised tokens are pretraining text, share asked {share}"
        raise GateError("replay-share", what, where=where, fix=FIX)
    texts = [tokenizer.decode(packed.conversation(number)[0].tolist()) for number in numbers]
    matches = index.matches(texts, max_ngram_documents=max_documents, prompts_alone=False)
    if contaminated := [item for item in matches if item is not None]:
        what = f"{len(contaminated)} pieces of text hold a battery item, as item {contaminated[0]}"
        raise GateError("contamination", what, where=where, fix=FIX)
    return dict(sorted(tokens.items()))


def check_habits(
    conversations: Mapping[int, Sequence[Message]],
    packed: PackedRows,
    excepted: Collection[str],
    max_hedge_share: float,
    where: str,
) -> tuple[int, float]:
    """GateError for an answer that claims to be another assistant, except in the sources `excepted` from that rule.

    Returns the number of such answers there, and the share of all answers that open with a hedge: at most
    `max_hedge_share`, or GateError.
    """
    answers = identity_claims = hedge_count = 0
    for number, messages in conversations.items():
        for message in messages:
            if message.role != "assistant":
                continue
            answers += 1
            hedge_count += hedge_opening(message.content)
            if not identity_leak(message.content):
                continue
            source = packed.source(number)
            if source not in excepted:
                what = f"an answer of source '{source}' claims to be another assistant: {message.content[:80]!r}"
                raise GateError("identity", what, where=where, fix=FIX)
            identity_claims += 1
    hedge_share = hedge_count / answers
    if hedge_share > max_hedge_share:
        raise GateError(
            "hedges",
            f"{hedge_share:.4f} of the answers open with a hedge, limit {max_hedge_share}",
            where=where,
            fix="empty sft_data.filter_exceptions.hedge_opening, or raise sft_data.max_hedge_rate",
        )
    return identity_claims, hedge_share


def check_clean(conversations: Sequence[Sequence[Message]], index: ItemIndex, max_conversations: int) -> None:
    """GateError for a battery item in the training text, searched in the text read back from the ids."""
    matches = index.conversation_matches(conversations, max_ngram_documents=max_conversations)
    contaminated = [item for item in matches if item is not None]
    if contaminated:
        what = f"{len(contaminated)} conversations hold a battery item, as item {contaminated[0]}"
        raise GateError("contamination", what, where="data/sft", fix=FIX)


def check_shares(supervised: Mapping[str, int], max_share: float) -> dict[str, float]:
    """Each source's share of the supervised tokens; GateError above `max_share`."""
    total = sum(supervised.values())
    shares = {source: tokens / total for source, tokens in sorted(supervised.items())}
    for source, share in shares.items():
        if share > max_share:
            raise GateError(
                "source-share",
                f"source '{source}' makes up {share:.3f} of the supervised tokens, limit {max_share}",
                where="sft_data.sources",
                fix=f"lower sft_data.sources.{source}.max_supervised_tokens",
            )
    return shares


def check_padding(packed: PackedRows, max_share: float, where: str) -> float:
    """Share of row tokens that are padding; GateError above `max_share` when there are rows enough to judge."""
    lengths = packed.lengths()
    used_tokens = sum(int(lengths[packed.numbers(row)].sum()) for row in range(len(packed)))
    share = 1 - used_tokens / (len(packed) * (packed.context_tokens + 1))
    if len(packed) > PAD_GATE_ROWS and share > max_share:
        raise GateError(
            "padding",
            f"{share:.3f} of the rows is padding, limit {max_share}",
            where=where,
            fix="raise sft_data.context_tokens, add short conversations, or raise sft_data.max_pad_share",
        )
    return share

"""The gates on packed pairs as written: whole pairs in every row, one prompt, one supervised answer, no battery item."""

from __future__ import annotations

from athanor.base.errors import GateError
from athanor.chat_data.gates import messages_of
from athanor.data.rows import PackedRows
from athanor.preferences.pairs import items_in
from athanor.text.conversations import Messages
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.words.decontaminate import ItemIndex

FIX = "run the stage dpo-data again by force; if it fails again, this is a bug"


def check_packed(
    tokenizer: Tokenizer, packed: PackedRows, index: ItemIndex, max_documents: int
) -> list[tuple[Messages, Messages]]:
    """Check the rows of one split; returns both conversations of each pair, as read back from their ids."""
    where, lengths = f"data/dpo, {packed.split}", packed.lengths()
    rows = [packed.numbers(row) for row in range(len(packed))]
    for row, numbers in enumerate(rows):
        if any(number % 2 for number in numbers[::2]) or numbers[1::2] != [number + 1 for number in numbers[::2]]:
            raise GateError("pairs", f"row {row} does not hold whole pairs", where=where, fix=FIX)
        if lengths[numbers].sum() > packed.context_tokens + 1:
            raise GateError("rows", f"row {row} is longer than the context", where=where, fix=FIX)
    if sorted(number for numbers in rows for number in numbers) != list(range(packed.conversation_count)):
        raise GateError("rows", "the rows do not hold every pair once", where=where, fix=FIX)
    pairs = []
    for number in range(0, packed.conversation_count, 2):
        chosen, rejected = _conversation(tokenizer, packed, number), _conversation(tokenizer, packed, number + 1)
        if chosen[:-1] != rejected[:-1]:
            raise GateError("pairs", f"the answers of pair {number // 2} have other prompts", where=where, fix=FIX)
        pairs.append((chosen, rejected))
    if contaminated := [item for item in items_in(pairs, index, max_documents) if item is not None]:
        what = f"{len(contaminated)} pairs hold a battery item, as item {contaminated[0]}"
        raise GateError("contamination", what, where=where, fix=FIX)
    return pairs


def _conversation(tokenizer: Tokenizer, packed: PackedRows, number: int) -> Messages:
    """Messages of an entry; GateError unless its last answer, with the stop behind it, is what is supervised."""
    ids, mask = (array.tolist() for array in packed.conversation(number))
    messages = messages_of(tokenizer, ids)
    prompt = prompt_ids(tokenizer, messages[:-1])
    if ids[: len(prompt)] != prompt or mask != [0] * len(prompt) + [1] * (len(ids) - len(prompt)):
        what = f"entry {number} supervises other tokens than the answer to what a server sends"
        raise GateError("mask", what, where=f"data/dpo, {packed.split}", fix=FIX)
    return messages

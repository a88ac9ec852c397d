"""Pairs of a better and a worse answer to one prompt: read in the shapes they come in, chosen, and encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from athanor.base.artifacts import digest
from athanor.base.errors import InputError, ParamsError
from athanor.base.work import ignore
from athanor.preferences.params import PairsSource
from athanor.sources import messages
from athanor.sources.addresses import is_local
from athanor.text import rows
from athanor.text.conversations import Message, Messages, check_messages
from athanor.text.documents import split_of
from athanor.text.rows import MalformedRow
from athanor.tokenizer.chat import prompt_ids, render
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.words.decontaminate import ItemIndex

# Why a row is left out, in the order in which it is asked.
REASONS = ("malformed", "empty", "equal_answers", "contradictions", "copies", "too_long", "contaminated")
Dropped = Mapping[str, Counter[str]]  # source -> reason -> rows left out
Entry = tuple[np.ndarray, np.ndarray]  # ids, uint32; and mask, uint8: 1 = supervised


@dataclass(frozen=True)
class Pair:
    """`prompt` ends with a user message. `key`, by which the split was decided, stands for it."""

    prompt: Messages
    chosen: str
    rejected: str
    source: str
    license: str
    key: str
    split: str

    @property
    def conversations(self) -> tuple[Messages, Messages]:
        """The prompt with the better answer, and with the worse one."""
        return (*self.prompt, Message("assistant", self.chosen)), (*self.prompt, Message("assistant", self.rejected))


def read_pairs(source: PairsSource, val_fraction: float, leave_out: Callable[[str], None] = ignore) -> Iterator[Pair]:
    """`max_rows` pairs of a source, of a hub data set from all over it. `leave_out` gets the reason for each row not taken.

    InputError when more rows are malformed than the source tolerates, with the first of them.
    """
    if source.hub_id is not None and source.revision is None and not is_local(source.hub_id):
        what, where = f"the hub data set {source.hub_id} is not pinned", f"dpo_data source '{source.name}'"
        raise ParamsError(what, where=where, fix="run `python -m athanor pin`")
    columns = [column for column in (source.prompt, source.chosen, source.rejected) if column is not None]
    place = source.as_messages(*columns)
    found = messages.source_rows(place)
    for prompt, chosen, rejected in messages.usable(
        place, found, lambda row, where: _texts(source, row, where), leave_out
    ):
        key = digest([[message.role, message.content] for message in prompt])[:32]
        yield Pair(prompt, chosen, rejected, source.name, source.license, key, split_of(key, val_fraction))


def _texts(source: PairsSource, row: Mapping[str, Any], where: str) -> tuple[Messages, str, str] | str:
    """Prompt and both answers of a row, or the reason for leaving it out. MalformedRow names the column."""
    (before, chosen), (before_rejected, rejected) = (
        _answer(source, row, column, where) for column in (source.chosen, source.rejected)
    )
    asked = None if source.prompt is None else _messages(source, row, source.prompt, "user", where)
    whole = [each for each in (before, before_rejected) if each is not None]
    if not whole and asked is None:
        what = f"'{source.chosen}' and '{source.rejected}' hold answers alone"
        raise MalformedRow(what, where=where, fix="name the column of the prompt in params.yaml")
    prompt = whole[0] if whole else asked
    last = prompt[-1:] if isinstance(row.get(source.prompt), str) else prompt  # a text is the last question alone
    if any(each != prompt for each in whole) or asked not in (None, last):
        what = "prompt, chosen and rejected do not begin with the same messages"
        fix = "correct the row; or set prompt to null in params.yaml, if its column is not what was asked"
        raise MalformedRow(what, where=where, fix=fix)
    if not all(text.strip() for text in (chosen, rejected, *(message.content for message in prompt))):
        return "empty"
    try:
        check_messages([*prompt, Message("assistant", chosen)], where)
    except InputError as error:
        raise MalformedRow(error.what, where=error.where, fix=error.fix) from None
    return "equal_answers" if chosen.strip() == rejected.strip() else (prompt, chosen, rejected)


def _answer(source: PairsSource, row: Mapping[str, Any], column: str, where: str) -> tuple[Messages | None, str]:
    """An answer, and the messages before it; None for these where it stands alone."""
    *before, answer = _messages(source, row, column, "assistant", where) or (Message("", ""),)
    if answer.role != "assistant":
        fix = "let the list end with the answer, or correct the columns in params.yaml"
        raise MalformedRow(f"the last message of column '{column}' is not the assistant's", where=where, fix=fix)
    return tuple(before) or None, answer.content


def _messages(source: PairsSource, row: Mapping[str, Any], column: str, role: str, where: str) -> Messages:
    """The messages in a column; a text is one message of a role."""
    if row.get(column) is None or isinstance(row[column], str):
        return (Message(role, rows.check_text(row.get(column), where, column, messages.MAX_ROW_BYTES)),)
    return tuple(messages.parse(source.as_messages(column), row, where))


# -- those to train on --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """A pair with ids and mask of both its conversations, the better one first; supervised is the last answer alone."""

    pair: Pair
    entries: tuple[Entry, Entry]

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids, _ in self.entries)


def choose(
    tokenizer: Tokenizer,
    pairs: Sequence[Pair],
    capacity: int,
    index: ItemIndex,
    max_documents: int,
    dropped: Dropped,
    contaminated: Counter[str],
) -> list[Encoded]:
    """The pairs that are no copies, contradict no other, fit `capacity` tokens whole and hold no battery item.

    The others are counted in `dropped`, and in `contaminated` by item.
    """
    stated = {(pair.key, pair.chosen, pair.rejected) for pair in pairs}
    seen: set[tuple[str, str, str]] = set()
    fitting = []
    for pair in pairs:
        statement = (pair.key, pair.chosen, pair.rejected)
        if (pair.key, pair.rejected, pair.chosen) in stated:
            dropped[pair.source]["contradictions"] += 1  # and the other one, when it comes
        elif statement in seen:
            dropped[pair.source]["copies"] += 1
        elif (encoded := encode(tokenizer, pair)).tokens > capacity:
            dropped[pair.source]["too_long"] += 1
        else:
            fitting.append(encoded)
        seen.add(statement)
    matches = items_in((encoded.pair.conversations for encoded in fitting), index, max_documents)
    remaining = []
    for encoded, item in zip(fitting, matches, strict=True):
        if item is None:
            remaining.append(encoded)
        else:
            dropped[encoded.pair.source]["contaminated"] += 1
            contaminated[item] += 1
    return remaining


def items_in(pairs: Iterable[tuple[Messages, Messages]], index: ItemIndex, max_documents: int) -> list[str | None]:
    """For each pair of conversations the id of a battery item that it holds, or None.

    A pair is one text, so that its prompt counts once where n-grams of templates are told from those of items.
    """
    texts = [(*chosen, rejected[-1]) for chosen, rejected in pairs]
    return index.conversation_matches(texts, max_ngram_documents=max_documents)


def encode(tokenizer: Tokenizer, pair: Pair) -> Encoded:
    unsupervised = len(prompt_ids(tokenizer, pair.prompt))
    entries = []
    for conversation in pair.conversations:
        ids, mask = (np.array(values) for values in render(tokenizer, conversation))
        mask[:unsupervised] = 0  # earlier answers are part of the question here
        entries.append((ids.astype(np.uint32), mask.astype(np.uint8)))
    return Encoded(pair, (entries[0], entries[1]))

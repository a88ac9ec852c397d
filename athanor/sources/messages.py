"""Conversations of other people's instruction sets, from local files or the hub, in the shapes they come in."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from athanor.base.errors import InputError
from athanor.base.work import Facts, Tick, ignore
from athanor.sources import huggingface, select
from athanor.sources.instruct_params import ChatSelection, MessagesSource
from athanor.sources.wordings import small_letters, wordings
from athanor.text import globs, rows
from athanor.text.conversations import ROLES, Conversation, Message, Messages, check_messages
from athanor.text.documents import split_of
from athanor.text.globs import Files
from athanor.text.rows import MalformedRow

MAX_ROW_BYTES = 64 << 20
SHAPE = 'use [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
# Names of the two keys of an item, and what roles are called.
KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}
SPEAKERS = {"human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant"}
SPEAKERS |= {"chatgpt": "assistant", "bot": "assistant", "system": "system"}

SYSTEM = "system"  # a column of local files

Row = tuple[str, Any]  # the row's location, and its columns or the error of one that cannot be read
T = TypeVar("T")


def conversations(
    source: MessagesSource,
    val_fraction: float,
    tick: Tick = ignore,
    leave_out: Callable[[str], None] = ignore,
) -> Iterator[Conversation]:
    """`max_rows` conversations that the source takes, of a hub data set from all over it.

    `leave_out` gets the reason for each one not taken. InputError when more rows are
    malformed than the source tolerates, with the first of them. The split follows
    the conversation's content, so that a repeated one stays on one side, and all wordings of one.
    """
    val_fraction = val_fraction if source.hold_out else 0.0
    found = _trees(source) if source.shape == "tree" else source_rows(source)
    for messages in usable(source, found, lambda row, where: _messages(source, row, where), leave_out):
        key = Conversation(messages, "", "", "", "").id
        split = split_of(key, val_fraction)
        for wording in dict.fromkeys(_wordings(messages, source)):
            yield Conversation(wording, source.name, source.license, split, key)
        tick(1)


def _wordings(messages: Messages, source: MessagesSource) -> Iterator[Messages]:
    """The conversation as it is, with the user's turns in small letters, and with the last question in other words."""
    yield messages
    if source.as_typed:
        yield tuple(
            replace(message, content=small_letters(message.content)) if message.role == "user" else message
            for message in messages
        )
    *earlier, question, answer = messages
    for text in wordings(question.content, source.wordings):
        yield (*earlier, replace(question, content=text), answer)


def usable(
    source: MessagesSource,
    found: Iterable[Row],
    parse: Callable[[Mapping[str, Any], str], T | str],
    leave_out: Callable[[str], None],
) -> Iterator[T]:
    """What `parse` makes of the first `max_rows` rows that it does not give a reason to leave out, which is a text.

    InputError when it finds more rows malformed than the source tolerates.
    """
    yielded = rows_read = malformed_rows = 0
    first_error = ""
    fraction = source.max_malformed_fraction
    for where, row in found:
        rows_read += 1
        try:
            if isinstance(row, InputError):
                raise row
            parsed = parse(row, where)
        except MalformedRow as error:
            malformed_rows, first_error, parsed = malformed_rows + 1, first_error or str(error), "malformed"
            select.check_malformed(source.name, malformed_rows, rows_read, fraction, first_error, ended=False)
        if isinstance(parsed, str):
            leave_out(parsed)
            continue
        yield parsed
        yielded += 1
        if yielded == source.max_rows:
            break
    if malformed_rows == rows_read > 0:
        what, fix = (
            f"none of {rows_read:,} rows can be read, the first: {first_error}",
            "correct the rows, or their columns",
        )
        raise InputError(what, where=f"source '{source.name}'", fix=fix)
    select.check_malformed(source.name, malformed_rows, rows_read, fraction, first_error, ended=True)


def find(source: MessagesSource) -> Files:
    """The local files, empty for a hub data set. `files` may name a directory: then all data files below it."""
    if source.files is None:
        return []
    path = Path(source.files).expanduser()
    if not path.is_dir():
        return globs.find([source.files])
    suffixes = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".json", ".csv", ".tsv")
    patterns = [f"**/*{suffix}" for suffix in suffixes]
    present = [pattern for pattern in patterns if any(path.glob(pattern))] or patterns[:1]
    return globs.find([f"{escape(str(path))}/{pattern}" for pattern in present])


def probe(source: MessagesSource) -> float:
    """Open the source and read its first rows; InputError where none of them can be used. It takes next to no disk: 0."""
    unusable, first_error = 0, ""
    rows_ = list(itertools.islice(source_rows(source), huggingface.FIRST_ROWS))
    for where, row in rows_ if source.shape != "tree" else ():
        try:
            if isinstance(row, InputError):
                raise row
            _messages(source, row, where)
        except MalformedRow as error:
            unusable, first_error = unusable + 1, first_error or str(error)
    if rows_ and unusable == len(rows_):
        what = f"none of the first {unusable} rows can be read, the first: {first_error}"
        raise InputError(
            what,
            where=source.hub_id or source.files or "",
            fix="correct the rows, or their shape and columns in params.yaml",
        )
    return 0.0


def _messages(source: MessagesSource, row: Mapping[str, Any], where: str) -> Messages | str:
    """The messages of a row, or the reason for leaving it out."""
    selection = source.select
    # The rows of a tree have met their filters one by one.
    if selection is not None and source.shape != "tree" and not select.passes(selection.filters, row):
        return "filters"
    messages = tuple(parse(source, row, where))
    if not messages:
        return "empty"
    if selection is not None:
        messages = _shortened(messages, selection)
    try:
        check_messages(messages, where)
    except InputError as error:
        raise MalformedRow(error.what, where=error.where, fix=error.fix) from None
    if source.hub_id is None:
        rows.check_mojibake("\n".join(message.content for message in messages), where)
    return (selection and _refusal_reason(messages, selection)) or messages


def _shortened(messages: Messages, selection: ChatSelection) -> Messages:
    system = tuple(message for message in messages[:1] if message.role == "system")
    turns = messages[len(system) :]
    if selection.max_pairs is not None:
        turns = turns[: 2 * selection.max_pairs]
    return turns if selection.drop_system else (*system, *turns)


def _refusal_reason(messages: Messages, selection: ChatSelection) -> str | None:
    if selection.max_chars is not None and sum(len(message.content) for message in messages) > selection.max_chars:
        return "long"
    answers = [message.content.casefold() for message in messages if message.role == "assistant"]
    phrases = [phrase.casefold() for phrase in selection.drop_phrases]
    return "phrase" if any(phrase in answer for phrase in phrases for answer in answers) else None


def parse(source: MessagesSource, row: Mapping[str, Any], where: str) -> Iterator[Message]:
    """Messages of one row; none where a question or its answer is empty. MalformedRow names the column."""
    if source.shape == "prompt":
        yield from _prompt(source, row, where)
        return
    column = source.columns[0]
    if source.shape == "tree":
        _, _, role, text, _ = source.columns
        for location, reply in row[column]:
            content = _content(reply[text], text, location) if reply[text] is not None else ""
            yield Message(_role(reply[role], source.shape, location), content)
        return
    value = row.get(column)
    # How some readers return a list of mappings.
    if isinstance(value, Mapping) and all(isinstance(items, list) for items in value.values()):
        value = [dict(zip(value, items, strict=False)) for items in zip(*value.values(), strict=False)]
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        what = f"column '{column}' is not a list of messages but {type(value).__name__}"
        raise MalformedRow(what, where=where, fix=SHAPE)
    if row.get(SYSTEM) and not (value and value[0].get(KEYS[source.shape][0]) == SYSTEM):
        yield Message(SYSTEM, _content(row[SYSTEM], SYSTEM, where))
    for item in value:
        if source.shape == "turns":
            yield Message("user", _content(item.get("input"), "input", where))
            yield Message("assistant", _content(item.get("output"), "output", where))
        else:
            role, content = (item.get(key) for key in KEYS[source.shape])
            if other := [shape for shape, keys in KEYS.items() if role is None and set(keys) <= item.keys()]:
                what = f"a message has no '{KEYS[source.shape][0]}'"
                raise MalformedRow(what, where=where, fix=f"shape: {other[0]} in params.yaml")
            yield Message(_role(role, source.shape, where), _content(content, KEYS[source.shape][1], where))


def _role(role: Any, shape: str, where: str) -> str:
    known = dict.fromkeys(ROLES) if shape == "messages" else SPEAKERS
    if not isinstance(role, str) or role not in known:
        raise MalformedRow(f"a message has the role {role!r}", where=where, fix=f"use {', '.join(known)}")
    return known[role] or role


def _content(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise MalformedRow(f"the {key} of a message is {type(value).__name__}, not text", where=where, fix=SHAPE)
    return rows.check_text(value, where, key, MAX_ROW_BYTES)


def _prompt(source: MessagesSource, row: Mapping[str, Any], where: str) -> Iterator[Message]:
    *question, answer = (rows.check_text(row.get(name), where, name, MAX_ROW_BYTES) for name in source.columns)
    prompt = "\n\n".join(text.strip() for text in question if text.strip())
    if question[0].strip() and answer.strip():
        yield Message("user", prompt)
        yield Message("assistant", answer)


def _columns(source: MessagesSource) -> list[str]:
    filters = source.select.filters if source.select is not None else ()
    return list(dict.fromkeys([*source.columns, *(rule.column for rule in filters)]))


def source_rows(source: MessagesSource) -> Iterator[Row]:
    """The columns that a source names, of every row of its files or its hub data set."""
    columns = _columns(source)
    if source.hub_id is None:
        optional = (SYSTEM,) if source.shape in KEYS and SYSTEM not in columns else ()
        for _, path in find(source):
            yield from rows.read_all_rows(path, columns, MAX_ROW_BYTES, encoding=source.encoding, optional=optional)
        return
    stream = huggingface.open_stream(source.hub_id, source.hub_config, source.hub_split, source.revision, columns)
    if source.max_rows is not None:
        stream = huggingface.pieces(stream, source.hub_id, source.name)
    number = 0
    for row in huggingface.rows_of(stream, source.hub_id, lambda: number):
        number += 1
        yield f"{source.hub_id} row {number}", row


def _trees(source: MessagesSource) -> Iterator[Row]:
    """The best path of each tree as one row whose first column holds its rows; roots in the data's order.

    A message's replies may come anywhere after it, so all rows are held.
    """
    id_column, parent_column, _, _, rank_column = source.columns
    filters = source.select.filters if source.select is not None else ()
    replies: dict[Any, list[Row]] = {}
    for where, row in source_rows(source):
        if isinstance(row, InputError):
            yield where, row
        elif select.passes(filters, row):
            replies.setdefault(_id(row[parent_column]), []).append((where, row))

    def best(rows_: Iterable[Row]) -> Row:
        return min(
            rows_, key=lambda item: item[1][rank_column] if isinstance(item[1][rank_column], (int, float)) else 2**31
        )

    for root in replies.pop(None, []):
        path = [root]
        while children := replies.pop(
            _id(path[-1][1][id_column]), None
        ):  # taken out, or an id that comes twice makes a circle
            path.append(best(children))
        yield root[0], {id_column: path if len(path) % 2 == 0 else path[:-1]}


def _id(value: Any) -> Any:
    """A message's id as a hashable value, whatever type the data set uses."""
    return value if value is None or isinstance(value, (str, int, float)) else repr(value)


def counts(conversations: Sequence[Conversation], left_out: Counter[str]) -> Facts:
    """How much a finished source holds, and what it left out."""
    splits = Counter(conversation.split for conversation in conversations)
    chars = sum(len(message.content) for conversation in conversations for message in conversation.messages)
    sizes = {"rows": len(conversations), "train": splits["train"], "val": splits["val"], "chars": chars}
    sizes["licenses"] = sorted({conversation.license for conversation in conversations})
    return {**sizes, **({"left_out": dict(sorted(left_out.items()))} if left_out else {})}

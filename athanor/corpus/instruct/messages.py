"""Conversations in the usual `messages` form: a list of {role, content}, from local files or the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from athanor.corpus.conversations import ROLES, Conversation, Message, check_messages
from athanor.corpus.documents import split_of
from athanor.corpus.sources import huggingface, rows
from athanor.errors import InputError
from athanor.params.instruct import MessagesSource

MAX_ROW_BYTES = 64 << 20
SHAPE = 'use [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'


def conversations(
    source: MessagesSource, val_fraction: float, tick: Callable[[int], None] = lambda rows_read: None
) -> Iterator[Conversation]:
    """The first `max_rows` conversations in file order, then row order. InputError names file and line of a bad row.

    The split follows the conversation's content, so that a repeated one
    stays on one side.
    """
    for number, (where, value) in enumerate(_values(source)):
        if number == source.max_rows:
            return
        messages = tuple(parse(value, where))
        check_messages(messages, where)
        key = Conversation(messages, "", "", "", "").id
        yield Conversation(messages, source.name, source.license, split_of(key, val_fraction), key)
        tick(1)


def find(source: MessagesSource) -> list[tuple[str, Path]]:
    """The local files, empty for a hub data set. `files` may name a directory: then all data files below it."""
    if source.files is None:
        return []
    path = Path(source.files).expanduser()
    if not path.is_dir():
        return rows.find([source.files])
    tails = [f"**/*{suffix}" for suffix in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")]
    present = [tail for tail in tails if any(path.glob(tail))] or tails[:1]
    return rows.find([str(path / tail) for tail in present])


def parse(value: Any, where: str) -> Iterator[Message]:
    """Messages of one row; keys other than role and content are ignored."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InputError(f"not a list of messages but {type(value).__name__}", where=where, fix=SHAPE)
    for item in value:
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            raise InputError(f"a message has the role {role!r}", where=where, fix=f"use {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise InputError(f"the content of a message is {type(content).__name__}, not text", where=where, fix=SHAPE)
        yield Message(role, rows.check_text(content, where, "content", MAX_ROW_BYTES))


def _values(source: MessagesSource) -> Iterator[tuple[str, Any]]:
    if source.hub_id is None:
        for _, path in find(source):
            for where, row in rows.read_rows(path, [source.column], MAX_ROW_BYTES):
                yield where, row[source.column]
        return
    stream = huggingface.open_stream(source.hub_id, source.hub_config, source.hub_split, source.revision, source.column)
    number = 0
    for row in huggingface.rows_of(stream, source.hub_id, lambda: number):
        number += 1
        yield f"{source.hub_id} row {number}", row.get(source.column)

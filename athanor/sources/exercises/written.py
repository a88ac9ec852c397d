"""Battery items written by hand: JSON lines of the repository, one item each.

    {"category": ..., "kind": ..., "prompt": "text", "accepted": [...], "rejected": [...], "difficulty": "easy"}

`checks` belongs to kind format; the choices of kind likelihood are its
accepted and rejected answers, and a prompt's end in white space decides
whether a space joins it to the choice. `prompt` may be a list of messages.
Difficulty is a judgement of the writer: easy is said in every primer, hard
needs two steps or a rarely told fact.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.text.conversations import DIFFICULTIES, Item, Message, Messages
from athanor.text.rows import json_object

REQUIRED_KEYS = {"category", "kind", "prompt", "accepted", "rejected", "difficulty"}
BY_HAND = ("exact", "numeric", "list", "format", "likelihood")


def read_written(path: str | Path, seed: int) -> list[Item]:
    """The items of a file, their choices in an order drawn from `seed` that puts the right one at every place in turn."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # splitlines() would also cut at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"not readable ({error})", where=path, fix="name another file, or null") from None
    rows = [(number, _row(line, f"{path}:{number}")) for number, line in enumerate(lines, 1) if line.strip()]
    return [_item(row, f"{path}:{number}", index, seed) for index, (number, row) in enumerate(rows)]


def _row(line: str, where: str) -> Facts:
    row = json_object(line, where)
    if not REQUIRED_KEYS <= row.keys() <= REQUIRED_KEYS | {"checks"}:
        raise InputError(
            f"keys are {sorted(row)}", where=where, fix=f"use {', '.join(sorted(REQUIRED_KEYS))} (and checks)"
        )
    texts = [text for key in ("accepted", "rejected", "checks") for text in _texts(row.get(key, []), where)]
    if row["kind"] not in BY_HAND or row["difficulty"] not in DIFFICULTIES or not row["accepted"] or "" in texts:
        raise InputError(
            f"kind {row['kind']!r}, difficulty {row['difficulty']!r}, {len(row['accepted'])} accepted answers",
            where=where,
            fix=f"kinds: {', '.join(BY_HAND)}; difficulties: {', '.join(DIFFICULTIES)}; one accepted answer or more",
        )
    if row["kind"] == "numeric" and not re.fullmatch(r"-?\d+(\.\d+)?", row["accepted"][0]):
        raise InputError(
            f"'{row['accepted'][0]}' is not a number", where=where, fix="let the first accepted answer be one"
        )
    if row["kind"] == "likelihood" and not isinstance(row["prompt"], str):
        raise InputError("choices continue a text, not a chat", where=where, fix="let prompt be a text")
    if (row["kind"] == "format") != bool(row.get("checks")):
        raise InputError("checks belong to kind format, which needs them", where=where)
    return row


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InputError(f"expected a list of texts, found {value!r}", where=where)
    return value


def _item(row: Facts, where: str, index: int, seed: int) -> Item:
    accepted, rejected, choices = tuple(row["accepted"]), tuple(row["rejected"]), ()
    if row["kind"] == "likelihood":
        shuffled = list(rejected)
        random.Random(f"{seed}/written/{index}").shuffle(shuffled)
        shuffled.insert((index + seed) % (len(shuffled) + 1), accepted[0])
        choices = tuple(shuffled)
    return Item(
        row["category"],
        _prompt(row["prompt"], where),
        row["kind"],
        accepted[0],
        accepted,
        rejected,
        checks=tuple(row.get("checks", ())),
        choices=choices,
        difficulty=row["difficulty"],
        origin="written",
    )


def _prompt(prompt: Any, where: str) -> Messages:
    rows = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        messages = tuple(Message(**row) for row in rows)
    except TypeError:
        raise InputError("prompt is neither a text nor messages", where=where) from None
    if not messages or messages[-1].role != "user" or not all(message.content.strip() for message in messages):
        raise InputError("the prompt does not end with a user message, or is empty", where=where)
    return messages

"""Whether an answer has the form of its question's accepted answers.

A scorer of the battery asks one thing of an answer, and forgives the rest: it takes the last number of a text, the first
fenced program, the last of two equal keys. What training pays for is repeated thousands of times, so an answer that says
more than the accepted ones say is paid nothing.
"""

from __future__ import annotations

import ast
import json
import re

from athanor.evaluation.scoring import NUMBER, defines_only, extract_code, read_list
from athanor.text.conversations import Item

MAX_LENGTH_FACTOR = 3  # times the characters of the longest accepted answer
CONTROL = re.compile(r"<\|\w+\|>|</?s>|^\W*(?:system|user|human|assistant|model)\b\W*?:", re.IGNORECASE | re.MULTILINE)
FENCED = re.compile(r"```(?:python|py)?\n[^`]*```")


def has_form(item: Item, text: str) -> bool:
    """Whether a whole answer has the form of the item's accepted answers, be it right or wrong."""
    return is_plain(item, text) and {"code": _is_function, "list": _is_list}.get(item.kind, _is_text)(item, text)


def is_plain(item: Item, text: str) -> bool:
    """Whether a text is not empty, not far too long, and has no characters or marks that no accepted answer has."""
    known = all(char.isprintable() or char in "\n\t" for char in text)
    letters = text.isascii() or not all(map(str.isascii, item.accepted))  # a scorer reads digits of every script
    short = len(text) <= MAX_LENGTH_FACTOR * longest(item)
    return bool(text.strip()) and known and letters and short and not CONTROL.search(text)


def longest(item: Item) -> int:
    """Characters of the longest accepted answer."""
    return max(map(len, item.accepted))


def _is_function(item: Item, text: str) -> bool:
    """One function and nothing else: no text around its fence, no second program, no statement beside it."""
    if "```" in text and not FENCED.fullmatch(text.strip()):
        return False
    code = extract_code(text)
    return defines_only(code, item.tests) and len(ast.parse(code).body) == 1


def _is_list(item: Item, text: str) -> bool:
    return read_list(text)[0] == read_list(item.answer)[0]


def _is_text(item: Item, text: str) -> bool:
    """What the checks of the kind ask for, and else no more lines than an accepted answer, nor words where any may stand."""
    text = text.strip()
    names = {check.partition(" ")[0] for check in item.checks}
    if "json" in names:
        return _is_object(text)
    if item.kind == "numeric" or "one_number" in names:
        return _has_known_lines(item, text)
    lines, words = (max(map(len, map(part, item.accepted))) for part in (str.splitlines, str.split))
    return len(text.splitlines()) <= lines and (item.kind != "format" or len(text.split()) <= words)


def _has_known_lines(item: Item, text: str) -> bool:
    """Whether each line is a line of an accepted answer with other numbers, and a line before the last is a step of one.

    So no number stands beside the one that counts: neither a second answer, nor a list of all there are.
    """
    accepted = [_without_numbers(answer) for answer in item.accepted]
    steps, known = ({line for lines in part for line in lines} for part in ([a[:-1] for a in accepted], accepted))
    *before, last = _without_numbers(text)
    return len(before) < max(map(len, accepted)) and set(before) <= steps and last in known


def _without_numbers(text: str) -> list[str]:
    return [NUMBER.sub("#", line.strip().removesuffix(".")) for line in text.splitlines()]


def _is_object(text: str) -> bool:
    """Whether a text is a JSON object that names nothing twice: a reader takes the last of two equal names."""

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError
        return dict(pairs)

    try:
        return isinstance(json.loads(text, object_pairs_hook=distinct), dict)
    except (ValueError, RecursionError):
        return False

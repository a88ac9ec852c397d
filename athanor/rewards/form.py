"""Whether an answer has the form of its question's accepted answers.

A scorer of the battery asks one thing of an answer, and forgives the rest: it takes the last number of a text, the last
of two equal keys. What training pays for is repeated thousands of times, so an answer that says more than the accepted
ones say is paid nothing.
"""

from __future__ import annotations

import re

from athanor.evaluation.scoring import NUMBER, read_list
from athanor.text.conversations import Item

MAX_LENGTH_FACTOR = 3  # times the characters of the longest accepted answer
CONTROL = re.compile(r"<\|\w+\|>|</?s>|^\W*(?:system|user|human|assistant|model)\b\W*?:", re.IGNORECASE | re.MULTILINE)


def has_form(item: Item, text: str) -> bool:
    """Whether a whole answer has the form of the item's accepted answers, be it right or wrong.

    No answer has it that is empty or far too long, or has characters that no accepted answer has.
    """
    known = all(char.isprintable() or char in "\n\t" for char in text)
    letters = text.isascii() or not all(map(str.isascii, item.accepted))  # a scorer reads digits of every script
    if not (text.strip() and known and letters and len(text) <= MAX_LENGTH_FACTOR * longest(item)):
        return False
    if item.kind == "list":
        return read_list(text)[0] == read_list(item.answer)[0]
    text, names = text.strip(), {check.partition(" ")[0] for check in item.checks}
    if "json" in names:
        # Not a name twice, of which a reader takes the last; the order is free.
        return text[0] + text[-1] == "{}" and _marks(text) in map(_marks, item.accepted)
    if item.kind == "numeric" or "one_number" in names:
        return _has_known_lines(item, text)
    lines, words = (max(map(len, map(part, item.accepted))) for part in (str.splitlines, str.split))
    return len(text.splitlines()) <= lines and (item.kind != "format" or len(text.split()) <= words)


def longest(item: Item) -> int:
    """Characters of the longest accepted answer."""
    return max(map(len, item.accepted))


def _has_known_lines(item: Item, text: str) -> bool:
    """Whether each line is a line of an accepted answer with other numbers, and a line before the last is a step of one.

    So the number that counts is the only one of its line: neither a second answer, nor a list of all there are.
    """
    accepted = [_without_numbers(answer) for answer in item.accepted]
    steps, known = ({line for lines in part for line in lines} for part in ([a[:-1] for a in accepted], accepted))
    *before, last = _without_numbers(text)
    return len(before) < max(map(len, accepted)) and set(before) <= steps and last in known


def _without_numbers(text: str) -> list[str]:
    return [NUMBER.sub("#", line.strip().removesuffix(".")) for line in text.splitlines()]


def _marks(text: str) -> list[str]:
    return sorted(re.findall(r'[][{}:,"]', text))

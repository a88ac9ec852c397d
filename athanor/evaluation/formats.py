"""Checks of an answer's form, for items of kind format: "name argument", each a fact a program can decide."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from athanor.errors import GateError

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
SENTENCE_END = re.compile(r"[.!?]+(?=\s|$)")


def _number(text: str) -> tuple[str, Decimal]:
    """A number that is no other value's equal: to Python true is 1. 1 and 1.0 are one number."""
    return ("number", Decimal(text))


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_int=_number, parse_float=_number)
    except (ValueError, RecursionError):
        return None


def _object_with(text: str, keys: str) -> bool:
    found = _json(text)
    return isinstance(found, dict) and sorted(found) == sorted(keys.split(","))


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _sentences(text: str) -> int:
    """How many sentences; -1 for a text that does not end one."""
    ends = list(SENTENCE_END.finditer(text))
    return len(ends) if ends and ends[-1].end() == len(text) else -1


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "yes_no": lambda text, right: text in (right, f"{right}."),
    "one_of": lambda text, options: text.removesuffix(".") in options.split("|"),
    "one_number": lambda text, right: [Decimal(number) for number in NUMBER.findall(text)] == [Decimal(right)],
    "words": lambda text, n: len(text.split()) == int(n),
    "max_words": lambda text, n: len(text.split()) <= int(n),
    "min_words": lambda text, n: len(text.split()) >= int(n),
    "lines": lambda text, n: len(text.split("\n")) == int(n),
    "each_line": lambda text, same: all(line.strip() == same for line in text.split("\n")),
    "each_starts": lambda text, start: all(line.startswith(start) for line in text.split("\n")),
    "sentences": lambda text, n: _sentences(text) == int(n),
    "upper": lambda text, _: text.upper() == text != text.lower(),
    "lower": lambda text, _: text.lower() == text != text.upper(),
    "starts": lambda text, start: text.startswith(start),
    "ends": lambda text, end: text.endswith(end),
    "contains": _has_word,
    "without": lambda text, word: not _has_word(text, word),
    "no_letter": lambda text, letter: letter.lower() not in text.lower(),
    "json": lambda text, value: _json(text) == _json(value),
    "json_keys": _object_with,
}


def holds(check: str, text: str) -> bool:
    """Whether a stripped answer passes one check; GateError for a check that does not exist."""
    name, _, argument = check.partition(" ")
    if name not in CHECKS:
        raise GateError("battery", f"unknown check '{check}'", fix=f"one of: {', '.join(CHECKS)}")
    return CHECKS[name](text, argument)

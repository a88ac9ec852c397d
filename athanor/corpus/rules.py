"""Heuristic rules: measure every document once, then compare the measures with the thresholds of its kind.

One rule set for all kinds would drop plain code as bad prose, so thresholds
come per kind and a rule can be off. A dropped document has one reason, the
first rule it fails in the order of `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import gt, lt
from typing import Any

import numpy as np

from athanor.corpus import language, repetition
from athanor.corpus.words import Tokens
from athanor.params.clean import KindRules

TOO_LONG = "too_long"
REPEATED_NGRAM_WORDS, TOP_NGRAM_WORDS = 10, 3

_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = b"0123456789"
_WHITE = b" \t\n\r\x0b\x0c"
_PLAIN = b".,;:!?'\"()-"  # marks that running text is made of; every other ASCII mark is a symbol
_HIGH = bytes(range(128, 256))
_CONTINUATION = bytes(range(128, 192))
_BULLETS = ("- ", "* ", "+ ", "• ", "‣ ", "▪ ", "◦ ", "● ")


@dataclass(frozen=True)
class Check:
    """`rule` fails a document when `compare(measure, KindRules.<param>)`."""

    rule: str
    measure: str
    compare: Any
    param: str


CHECKS = (
    Check("too_few_words", "words", lt, "min_words"),
    Check("not_ascii", "ascii", lt, "min_ascii_fraction"),
    Check("few_letters", "letters", lt, "min_letter_fraction"),
    Check("many_digits", "digits", gt, "max_digit_fraction"),
    Check("many_symbols", "symbols", gt, "max_symbol_fraction"),
    Check("long_words", "mean_word", gt, "max_mean_word_chars"),
    Check("long_line", "longest_line", gt, "max_line_chars"),
    Check("bullet_lines", "bullets", gt, "max_bullet_line_fraction"),
    Check("ellipsis_lines", "ellipses", gt, "max_ellipsis_line_fraction"),
    Check("few_stop_words", "stop_words", lt, "min_stop_word_fraction"),
    Check("repeated_lines", "repeated_lines", gt, "max_repeated_line_fraction"),
    Check("consecutive_repeats", "consecutive", gt, "max_consecutive_repeats"),
    Check("repeated_ngrams", "repeated_ngrams", gt, "max_repeated_ngram_fraction"),
    Check("top_ngram", "top_ngram", gt, "max_top_ngram_fraction"),
)
NOT_ENGLISH = "not_english"
RULES = (TOO_LONG, *(check.rule for check in CHECKS), NOT_ENGLISH)


def measure(texts: Sequence[str], tokens: Tokens) -> dict[str, np.ndarray]:
    """Every measure that `CHECKS` names, as one array over the texts."""
    columns: dict[str, Any] = {name: np.zeros(len(texts)) for name in _CHARACTERS + _LINES}
    for number, text in enumerate(texts):
        for name, value in zip(_CHARACTERS, _characters(text), strict=True):
            columns[name][number] = value
        for name, value in zip(_LINES, _lines(text), strict=True):
            columns[name][number] = value
    words = tokens.words
    # A share among a handful of words means nothing: short texts are taken as ordinary.
    few = words.counts < language.JUDGED_WORDS
    columns["words"] = words.counts
    columns["mean_word"] = tokens.mean_word_bytes
    columns["stop_words"] = np.where(few, 1.0, language.english_share(words))
    columns["foreign_lead"] = language.foreign_lead(words)
    columns["consecutive"] = consecutive(tokens)
    columns["repeated_ngrams"] = repetition.duplicate_share(words, REPEATED_NGRAM_WORDS)
    columns["top_ngram"] = np.where(few, 0.0, repetition.top_share(words, TOP_NGRAM_WORDS))
    return columns


def consecutive(tokens: Tokens) -> np.ndarray:
    """int64 [texts]: the most consecutive repeats of an n-gram, counted over words and over words with marks.

    "0, 0, 0" repeats as words and as units; "| | |" has no words; "a, a; a. a" repeats as words only.
    """
    return np.maximum(repetition.consecutive_repeats(tokens.words), repetition.consecutive_repeats(tokens.units))


def verdict(columns: dict[str, np.ndarray], number: int, rules: KindRules) -> tuple[str, float] | None:
    """The first rule that document `number` fails and what was measured, or None."""
    for check in CHECKS:
        limit, value = getattr(rules, check.param), columns[check.measure][number]
        if limit is not None and check.compare(value, limit):
            return check.rule, float(value)
    if rules.english_only and columns["foreign_lead"][number] > 0:
        return NOT_ENGLISH, float(columns["foreign_lead"][number])
    return None


_CHARACTERS = ("ascii", "letters", "digits", "symbols")


def _characters(text: str) -> tuple[float, float, float, float]:
    """Shares of ASCII, letters, digits and symbols among the characters that are not white space."""
    data = text.encode()
    solid = data.translate(None, _WHITE)
    characters = len(solid.translate(None, _CONTINUATION))
    if not characters:
        return 1.0, 0.0, 0.0, 0.0
    letters = len(solid) - len(solid.translate(None, _LETTERS))
    digits = len(solid) - len(solid.translate(None, _DIGITS))
    symbols = len(solid.translate(None, _LETTERS + _DIGITS + _PLAIN + _HIGH))
    high = 0
    if not text.isascii():
        beyond = [char for char in text if char > "\x7f"]
        high = sum(not char.isspace() for char in beyond)
        letters += sum(map(str.isalpha, beyond))
        symbols += sum(not char.isalnum() and not char.isspace() for char in beyond)
        characters -= len(beyond) - high
    characters = max(characters, 1)
    return 1 - high / characters, letters / characters, digits / characters, symbols / characters


_LINES = ("longest_line", "bullets", "ellipses", "repeated_lines")


def _lines(text: str) -> tuple[float, float, float, float]:
    """The longest line in characters; shares of bullet lines, ellipsis lines, and characters in repeated lines."""
    raw = text.split("\n")
    lines = [line for line in map(str.strip, raw) if line]
    if not lines:
        return float(max(map(len, raw))), 0.0, 0.0, 0.0
    bullets = sum(line.startswith(_BULLETS) for line in lines)
    ellipses = sum(line.endswith(("...", "…")) for line in lines)
    size = sum(map(len, lines))
    repeated = size - sum(map(len, set(lines)))
    return float(max(map(len, raw))), bullets / len(lines), ellipses / len(lines), repeated / size

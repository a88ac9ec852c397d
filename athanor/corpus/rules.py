"""Heuristic rules: measure every document once, then compare the measures with the thresholds of its kind.

One rule set for all kinds would drop plain code as bad prose, so thresholds
come per kind and a rule can be off. A dropped document has one reason, the
first rule it fails in the order of `CHECKS`, where a rule that says more comes
before one that it implies: a repeated paragraph is made of repeated lines.

The rules are after MassiveText (Rae et al. 2021: words, symbols, bullets,
ellipses, stop words, repetition), C4 (Raffel et al. 2020: curly brackets,
placeholder text, policy and script notices), FineWeb (Penedo et al. 2024:
sentence ends, short lines, line breaks per word), Codex and StarCoder for code
(Chen et al. 2021, Li et al. 2023: line lengths, comments, encoded data); where
those delete lines, these judge the document, so what stays is as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import gt, lt
from typing import Any

import numpy as np

from athanor.corpus import language, measures, repetition
from athanor.corpus.words import Tokens
from athanor.params.clean import KindRules, RuleParams

TOO_LONG, NOT_ENGLISH = "too_long", "not_english"
# A word in a repeated n-gram is in a repeated shorter one too, so of MassiveText's 5 .. 10 the two ends say enough.
REPEATED_NGRAM_WORDS, TOP_NGRAM_WORDS = (5, 10), (2, 3, 4)


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
    Check("misread", "misread", gt, "max_misread_fraction"),
    Check("encoded_data", "encoded", gt, "max_encoded_fraction"),
    Check("few_letters", "letters", lt, "min_letter_fraction"),
    Check("many_digits", "digits", gt, "max_digit_fraction"),
    Check("many_symbols", "symbols", gt, "max_symbol_fraction"),
    Check("curly_brackets", "curly", gt, "max_curly_bracket_fraction"),
    Check("number_words", "number_words", gt, "max_number_word_fraction"),
    Check("hashes_and_ellipses", "hashes", gt, "max_hash_ellipsis_word_ratio"),
    Check("short_words", "mean_word", lt, "min_mean_word_chars"),
    Check("long_words", "mean_word", gt, "max_mean_word_chars"),
    Check("long_line", "longest_line", gt, "max_line_chars"),
    Check("long_lines", "mean_line", gt, "max_mean_line_chars"),
    Check("bullet_lines", "bullets", gt, "max_bullet_line_fraction"),
    Check("ellipsis_lines", "ellipses", gt, "max_ellipsis_line_fraction"),
    Check("comment_lines", "comments", gt, "max_comment_line_fraction"),
    Check("placeholder_text", "placeholders", gt, "max_placeholder_phrases"),
    Check("boilerplate", "boilerplate", gt, "max_boilerplate_word_ratio"),
    Check("many_links", "links", gt, "max_link_word_ratio"),
    Check(NOT_ENGLISH, "foreign_lead", gt, "english_only"),
    Check("few_stop_words", "stop_words", lt, "min_stop_word_fraction"),
    Check("repeated_paragraphs", "repeated_paragraphs", gt, "max_repeated_paragraph_fraction"),
    Check("repeated_lines", "repeated_lines", gt, "max_repeated_line_fraction"),
    Check("consecutive_repeats", "consecutive", gt, "max_consecutive_repeats"),
    Check("top_2gram", "top_2gram", gt, "max_top_2gram_fraction"),
    Check("top_3gram", "top_3gram", gt, "max_top_3gram_fraction"),
    Check("top_4gram", "top_4gram", gt, "max_top_4gram_fraction"),
    Check("repeated_10grams", "repeated_10grams", gt, "max_repeated_10gram_fraction"),
    Check("repeated_5grams", "repeated_5grams", gt, "max_repeated_5gram_fraction"),
    Check("line_breaks", "line_breaks", gt, "max_line_break_word_ratio"),
    Check("short_lines", "short_lines", gt, "max_short_line_fraction"),
    Check("few_sentence_ends", "sentence_ends", lt, "min_sentence_end_line_fraction"),
    Check("few_turns", "turns", lt, "min_turns"),
    Check("few_speakers", "speakers", lt, "min_speakers"),
    Check("short_turns", "short_turns", gt, "max_short_turn_fraction"),
    Check("low_quality", "quality", lt, "min_quality"),
    Check("toxic", "toxicity", gt, "max_toxicity"),
)
RULES = (TOO_LONG, *(check.rule for check in CHECKS))
SETTINGS = {TOO_LONG: "max_bytes", **{check.rule: check.param for check in CHECKS}}  # key of KindRules of each rule
SCORES = ("quality", "toxicity")  # measures that come from the classifiers; needed where a threshold is set


def measure(texts: Sequence[str], tokens: Tokens) -> dict[str, np.ndarray]:
    """Every measure that `CHECKS` names but `SCORES`, as one array of finite numbers over the texts."""
    columns: dict[str, np.ndarray] = {}
    for names, measured in (
        (measures.CHARACTERS, measures.characters), (measures.LINES, measures.lines), (measures.TURNS, measures.turns)
    ):
        rows = np.array([measured(text) for text in texts], np.float64).reshape(len(texts), len(names))
        columns |= dict(zip(names, rows.T, strict=True))
    words = tokens.words
    counts = np.maximum(words.counts, 1)
    few = words.counts < language.JUDGED_WORDS  # a share among a handful of words means nothing

    def per_word(count: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.where(few, 0.0, np.asarray(count, np.float64) / counts)

    numbers = np.concatenate([[0], np.cumsum(tokens.numeric)])
    known = language.measure(words)
    columns |= {
        "words": words.counts,
        "mean_word": np.where(few & (tokens.mean_word_bytes < 4), 4.0, tokens.mean_word_bytes),
        "number_words": per_word(np.diff(numbers[words.offsets])),
        "hashes": per_word([text.count("#") + text.count("...") + text.count("…") for text in texts]),
        "links": per_word([text.count("://") for text in texts]),
        "line_breaks": per_word([text.count("\n") for text in texts]),
        "encoded": measures.encoded(texts),
        "stop_words": known["stop_words"],
        "foreign_lead": known["foreign_lead"],
        "placeholders": known["placeholders"],
        "boilerplate": per_word(known["boilerplate"]),
        "consecutive": consecutive(tokens),
    }
    repeats = repetition.Repeats(words)
    for size in sorted({*TOP_NGRAM_WORDS, *REPEATED_NGRAM_WORDS}):
        repeats.grow(size)
        if size in TOP_NGRAM_WORDS:
            columns[f"top_{size}gram"] = np.where(few, 0.0, repeats.top_share())
        if size in REPEATED_NGRAM_WORDS:
            columns[f"repeated_{size}grams"] = repeats.duplicate_share()
    return columns


def consecutive(tokens: Tokens) -> np.ndarray:
    """int64 [texts]: the most consecutive repeats of an n-gram, counted over words and over words with marks.

    "0, 0, 0" repeats as words and as units; "| | |" has no words; "a, a; a. a" repeats as words only.
    """
    return np.maximum(repetition.consecutive_repeats(tokens.words), repetition.consecutive_repeats(tokens.units))


def _limit(check: Check, rules: KindRules) -> float | None:
    """The number to compare with, or None where the rule is off."""
    limit = getattr(rules, check.param)
    return {True: 0.0, False: None}[limit] if isinstance(limit, bool) else limit


def verdict(columns: Mapping[str, np.ndarray], number: int, rules: KindRules) -> tuple[str, float] | None:
    """The first rule that document `number` fails and what was measured, or None."""
    for check in CHECKS:
        limit = _limit(check, rules)
        if limit is not None and check.compare(columns[check.measure][number], limit):
            return check.rule, float(columns[check.measure][number])
    return None


def verdicts(
    columns: Mapping[str, np.ndarray], kinds: Sequence[str], params: RuleParams
) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [documents]: number in `RULES` of the first rule failed, -1 for none; float64: what was measured)."""
    failed = np.full(len(kinds), -1)
    values = np.zeros(len(kinds))
    names = np.array(kinds, object)
    for kind in sorted(set(kinds)):
        rules = getattr(params, kind)
        left = np.flatnonzero(names == kind)
        for number, check in enumerate(CHECKS, 1):
            limit = _limit(check, rules)
            if limit is None:
                continue
            measured = columns[check.measure][left]
            fails = check.compare(measured, limit)
            failed[left[fails]] = number
            values[left[fails]] = measured[fails]
            left = left[~fails]
    return failed, values

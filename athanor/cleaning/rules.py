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

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from athanor.cleaning.params import KindRules, RuleParams
from athanor.quality import language, repetition
from athanor.words.words import Columns, Tokens, prefix_sums

TOO_LONG, NOT_ENGLISH = "too_long", "not_english"
# A word in a repeated n-gram is in a repeated shorter one too, so of MassiveText's 5 .. 10 the two ends say enough.
REPEATED_NGRAM_WORDS, TOP_NGRAM_WORDS = (5, 10), (2, 3, 4)


class Check(NamedTuple):
    """`rule` fails a document whose `measure` is smaller or greater (`sign`) than the number at KindRules.<param>."""

    rule: str
    measure: str
    sign: str
    param: str

    def fails(self, measured: Any, limit: float) -> Any:
        return measured < limit if self.sign == "<" else measured > limit


# Rule, measure, sign, parameter.
CHECKS = tuple(
    Check(*line.split())
    for line in """
    too_few_words        words               < min_words
    not_ascii            ascii               < min_ascii_fraction
    misread              misread             > max_misread_fraction
    encoded_data         encoded             > max_encoded_fraction
    few_letters          letters             < min_letter_fraction
    many_digits          digits              > max_digit_fraction
    many_symbols         symbols             > max_symbol_fraction
    curly_brackets       curly               > max_curly_bracket_fraction
    number_words         number_words        > max_number_word_fraction
    hashes_and_ellipses  hashes              > max_hash_ellipsis_word_ratio
    short_words          mean_word           < min_mean_word_chars
    long_words           mean_word           > max_mean_word_chars
    long_line            longest_line        > max_line_chars
    long_lines           mean_line           > max_mean_line_chars
    bullet_lines         bullets             > max_bullet_line_fraction
    ellipsis_lines       ellipses            > max_ellipsis_line_fraction
    comment_lines        comments            > max_comment_line_fraction
    placeholder_text     placeholders        > max_placeholder_phrases
    boilerplate          boilerplate         > max_boilerplate_word_ratio
    many_links           links               > max_link_word_ratio
    not_english          foreign_lead        > english_only
    few_stop_words       stop_words          < min_stop_word_fraction
    repeated_paragraphs  repeated_paragraphs > max_repeated_paragraph_fraction
    repeated_lines       repeated_lines      > max_repeated_line_fraction
    consecutive_repeats  consecutive         > max_consecutive_repeats
    top_2gram            top_2gram           > max_top_2gram_fraction
    top_3gram            top_3gram           > max_top_3gram_fraction
    top_4gram            top_4gram           > max_top_4gram_fraction
    repeated_10grams     repeated_10grams    > max_repeated_10gram_fraction
    repeated_5grams      repeated_5grams     > max_repeated_5gram_fraction
    line_breaks          line_breaks         > max_line_break_word_ratio
    short_lines          short_lines         > max_short_line_fraction
    few_sentence_ends    sentence_ends       < min_sentence_end_line_fraction
    few_turns            turns               < min_turns
    few_speakers         speakers            < min_speakers
    short_turns          short_turns         > max_short_turn_fraction
    low_quality          quality             < min_quality
    toxic                toxicity            > max_toxicity
    """.strip().splitlines()
)
RULES = (TOO_LONG, *(check.rule for check in CHECKS))
SETTINGS = {TOO_LONG: "max_bytes", **{check.rule: check.param for check in CHECKS}}  # key of KindRules of each rule
SCORES = ("quality", "toxicity")  # measures that come from the classifiers; needed where a threshold is set


def measure(texts: Sequence[str], tokens: Tokens) -> dict[str, np.ndarray]:
    """Every measure that `CHECKS` names but `SCORES`, as one array of finite numbers over the texts."""
    columns: dict[str, np.ndarray] = {}
    for names, measure_text in ((CHARACTERS, characters), (LINES, lines), (TURNS, turns)):
        rows = np.array([measure_text(text) for text in texts], np.float64).reshape(len(texts), len(names))
        columns |= dict(zip(names, rows.T, strict=True))
    words = tokens.words
    counts = np.maximum(words.counts, 1)
    too_short = words.counts < language.JUDGED_WORDS  # a share among a handful of words means nothing

    def per_word(count: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.where(too_short, 0.0, np.asarray(count, np.float64) / counts)

    numbers = prefix_sums(tokens.numeric)
    language_measures = language.measure(words)
    columns |= {
        "words": words.counts,
        "mean_word": np.where(too_short & (tokens.mean_word_bytes < 4), 4.0, tokens.mean_word_bytes),
        "number_words": per_word(np.diff(numbers[words.offsets])),
        "hashes": per_word([text.count("#") + text.count("...") + text.count("…") for text in texts]),
        "links": per_word([text.count("://") for text in texts]),
        "line_breaks": per_word([text.count("\n") for text in texts]),
        "encoded": encoded(texts),
        **language_measures,
        "boilerplate": per_word(language_measures["boilerplate"]),
        "consecutive": consecutive(tokens),
    }
    repeats = repetition.Repeats(words)
    for size in sorted({*TOP_NGRAM_WORDS, *REPEATED_NGRAM_WORDS}):
        repeats.grow(size)
        if size in TOP_NGRAM_WORDS:
            columns[f"top_{size}gram"] = np.where(too_short, 0.0, repeats.top_share())
        if size in REPEATED_NGRAM_WORDS:
            columns[f"repeated_{size}grams"] = repeats.duplicate_share()
    return columns


def consecutive(tokens: Tokens) -> np.ndarray:
    """int64 [texts]: the most consecutive repeats of an n-gram, counted over words and over words with marks.

    "0, 0, 0" repeats as words and as units; "| | |" has no words; "a, a; a. a" repeats as words only.
    """
    return np.maximum(repetition.consecutive_repeats(tokens.words), repetition.consecutive_repeats(tokens.units))


def _limit(check: Check, rules: KindRules) -> float | None:
    """The threshold of a rule, or None if the rule is off."""
    limit = getattr(rules, check.param)
    return {True: 0.0, False: None}[limit] if isinstance(limit, bool) else limit


def verdicts(columns: Columns, kinds: Sequence[str], params: RuleParams) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [documents]: number in `RULES` of the first rule failed, -1 for none; float64: what was measured)."""
    failed = np.full(len(kinds), -1)
    values = np.zeros(len(kinds))
    names = np.array(kinds, object)
    for kind in sorted(set(kinds)):
        rules = getattr(params, kind)
        remaining = np.flatnonzero(names == kind)
        for number, check in enumerate(CHECKS, 1):
            limit = _limit(check, rules)
            if limit is None:
                continue
            measured = columns[check.measure][remaining]
            fails = check.fails(measured, limit)
            failed[remaining[fails]] = number
            values[remaining[fails]] = measured[fails]
            remaining = remaining[~fails]
    return failed, values


# -- measures of the characters, lines and turns of single texts; words are measured for a whole batch --------------

_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = b"0123456789"
_WHITE = b" \t\n\r\x0b\x0c"
_PLAIN = b".,;:!?'\"()-"  # marks that running text is made of; every other ASCII mark is a symbol
_HIGH = bytes(range(128, 256))
_CONTINUATION = bytes(range(128, 192))

_BULLETS = ("- ", "* ", "+ ", "• ", "‣ ", "▪ ", "◦ ", "● ")
_ENDS = ".!?…\"'”’»。！？」』۔؟।॥።"  # of a sentence or a quotation
_COMMENTS = ("# ", "//", "/*", "* ", "*/", "-- ", "; ", ";;", "% ", "#!", '"""', "'''", "<!--")
JUDGED_LINES = 5  # a share among fewer lines, which may be long paragraphs, means nothing
SHORT_LINE_CHARS = 30  # FineWeb's (Penedo et al. 2024)
SHORT_TURN_WORDS = 2

# A turn begins a line with its speaker: a name of up to 30 characters, which may be bold, and a colon.
_TURN = re.compile(r"\n[*_]{0,2}((?:[A-Z]|user|assistant|system|human|bot)[A-Za-z0-9 .'’-]{0,30}):[*_]{0,2}(?=\s|$)")

# Base64 and other encodings of data: unbroken runs that no word reaches. Hexadecimal escapes count by number.
ENCODED_RUN = 64
_ENCODED = np.zeros(256, bool)
_ENCODED[list(_LETTERS + _DIGITS + b"+/")] = True

CHARACTERS = "ascii letters digits symbols curly misread".split()
LINES = "longest_line mean_line bullets ellipses comments sentence_ends short_lines repeated_lines repeated_paragraphs".split()
TURNS = "turns speakers short_turns".split()


def characters(text: str) -> tuple[float, ...]:
    """Shares of ASCII, letters, digits, symbols, curly brackets and U+FFFD of what is not white space."""
    data = text.encode()
    visible = data.translate(None, _WHITE)
    count = len(visible.translate(None, _CONTINUATION))
    if not count:
        return 1.0, 0.0, 0.0, 0.0, 0.0, 0.0
    letters = len(visible) - len(visible.translate(None, _LETTERS))
    digits = len(visible) - len(visible.translate(None, _DIGITS))
    symbols = len(visible.translate(None, _LETTERS + _DIGITS + _PLAIN + _HIGH))
    curly = visible.count(b"{") + visible.count(b"}")
    high = misread = 0
    if not text.isascii():
        non_ascii = [char for char in text if char > "\x7f"]
        high = sum(not char.isspace() for char in non_ascii)
        # Vowel signs of Hindi and Thai are marks (M) on a letter; the stops and quotes of any script (P) are no symbols.
        categories = [unicodedata.category(char)[0] for char in non_ascii]
        letters += categories.count("L") + categories.count("M")
        symbols += categories.count("S") + categories.count("C")
        misread = non_ascii.count("\ufffd")
        count -= len(non_ascii) - high
    count = max(count, 1)
    return 1 - high / count, letters / count, digits / count, symbols / count, curly / count, misread / count


def lines(text: str) -> tuple[float, ...]:
    """Longest and mean line in characters, then shares.

    Of lines that are not blank: bullets, ellipses, comments, sentence ends,
    short lines, all as in ordinary text where there are fewer than five lines.
    Of characters in them: repeated lines, repeated paragraphs.
    """
    all_lines = text.split("\n")
    nonblank = [line for line in map(str.strip, all_lines) if line]
    if not nonblank:
        return float(max(map(len, all_lines))), 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0
    count = len(nonblank)
    sizes = list(map(len, nonblank))
    size = sum(sizes)
    repeated = size - sum(map(len, set(nonblank)))
    line_shares = (0.0, 0.0, 0.0, 1.0, 0.0)
    if count >= JUDGED_LINES:
        dots = "..." in text or "…" in text  # the few texts that have any are looked at line by line
        ellipses = sum(line.endswith(("...", "…")) for line in nonblank) if dots else 0
        bullets = sum(line.startswith(_BULLETS) for line in nonblank)
        comments = sum(line.startswith(_COMMENTS) for line in nonblank)
        ends = sum(map(_ENDS.__contains__, [line[-1] for line in nonblank]))
        short = sum(map(SHORT_LINE_CHARS.__gt__, sizes))
        line_shares = (bullets / count, ellipses / count, comments / count, ends / count, short / count)
    paragraphs = [paragraph for paragraph in map(str.strip, text.split("\n\n")) if paragraph] if repeated else []
    repeated_chars = sum(map(len, paragraphs)) - sum(map(len, set(paragraphs)))
    longest = float(max(map(len, all_lines)))
    return longest, size / count, *line_shares, repeated / size, repeated_chars / max(sum(map(len, paragraphs)), 1)


def turns(text: str) -> tuple[float, ...]:
    """Number of turns, number of speakers, and the share of turns of fewer than two words."""
    matches = list(_TURN.finditer("\n" + text))
    if not matches:
        return 0.0, 0.0, 0.0
    speakers = {match[1].casefold() for match in matches}
    ends = [*(match.start() for match in matches[1:]), len(text) + 1]
    turn_texts = (text[match.end() - 1 : end - 1] for match, end in zip(matches, ends, strict=True))
    short_count = sum(len(turn.split(None, SHORT_TURN_WORDS)) < SHORT_TURN_WORDS for turn in turn_texts)
    return float(len(matches)), float(len(speakers)), short_count / len(matches)


def encoded(texts: Sequence[str]) -> np.ndarray:
    """float64 [texts]: the share of bytes in unbroken runs of letters, digits, + and /, or in hexadecimal escapes."""
    encoded_texts = [text.encode() for text in texts]
    sizes = np.array([len(item) for item in encoded_texts], np.int64)
    data = np.frombuffer(b"\n".join([b"", *encoded_texts, b""]), np.uint8)
    gaps = np.flatnonzero(~_ENCODED[data])
    runs = np.diff(gaps) - 1
    long = np.flatnonzero(runs >= ENCODED_RUN)
    starts = prefix_sums(sizes + 1)
    owner = np.searchsorted(starts, gaps[long], "right") - 1
    encoded_bytes = np.bincount(owner, weights=runs[long], minlength=len(encoded_texts))[: len(encoded_texts)]
    escapes = np.array([4 * item.count(b"\\x") for item in encoded_texts])
    return np.minimum((encoded_bytes + escapes) / np.maximum(sizes, 1), 1.0)

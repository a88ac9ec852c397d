"""Ten heuristics of good running text, each 0 to 1, and their weighted sum.

They say how a text is made and nothing of what it says: variety of words,
sentences, paragraphs, function words, capitals, repetition, boilerplate,
template remains, links. They are made for English prose, so code scores lower
by their nature (the Python standard library has a median of 0.82 as code and
0.91 as docstrings), and thresholds come per kind.

Every figure of a text is made of whole numbers counted in that text, so its
score does not depend on the batch it is scored in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from athanor.quality import language, repetition
from athanor.words.words import Columns, Tokens, Words, prefix_sums

WEIGHTS = {
    "diversity": 0.15,
    "sentences": 0.15,
    "naturalness": 0.15,
    "repetition": 0.15,
    "boilerplate": 0.10,
    "links": 0.10,
    "length": 0.05,
    "paragraphs": 0.05,
    "capitals": 0.05,
    "template": 0.05,
}
JUDGED_WORDS = 20  # fewer words score 0
# What pages say about themselves. A line counts once when any of its phrases occurs.
BOILERPLATE = tuple(
    tuple(line.strip().split(", "))
    for line in """
    cookies, cookie policy, accept cookies
    newsletter, mailing list
    log in, sign in, login, log out
    sign up, register now, create account
    copyright, all rights
    enable javascript, javascript disabled
    unsubscribe, opt out
    privacy policy, privacy notice
    click here, read more, learn more
    share this, follow us, tweet this
    advertisement, sponsored
    to cart, shopping cart, free shipping
    skip to, to top, previous next
    """.strip().splitlines()
)
LOREM = ("lorem ipsum",)
NOTES = ("TODO", "FIXME", "XXX", "HACK")
_SLOT = re.compile(r"\{[A-Za-z_]+\}")
_AT_HOST = re.compile(r"@[A-Za-z0-9-]+\.[A-Za-z]")


def heuristics(texts: Sequence[str], tokens: Tokens, columns: Columns | None = None) -> dict[str, np.ndarray]:
    """float64 [texts] for each name in WEIGHTS. `columns` of `rules.measure`, if at hand, spare some of the work."""
    words = tokens.words
    count = words.counts
    layout = _layout(texts)
    *pages, lorem = _phrases(words)
    template, links = _characters(texts)
    template += lorem
    boilerplate_kinds = np.sum(pages, axis=0)
    per_hundred = 100 * links / np.maximum(count, 1)
    variety = _distinct(words) / np.sqrt(np.maximum(count, 1))
    if columns is None:
        repeats = repetition.Repeats(words)
        repeats.grow(2)
        repeats.grow(3)
        columns = {"stop_words": language.measure(words)["stop_words"], "top_3gram": repeats.top_share()}
    stop, top = columns["stop_words"], columns["top_3gram"] / 3  # as a share of the trigrams
    return {
        "diversity": _steps(variety, (2, 0.1), (4, (2, 4, 0.3, 0.7)), (20, (4, 12, 0.8, 1.0)), otherwise=0.9),
        "sentences": _sentences(layout),
        "naturalness": _steps(stop, (0.2, 0.3), (0.3, 0.6), (0.6, 1.0), (0.7, 0.7), otherwise=0.3),
        "repetition": np.where(count < 50, 0.7, np.where(top > 0.05, 0.2, np.where(top > 0.02, 0.6, 1.0))),
        "boilerplate": np.choose(np.minimum((boilerplate_kinds + 1) // 2, 3), [1.0, 0.7, 0.4, 0.1]),
        "links": _steps(per_hundred, (0.5, 1.0), (2, 0.7), (5, 0.4), otherwise=0.1),
        "length": _steps(
            count, (50, 0.2), (200, (50, 200, 0.5, 0.8)), (5000, 1.0), (20000, (5000, 20000, 1.0, 0.7)), otherwise=0.5
        ),
        "paragraphs": _paragraphs(layout),
        "capitals": np.where(
            layout.long_lines == 0, 0.5, np.minimum(layout.capital_lines / np.maximum(layout.long_lines, 1) + 0.2, 1.0)
        ),
        "template": np.maximum(1.0 - 0.3 * template, 0.2),
    }


def score(texts: Sequence[str], tokens: Tokens, columns: Columns | None = None) -> np.ndarray:
    """float64 [texts]: the weighted sum, 0 for texts of fewer than JUDGED_WORDS words."""
    scores = heuristics(texts, tokens, columns)
    total = np.zeros(len(texts))
    for name, weight in WEIGHTS.items():
        total += weight * scores[name]
    return np.where(tokens.words.counts < JUDGED_WORDS, 0.0, total)


Step = tuple[float, float | tuple[float, float, float, float]]


def _steps(values: np.ndarray, *steps: Step, otherwise: float) -> np.ndarray:
    """A piecewise function: the first step whose limit exceeds the value gives a number, or a line from (x0, y0) to (x1, y1)."""
    out = np.full(len(values), otherwise)
    for limit, value in reversed(steps):
        line = np.interp(values, value[:2], value[2:]) if isinstance(value, tuple) else value
        out = np.where(values < limit, line, out)
    return out


def _distinct(words: Words) -> np.ndarray:
    """int64 [texts]: number of different words."""
    texts = np.arange(len(words), dtype=np.uint64)
    keys = np.sort((words.hashes >> np.uint64(20)) | np.repeat(texts << np.uint64(44), words.counts))
    is_new = np.ones(len(keys), np.int64)
    is_new[1:] = keys[1:] != keys[:-1]
    return np.diff(prefix_sums(is_new)[words.offsets])


_LEXICON = language.Lexicon(phrase for group in (*BOILERPLATE, LOREM) for phrase in group)
_PHRASES = [_LEXICON.phrases(group) for group in (*BOILERPLATE, LOREM)]


def _phrases(words: Words) -> list[np.ndarray]:
    """bool [texts]: whether it occurs, for each line of BOILERPLATE and for LOREM."""
    indices = _LEXICON.find(words.hashes)
    positions = np.flatnonzero(indices >= 0)
    return [language.occurrences(words, positions, indices[positions], phrases) > 0 for phrases in _PHRASES]


def _characters(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """int64 [texts]: kinds of template remains (slots, notes to self), and links with mail addresses."""
    template, links = np.zeros((2, len(texts)), np.int64)
    for number, text in enumerate(texts):
        template[number] = any(note in text for note in NOTES)
        if "{" in text:
            template[number] += _SLOT.search(text) is not None
        links[number] = text.count("://")
        if "@" in text:
            starts = (match.start() for match in _AT_HOST.finditer(text))
            links[number] += sum(text[position - 1 : position].isalnum() for position in starts)
    return template, links


@dataclass(frozen=True)
class _Layout:
    """Counts for each text, int64 [texts]. Here a word is a run of characters between white space."""

    words: np.ndarray
    sentences: np.ndarray  # of at least one word; they end at . ! ? before white space, and at a blank line
    squares: np.ndarray  # sum of (words of a sentence)^2
    paragraphs: np.ndarray  # runs of lines that are not blank
    long_lines: np.ndarray  # of more than 10 bytes between the white space
    capital_lines: np.ndarray  # of those: begin with A-Z or a digit


_VISIBLE = ~np.isin(np.arange(256), list(b" \t\n\r\x0b\x0c"))
_ENDS = np.isin(np.arange(256), list(b".!?"))
_CAPITAL = np.isin(np.arange(256), list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"))


def _layout(texts: Sequence[str]) -> _Layout:
    encoded = [text.encode() for text in texts]
    data = np.frombuffer(b"\n\n".join([*encoded, b""]), np.uint8)  # a blank line separates the texts
    text_ends = np.cumsum([len(item) + 2 for item in encoded], dtype=np.int64)
    visible = _VISIBLE[data]
    is_word_start = visible.copy()
    is_word_start[1:] &= ~visible[:-1]
    starts = np.flatnonzero(is_word_start)  # of words
    word_ends = np.flatnonzero(visible[:-1] & ~visible[1:])  # as many as starts, because the data end with a newline
    newlines = np.flatnonzero(data == 10)
    # Words up to each line end: a line is blank when it adds none.
    ends = np.searchsorted(starts, newlines)
    before = np.concatenate([[0], ends[:-1]])
    nonblank = np.flatnonzero(ends > before)
    starts_paragraph = (
        np.concatenate([[True], nonblank[1:] != nonblank[:-1] + 1]) if len(nonblank) else np.zeros(0, bool)
    )
    line_owner = np.searchsorted(text_ends, newlines[nonblank], "right")
    first, last = starts[before[nonblank]], word_ends[ends[nonblank] - 1]
    is_long = last - first + 1 > 10
    text_count = len(texts)

    ends_sentence = _ENDS[data[word_ends]]  # words that end a sentence
    ends_sentence[ends[nonblank[np.concatenate([starts_paragraph[1:], [True]])]] - 1 if len(nonblank) else []] = True
    sentence_ends = np.flatnonzero(ends_sentence)
    sizes = np.diff(sentence_ends, prepend=-1)
    owner = np.searchsorted(text_ends, starts[sentence_ends], "right")
    return _Layout(
        words=np.diff(np.searchsorted(starts, text_ends), prepend=0),
        sentences=np.bincount(owner, minlength=text_count),
        squares=np.bincount(owner, sizes.astype(np.float64) ** 2, minlength=text_count).astype(np.int64),
        paragraphs=np.bincount(line_owner[starts_paragraph], minlength=text_count),
        long_lines=np.bincount(line_owner[is_long], minlength=text_count),
        capital_lines=np.bincount(line_owner[is_long & _CAPITAL[data[first]]], minlength=text_count),
    )


def _sentences(layout: _Layout) -> np.ndarray:
    """Mean length and its variety: 0.6 for 10 to 50 words a sentence, 0.4 for a standard deviation of 8 or more."""
    count = np.maximum(layout.sentences, 1)
    mean = layout.words / count
    deviation = np.sqrt(np.maximum(layout.squares / count - mean**2, 0.0))
    size = _steps(mean, (5, 0.3), (10, 0.6), (np.nextafter(50, 51), 1.0), otherwise=0.5)
    return np.where(layout.sentences < 2, 0.3, 0.6 * size + 0.4 * np.minimum(deviation / 8, 1.0))


def _paragraphs(layout: _Layout) -> np.ndarray:
    mean = layout.words / np.maximum(layout.paragraphs, 1)
    many = np.where((mean >= 30) & (mean <= 200), 1.0, np.where(mean < 10, 0.4, 0.7))
    single = np.where(layout.words > 200, 0.5, 0.7)
    return np.where(layout.paragraphs == 0, 0.2, np.where(layout.paragraphs == 1, single, many))

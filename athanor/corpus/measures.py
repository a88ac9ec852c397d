"""What is measured of the characters, lines and turns of single texts; words are measured for a whole batch."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = b"0123456789"
_WHITE = b" \t\n\r\x0b\x0c"
_PLAIN = b".,;:!?'\"()-"  # marks that running text is made of; every other ASCII mark is a symbol
_HIGH = bytes(range(128, 256))
_CONTINUATION = bytes(range(128, 192))

_BULLETS = ("- ", "* ", "+ ", "• ", "‣ ", "▪ ", "◦ ", "● ")
_ENDS = ".!?…\"'”’"  # of a sentence or a quotation
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

CHARACTERS = ("ascii", "letters", "digits", "symbols", "curly", "misread")
LINES = (
    "longest_line", "mean_line", "bullets", "ellipses", "comments", "sentence_ends", "short_lines",
    "repeated_lines", "repeated_paragraphs",
)
TURNS = ("turns", "speakers", "short_turns")


def characters(text: str) -> tuple[float, ...]:
    """Shares of ASCII, letters, digits, symbols, curly brackets and U+FFFD of what is not white space."""
    data = text.encode()
    solid = data.translate(None, _WHITE)
    count = len(solid.translate(None, _CONTINUATION))
    if not count:
        return 1.0, 0.0, 0.0, 0.0, 0.0, 0.0
    letters = len(solid) - len(solid.translate(None, _LETTERS))
    digits = len(solid) - len(solid.translate(None, _DIGITS))
    symbols = len(solid.translate(None, _LETTERS + _DIGITS + _PLAIN + _HIGH))
    curly = solid.count(b"{") + solid.count(b"}")
    high = misread = 0
    if not text.isascii():
        beyond = [char for char in text if char > "\x7f"]
        high = sum(not char.isspace() for char in beyond)
        letters += sum(map(str.isalpha, beyond))
        symbols += sum(not char.isalnum() and not char.isspace() for char in beyond)
        misread = beyond.count("\ufffd")
        count -= len(beyond) - high
    count = max(count, 1)
    return 1 - high / count, letters / count, digits / count, symbols / count, curly / count, misread / count


def lines(text: str) -> tuple[float, ...]:
    """Longest and mean line in characters, then shares.

    Of lines that are not blank: bullets, ellipses, comments, sentence ends,
    short lines, all as in ordinary text where there are fewer than five lines.
    Of characters in them: repeated lines, repeated paragraphs.
    """
    raw = text.split("\n")
    solid = [line for line in map(str.strip, raw) if line]
    if not solid:
        return float(max(map(len, raw))), 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0
    count = len(solid)
    sizes = list(map(len, solid))
    size = sum(sizes)
    repeated = size - sum(map(len, set(solid)))
    of_lines = (0.0, 0.0, 0.0, 1.0, 0.0)
    if count >= JUDGED_LINES:
        dots = "..." in text or "…" in text  # the few texts that have any are looked at line by line
        ellipses = sum(line.endswith(("...", "…")) for line in solid) if dots else 0
        bullets = sum(line.startswith(_BULLETS) for line in solid)
        comments = sum(line.startswith(_COMMENTS) for line in solid)
        ends = sum(map(_ENDS.__contains__, [line[-1] for line in solid]))
        short = sum(map(SHORT_LINE_CHARS.__gt__, sizes))
        of_lines = (bullets / count, ellipses / count, comments / count, ends / count, short / count)
    paragraphs = [part for part in map(str.strip, text.split("\n\n")) if part] if repeated else []
    again = sum(map(len, paragraphs)) - sum(map(len, set(paragraphs)))
    longest = float(max(map(len, raw)))
    return longest, size / count, *of_lines, repeated / size, again / max(sum(map(len, paragraphs)), 1)


def turns(text: str) -> tuple[float, ...]:
    """Number of turns, number of speakers, and the share of turns of fewer than two words."""
    found = list(_TURN.finditer("\n" + text))
    if not found:
        return 0.0, 0.0, 0.0
    speakers = {match[1].casefold() for match in found}
    ends = [*(match.start() for match in found[1:]), len(text) + 1]
    spoken = (text[match.end() - 1 : end - 1] for match, end in zip(found, ends, strict=True))
    short = sum(len(said.split(None, SHORT_TURN_WORDS)) < SHORT_TURN_WORDS for said in spoken)
    return float(len(found)), float(len(speakers)), short / len(found)


def encoded(texts: Sequence[str]) -> np.ndarray:
    """float64 [texts]: the share of bytes in unbroken runs of letters, digits, + and /, or in hexadecimal escapes."""
    parts = [text.encode() for text in texts]
    sizes = np.array([len(part) for part in parts], np.int64)
    data = np.frombuffer(b"\n".join([b"", *parts, b""]), np.uint8)
    gaps = np.flatnonzero(~_ENCODED[data])
    runs = np.diff(gaps) - 1
    long = np.flatnonzero(runs >= ENCODED_RUN)
    starts = np.concatenate([[0], np.cumsum(sizes + 1)])
    owner = np.searchsorted(starts, gaps[long], "right") - 1
    inside = np.bincount(owner, weights=runs[long], minlength=len(parts))[: len(parts)]
    escapes = np.array([4 * part.count(b"\\x") for part in parts])
    return np.minimum((inside + escapes) / np.maximum(sizes, 1), 1.0)

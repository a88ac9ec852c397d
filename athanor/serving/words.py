"""Words that chats are found by, and the piece of text that a hit is shown with."""

from __future__ import annotations

import re
import unicodedata

TITLE_CHARS = 50
TELLING_CHARS = 16  # a shorter question may be a greeting: "How are you?"; one with a digit is none
SNIPPET_CHARS = 160
MAX_WORDS = 16  # of one search; more narrow nothing down and each costs a pass over every message

_MARKS = re.compile("[\u0300-\u036f]")  # accents of Latin, Greek and Cyrillic letters


def fold(text: str) -> str:
    """The form in which texts are compared: no case, no accents, one spelling of each character."""
    if text.isascii():
        return text.lower()
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return _MARKS.sub("", plain)


def words_of(query: str) -> list[str]:
    """The distinct folded words of a search, in their order."""
    return list(dict.fromkeys(fold(query).split()))[:MAX_WORDS]


def snippet(text: str, words: list[str]) -> str:
    """About `SNIPPET_CHARS` characters around the first occurrence of one of the words, on one line."""
    position, length = _first_hit(text, words)
    start = max(0, position - (SNIPPET_CHARS - length) // 2)
    start = max(0, min(start, len(text) - SNIPPET_CHARS))
    end = start + SNIPPET_CHARS
    if 0 < start and (gap := text.find(" ", start, position)) >= 0 and gap - start < 20:
        start = gap + 1  # begin with a whole word, if one begins near
    shown = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{shown}{'…' if end < len(text) else ''}"


def _first_hit(text: str, words: list[str]) -> tuple[int, int]:
    """Where in `text` the first hit is, and how long it is. Folding changes lengths, so positions are counted back."""
    folded = fold(text)
    hits = [(position, len(word)) for word in words if (position := folded.find(word)) >= 0]
    position, length = min(hits, default=(0, 0))
    if len(folded) == len(text):  # then each character has become one, but for rare texts where it is off by a few
        return position, length
    size = 0
    for number, character in enumerate(text):
        size += len(fold(character))
        if size > position:
            return number, length
    return 0, 0


def title_of(*texts: str) -> str:
    """A title from the first questions of a chat: the first that is more than a greeting, else the longest.

    One line, cut between words.
    """
    lines = [" ".join(text.split()) for text in texts]
    telling = (line for line in lines if len(line) >= TELLING_CHARS or re.search(r"\d", line))
    line = next(telling, max(lines, key=len, default=""))
    if len(line) <= TITLE_CHARS:
        return line
    cut = line[: TITLE_CHARS - 1]
    head, space, _ = cut.rpartition(" ")
    if space and len(head) > TITLE_CHARS // 2:
        cut = head
    return cut.rstrip(" ,.;:-") + "…"

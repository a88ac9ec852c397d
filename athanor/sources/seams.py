"""Cut a long text at its own seams: chapters, headings, paragraphs, and only then lines, sentences and words.

A book in one file would otherwise be one document: all of it for training or
all of it for validation, and nothing that a classifier or the search for
duplicates could compare. Nothing is lost or repeated: the pieces of a text,
one after the other, are the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

CHAPTER, HEADING, GAP, PARAGRAPH, LINE, SENTENCE, WORD = range(7)
NEIGHBOURHOOD_LENGTHS = 4  # pieces of so many full lengths stay together on one side of the split
_CHAPTER = re.compile(
    r"#\s|(chapter|part|book|kapitel|teil|buch|chapitre|capítulo|capitolo)\s+([0-9]+|[ivxlc]+)\b"
    r"|第[0-9〇一二三四五六七八九十百千]+[章回卷部篇]",
    re.IGNORECASE,
)
_HEADING = re.compile(r"#{2,6}\s")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
# Where a line may be cut, behind what is matched. East Asian sentences end without a space.
_IN_LINE = {
    SENTENCE: re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？][」』”’]*"),
    WORD: re.compile(r"\s+|[，、；：]"),
}


class Piece(NamedTuple):
    """A part of a text, and the number of its neighbourhood in that text."""

    text: str
    neighbourhood: int


class _Section(NamedTuple):
    """Text that begins at a seam of this rank; the smaller the rank, the deeper the seam."""

    text: str
    rank: int


def pieces(text: str, max_chars: int, code: bool = False) -> list[Piece]:
    """The text in pieces of at most `max_chars`, in order; a text that is short enough is one piece.

    A neighbourhood is a run of pieces, at a chapter's end if one is near: what stands there is told in the words of
    what stands beside it, so it is held out together.
    """
    found: list[Piece] = []
    number = size = 0
    for section in _cut(text, max_chars, code):
        limit = NEIGHBOURHOOD_LENGTHS * max_chars
        if size + len(section.text) > limit or (section.rank == CHAPTER and 2 * size > limit):
            number, size = number + 1, 0
        found.append(Piece(section.text, number))
        size += len(section.text)
    return found


def _cut(text: str, max_chars: int, code: bool) -> Iterator[_Section]:
    if len(text) <= max_chars:
        yield _Section(text, CHAPTER)
        return
    sections = _lines(text, code)
    yield from _fitted(list(sections), CHAPTER, max_chars)


def _fitted(sections: list[_Section], rank: int, max_chars: int) -> Iterator[_Section]:
    """Sections joined as long as they fit; a run that does not fit is cut at its deepest seams first."""
    size = sum(len(section.text) for section in sections)
    if size <= max_chars:
        yield _Section("".join(section.text for section in sections), sections[0].rank)
    elif rank > LINE:
        for section in sections:
            yield from _joined((_Section(text, section.rank) for text in _in_line(section.text, max_chars)), max_chars)
    else:
        runs: list[list[_Section]] = []
        for section in sections:
            if not runs or section.rank <= rank:
                runs.append([])
            runs[-1].append(section)
        fitted = (piece for run in runs for piece in _fitted(run, rank + 1, max_chars))
        # Between paragraphs all pieces may be joined again, so that none is a lonely line. A chapter begins a piece.
        yield from _joined(fitted, max_chars, keep=CHAPTER if rank == CHAPTER else None)


def _joined(sections: Iterable[_Section], max_chars: int, keep: int | None = None) -> Iterator[_Section]:
    """Neighbours joined up to `max_chars`; one that begins at a seam of rank `keep` begins a piece, unless that is short."""
    run: list[_Section] = []
    size = 0
    for section in sections:
        begins = keep is not None and section.rank <= keep and 4 * size >= max_chars
        if run and (size + len(section.text) > max_chars or begins):
            yield _Section("".join(part.text for part in run), run[0].rank)
            run, size = [], 0
        run.append(section)
        size += len(section.text)
    if run:
        yield _Section("".join(part.text for part in run), run[0].rank)


def _lines(text: str, code: bool) -> Iterator[_Section]:
    """The lines of a text with their ends, each with the rank of the seam before it."""
    blank, fence = 2, ""  # the beginning counts as a gap
    for line in text.splitlines(keepends=True) if "\n" in text else [text]:
        stripped = line.strip()
        rank = (GAP if blank > 1 else PARAGRAPH) if blank else LINE
        if not stripped:
            rank = LINE  # white space belongs to what stands before it
        elif code:
            rank = (
                (HEADING if blank else LINE) if not line[0].isspace() and line[0] not in ")]}" else min(rank + 1, LINE)
            )
        elif not fence and _CHAPTER.match(line) and len(stripped) < 100:
            rank = CHAPTER
        elif not fence and _HEADING.match(line):
            rank = HEADING
        if not code and (match := _FENCE.match(line)):
            fence = "" if fence and stripped.startswith(fence) else fence or match[1]
        blank = blank + 1 if not stripped else 0
        yield _Section(line, rank)


def _in_line(text: str, max_chars: int) -> Iterator[str]:
    """One long line in parts: its sentences, of a long one the words, of a long word equal lengths."""
    for sentence in _split_after(_IN_LINE[SENTENCE], text) if len(text) > max_chars else [text]:
        for word in _split_after(_IN_LINE[WORD], sentence) if len(sentence) > max_chars else [sentence]:
            for start in range(0, len(word), max_chars):
                yield word[start : start + max_chars]


def _split_after(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    start = 0
    for match in pattern.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]

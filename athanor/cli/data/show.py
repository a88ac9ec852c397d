"""Texts of documents for people: what was cut is said, differences are found."""

from __future__ import annotations

import difflib
import os

from athanor.cleaning import pii
from athanor.cleaning.normalise import normalise
from athanor.cleaning.params import CleanParams
from athanor.cli.render import visible

COMPARED_LINES = 2000  # of each text: finding differences takes time that grows with their product
AROUND = 40  # characters of what is equal, beside a difference inside a line
LINE_CHARS = 200


def cut(text: str, chars: int) -> tuple[str, str]:
    """The first `chars` characters (0 for all), and what was left out in words, or ""."""
    if not chars or len(text) <= chars:
        return text, ""
    return text[:chars], f"the first {chars:,} of {len(text):,} characters"


def differences(old: str, new: str, most: int = 20) -> list[str]:
    """What differs between two texts: lines marked -, + and @ (where), at most `most`, with what was left out said."""
    if old == new:
        return []
    a, b = old.split("\n"), new.split("\n")
    lines: list[str] = []
    matcher = difflib.SequenceMatcher(None, a[:COMPARED_LINES], b[:COMPARED_LINES])
    for kind, a_from, a_to, b_from, b_to in matcher.get_opcodes():
        if kind == "equal":
            continue
        lines.append(f"@ line {a_from + 1}")
        gone, come = a[a_from:a_to], b[b_from:b_to]
        pairs = min(len(gone), len(come))
        for left, right in zip(gone[:pairs], come[:pairs], strict=True):
            left, right = _around(left, right)
            lines += [f"- {left}", f"+ {right}"]
        lines += [f"- {_short(line)}" for line in gone[pairs:]] + [f"+ {_short(line)}" for line in come[pairs:]]
    more = max(len(a), len(b)) > COMPARED_LINES
    if len(lines) > most:
        lines = [*lines[:most], f"… {len(lines) - most:,} more lines of differences"]
    if more:
        lines.append(f"… only the first {COMPARED_LINES:,} lines were compared")
    return [visible(line) for line in lines]


def _around(left: str, right: str) -> tuple[str, str]:
    """Two lines reduced to where they differ."""
    head = common(left, right)
    tail = min(common(left[::-1], right[::-1]), len(left) - head, len(right) - head)

    def reduced(line: str) -> str:
        start, end = max(0, head - AROUND), min(len(line), len(line) - tail + AROUND)
        return ("…" if start else "") + _short(line[start:end]) + ("…" if end < len(line) else "")

    return reduced(left), reduced(right)


def _short(line: str) -> str:
    return line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]}… ({len(line):,} characters)"


def common(left: str, right: str) -> int:
    """Length of the common beginning."""
    return len(os.path.commonprefix([left, right]))


def prepared(text: str, kind: str, params: CleanParams | None) -> tuple[str, str, dict[str, int]]:
    """A raw text normalised; then redacted; and how much of what was redacted (nothing where params are not known)."""
    normal = normalise(text, kind)
    if params is None:
        return normal, normal, {}
    redacted, counts = pii.redact(normal, getattr(params.pii, kind))
    return normal, redacted, dict(sorted(counts.items()))

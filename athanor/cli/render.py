"""Text for people: templates, numbers in words, what differs between texts, and what cannot be seen spelled out."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

# Control characters could command a terminal, bidirectional ones reorder what stands after them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)

COMPARED_LINES = 2000  # of each text: finding differences takes time that grows with their product
CONTEXT_CHARS = 40  # characters of what is equal, beside a difference inside a line
LINE_CHARS = 200


def visible(text: str) -> str:
    """The text with characters that have no shape, other than newline and tab, written as escapes."""
    return _UNSEEN.sub(
        lambda match: f"\\u{ord(match[0]):04x}" if ord(match[0]) > 255 else f"\\x{ord(match[0]):02x}", text
    )


def shortened(text: str, chars: int = 100) -> str:
    """The beginning of a text on one line, with nothing in it that steers a terminal."""
    line = " ".join(visible(text).split())
    return line if len(line) <= chars else line[: chars - 1] + "…"


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.{1 if abs(count) >= 100 * factor else 2}f} {unit}"
    return f"{count:.0f} B"


def share(part: float, whole: float) -> str:
    return "–" if not whole else f"{part / whole:.2%}" if part / whole < 0.1 else f"{part / whole:.1%}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def counted(counts: Mapping[str, int]) -> str:
    """Counts above 0 in one line."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count) or "none"


def pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(values.items()))


def scores(values: Mapping[str, float], weak: Sequence[str]) -> str:
    """Scores in one line, with the reminder that labels of these classifiers were weak."""
    if not values:
        return "none: it went before it was scored"
    line = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
    return f"{line}   (weak labels: {', '.join(weak)})" if weak else line


def fixed(value: float, width: int = 0, digits: int = 0) -> str:
    return f"{value:>{width},.{digits}f}"


def cut(text: str, chars: int) -> tuple[str, str]:
    """The first `chars` characters (0 for all), and what was left out in words, or ""."""
    if not chars or len(text) <= chars:
        return text, ""
    return text[:chars], f"the first {chars:,} of {len(text):,} characters"


def differences(old: str, new: str, max_lines: int = 20) -> list[str]:
    """What differs between two texts: lines marked -, + and @ (where), at most `max_lines`, then what was left out."""
    if old == new:
        return []
    a, b = old.split("\n"), new.split("\n")
    lines: list[str] = []
    matcher = difflib.SequenceMatcher(None, a[:COMPARED_LINES], b[:COMPARED_LINES])
    for kind, a_from, a_to, b_from, b_to in matcher.get_opcodes():
        if kind == "equal":
            continue
        lines.append(f"@ line {a_from + 1}")
        removed, added = a[a_from:a_to], b[b_from:b_to]
        paired = min(len(removed), len(added))
        for left, right in zip(removed[:paired], added[:paired], strict=True):
            left, right = _without_common_ends(left, right)
            lines += [f"- {left}", f"+ {right}"]
        lines += [f"- {_truncated(line)}" for line in removed[paired:]] + [
            f"+ {_truncated(line)}" for line in added[paired:]
        ]
    incomplete = max(len(a), len(b)) > COMPARED_LINES
    if len(lines) > max_lines:
        lines = [*lines[:max_lines], f"… {len(lines) - max_lines:,} more lines of differences"]
    if incomplete:
        lines.append(f"… only the first {COMPARED_LINES:,} lines were compared")
    return [visible(line) for line in lines]


def _without_common_ends(left: str, right: str) -> tuple[str, str]:
    """Two lines reduced to where they differ."""
    head = common_prefix_length(left, right)
    tail = min(common_prefix_length(left[::-1], right[::-1]), len(left) - head, len(right) - head)

    def reduced(line: str) -> str:
        start, end = max(0, head - CONTEXT_CHARS), min(len(line), len(line) - tail + CONTEXT_CHARS)
        return ("…" if start else "") + _truncated(line[start:end]) + ("…" if end < len(line) else "")

    return reduced(left), reduced(right)


def _truncated(line: str) -> str:
    return line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]}… ({len(line):,} characters)"


def common_prefix_length(left: str, right: str) -> int:
    """Length of the common beginning."""
    return len(os.path.commonprefix([left, right]))


def fill_template(name: str, /, **values: Any) -> str:
    """A template of templates/ filled in. HTML is escaped; what cannot be seen is spelled out."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=jinja2.select_autoescape(["html.j2", "svg.j2"]),
        finalize=lambda value: visible(value) if type(value) is str else value,  # markup is a subclass
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "size": size,
        "share": share,
        "plural": plural,
        "pairs": pairs,
        "counted": counted,
        "scores": scores,
        "fixed": fixed,
        "json": json.dumps,
        "n": "{:,}".format,
    }
    return templates.get_template(name).render(**values)

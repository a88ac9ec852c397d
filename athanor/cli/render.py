"""Text for people: templates, numbers in words, and what cannot be seen spelled out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

# Control characters could command a terminal, bidirectional ones reorder what stands after them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text with characters that have no shape, other than newline and tab, written as escapes."""
    return _UNSEEN.sub(
        lambda match: f"\\u{ord(match[0]):04x}" if ord(match[0]) > 255 else f"\\x{ord(match[0]):02x}", text
    )


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


def fill_template(name: str, **values: Any) -> str:
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
        "scores": scores,
        "fixed": fixed,
        "json": json.dumps,
        "n": "{:,}".format,
    }
    return templates.get_template(name).render(**values)

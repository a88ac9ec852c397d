"""Markdown pages from Jinja2 templates that lie beside the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jinja2


def markdown(package: str, name: str, **filters: Callable[..., str]) -> jinja2.Template:
    """A template of a package, with more `filters`.

    There are `comma`, `general`, `percent` and `signed` (a difference in percent) for numbers, `cell` for a text in a
    table, `table` for nested facts as rows of a table.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, ""),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "comma": lambda number: f"{number:,}",
        "general": lambda number: f"{number:g}",
        "percent": lambda number: f"{number:.1%}",
        "signed": lambda number: f"{number:+.1%}",
        "cell": _cell,
        "table": _table,
        **filters,
    }
    return environment.get_template(name)


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _table(facts: Any, *header: str) -> str:
    """The leaves of nested facts as rows of a table; absent values are left out."""
    rows = [header, *([("---",) * len(header)] if header else []), *_flat(facts)]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows if row)


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        keys = sorted(value.keys() - {"each"})  # values of single items
        rows = [_flat(value[key], f"{prefix}.{key}" if prefix else str(key)) for key in keys]
        return [row for group in rows for row in group]
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, (Mapping, list, tuple)) for item in value):
            return [row for number, item in enumerate(value) for row in _flat(item, f"{prefix}[{number}]")]
        return [(prefix, ", ".join(map(_text, value)) or "none")]
    return [] if value is None else [(prefix, _text(value))]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10000 else str(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)

"""docs/params.md, generated from the schemas so that it cannot fall behind them.

    python -m tools.params_doc

Key, type and range come from the dataclasses, the words from the comment
behind a field or the class's docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from athanor.base.artifacts import write_text
from athanor.runtime.schema import schemas

PAGE = Path("docs/params.md")
HEAD = """# Parameters

Every key of `params.yaml`, by section. The file holds what people tune; where a table says what holds if a key is left out, writing
that value or leaving the key out is the same (a key that is not there yet is set on the command line with a plus: `-S +pretrain.eps=1e-7`).
An unknown key, a wrong type or a value out of range stops `make repro` (`athanor repro`) before it begins and a plain `dvc repro`
in the first stage that runs, with the name of the key. Units are in the names.
`null` is allowed where the type says so. Which stages read a section stands in `dvc.yaml`.

This page is generated: `python -m tools.params_doc`.
"""


def classes(path: Path) -> dict[str, ast.ClassDef]:
    """The classes of a module, by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def allowed(value: ast.expr | None, choices: Iterable[Any] | None) -> str:
    """The choices of a field, or its range as `param(min=, max=)` has it."""
    if choices:
        return ", ".join(map(str, choices))
    if not isinstance(value, ast.Call):
        return ""
    if ast.unparse(value.func) == "share":
        return "0.0 … 1.0"
    words = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
    low, high = words.get("min"), None if words.get("max") == "MAX" else words.get("max")
    if low and high:
        return f"{low} … {high}"
    return f"≥ {low}" if low else f"≤ {high}" if high else ""


def left_out(field: dataclasses.Field[Any]) -> str:
    """What a field is when a file leaves it out, as YAML."""
    if field.default is dataclasses.MISSING:
        return "required"
    if dataclasses.is_dataclass(field.default):
        return "see below"
    return f"`{field.default if isinstance(field.default, str) else json.dumps(field.default)}`"


def table(schema: type, nodes: Sequence[ast.ClassDef], lines: list[str]) -> list[str]:
    known = {field.name: field for field in dataclasses.fields(schema)}
    optional = any(field.default is not dataclasses.MISSING for field in known.values())
    titles = ["key", "type", "allowed", *(["left out"] if optional else []), "meaning"]
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for field in [field for node in nodes for field in node.body if isinstance(field, ast.AnnAssign)]:
        comment = re.search(r"#\s*(.*)$", lines[field.end_lineno - 1])
        kind = ast.unparse(field.annotation).replace("|", "\\|").replace("'", "")
        words = comment[1].replace("|", "\\|") if comment else ""
        name = field.target.id
        without = f" {left_out(known[name])} |" if optional else ""
        rows.append(
            f"| `{name}` | {kind} | {allowed(field.value, known[name].metadata.get('choices'))} |{without} {words} |"
        )
    return rows


def by_name(schema: type) -> list[str]:
    """A table of what holds where a file is silent, for a class whose fields are all of one class, side by side."""
    defaults = {field.name: field.default for field in dataclasses.fields(schema)}
    if len({type(default) for default in defaults.values()}) > 1 or not dataclasses.is_dataclass(
        next(iter(defaults.values()))
    ):
        return []
    rows = ["", f"| left out | {' | '.join(defaults)} |", "|---" * (len(defaults) + 1) + "|"]
    for name in vars(next(iter(defaults.values()))):
        values = [json.dumps(getattr(default, name)) for default in defaults.values()]
        rows.append(f"| `{name}` | {' | '.join('' if value == 'null' else value for value in values)} |")
    return rows


def page() -> str:
    parts = [HEAD]
    for section, schema in schemas().items():
        path = Path(inspect.getfile(schema))
        lines = path.read_text(encoding="utf-8").splitlines()
        parts.append(f"\n## {section}\n")
        found = classes(path)
        # The section first, then the classes its keys are made of, in reading order.
        sections = {parent.__name__ for other in schemas().values() for parent in other.__mro__}
        for name in [schema.__name__, *(name for name in found if name not in sections)]:
            if name != schema.__name__:
                parts.append(f"\n### {section}: {name}\n")
            text = ast.get_docstring(found[name])
            if text:
                parts.append(text + "\n")
            described = getattr(sys.modules[schema.__module__], name)
            parents = [found[parent.__name__] for parent in described.__mro__ if parent.__name__ in found]
            parts.extend(table(described, parents, lines))
            parts.extend(by_name(described))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    write_text(PAGE, page())

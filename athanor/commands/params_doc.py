"""docs/params.md, generated from the schemas so that it cannot fall behind them.

    python -m athanor params-doc

Key, type and range come from the dataclasses, the words from the comment
behind a field or the class's docstring.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

from athanor.artifacts import write_text
from athanor.pipeline.schema import schemas

PAGE = Path("docs/params.md")
HEAD = """# Parameters

Every key of `params.yaml`, by section. All keys are required: a params file is complete, and what stands in it is what runs.
An unknown key, a wrong type or a value out of range stops `make repro` (`athanor repro`) before it begins and a plain `dvc repro`
in the first stage that runs, with the name of the key. Units are in the names.
`null` is allowed where the type says so. Which stages read a section stands in `dvc.yaml`.

This page is generated: `python -m athanor params-doc`.
"""


def classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def allowed(value: ast.expr | None) -> str:
    """The range or choices of `param(min=, max=, choices=)`."""
    if not isinstance(value, ast.Call):
        return ""
    words = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
    if "choices" in words:
        return words["choices"].strip("()").replace("'", "")
    low, high = words.get("min"), None if words.get("max") == "MAX" else words.get("max")
    if low and high:
        return f"{low} … {high}"
    return f"≥ {low}" if low else f"≤ {high}" if high else ""


def table(node: ast.ClassDef, lines: list[str]) -> list[str]:
    rows = ["| key | type | allowed | meaning |", "|---|---|---|---|"]
    for field in node.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        comment = re.search(r"#\s*(.*)$", lines[field.end_lineno - 1])
        kind = ast.unparse(field.annotation).replace("|", "\\|").replace("'", "")
        words = comment[1].replace("|", "\\|") if comment else ""
        rows.append(f"| `{field.target.id}` | {kind} | {allowed(field.value)} | {words} |")
    return rows


def page() -> str:
    parts = [HEAD]
    for section, schema in schemas().items():
        path = Path(inspect.getfile(schema))
        lines = path.read_text(encoding="utf-8").splitlines()
        parts.append(f"\n## {section}\n")
        found = classes(path)
        # The section first, then the classes its keys are made of, in reading order.
        for name in [schema.__name__, *(name for name in found if name != schema.__name__)]:
            if name != schema.__name__:
                parts.append(f"\n### {section}: {name}\n")
            text = ast.get_docstring(found[name])
            if text:
                parts.append(text + "\n")
            parts.extend(table(found[name], lines))
    return "\n".join(parts) + "\n"


def main() -> int:
    write_text(PAGE, page())
    return 0


if __name__ == "__main__":
    sys.exit(main())

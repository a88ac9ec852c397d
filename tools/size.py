"""How much Python there is: tokens without comments and docstrings, by folder.

    python tools/size.py

Tokens and not lines, because lines can be folded. tests/test_size.py holds the
sums below the figures of `[tool.size]` in pyproject.toml plus a slack.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CODE, TESTS = ("athanor", "stages", "recipes", "tools"), ("tests",)
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Size(NamedTuple):
    files: int = 0
    lines: int = 0
    tokens: int = 0

    def plus(self, other: Size) -> Size:
        return Size(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def docstring_lines(source: str) -> set[int]:
    """The lines on which docstrings begin."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, owners)]
    return {node.body[0].lineno for node in nodes if ast.get_docstring(node, clean=False) is not None}


def size_of(source: str) -> Size:
    docstrings = docstring_lines(source)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in LAYOUT]
    counted = [token for token in tokens if token.type != tokenize.STRING or token.start[0] not in docstrings]
    lines = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return Size(1, len(lines), len(counted))


def sizes(root: Path, folders: tuple[str, ...]) -> dict[str, Size]:
    """Of each folder; those of athanor/ are told apart."""
    found: dict[str, Size] = defaultdict(Size)
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).parts
            name = "/".join(parts[:2]) if parts[0] == "athanor" and len(parts) > 2 else parts[0]
            found[name] = found[name].plus(size_of(path.read_text(encoding="utf-8")))
    return found


def total(found: dict[str, Size]) -> Size:
    result = Size()
    for size in found.values():
        result = result.plus(size)
    return result


def main() -> int:
    print(f"{'':22}{'files':>7}{'lines':>9}{'tokens':>9}")
    for folders, name in ((CODE, "code"), (TESTS, "tests")):
        found = sizes(ROOT, folders)
        rows = sorted(found.items(), key=lambda row: -row[1].tokens)
        for folder, size in [*(rows if len(rows) > 1 else []), (f"all {name}", total(found))]:
            print(f"{folder:22}{size.files:7}{size.lines:9,}{size.tokens:9,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

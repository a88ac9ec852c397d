"""Source code of Python modules as documents that a small context can hold.

A module is cut between top-level statements into pieces of at most
`max_chars`; comments and decorators stay with the statement they introduce. A
class that is too long is cut between its members, each piece under the
class's own header, so that pieces stay valid Python and a method is never
seen without its class.

What also became prose is shortened here: a docstring keeps its first
paragraph, and a comment block long enough to be a prose section is left out.
Both sources would otherwise hold the same 2.5 MB, which a run of a few
minutes would be taught twice. Summaries stay in both on purpose: code without
them teaches no link between words and code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from athanor.corpus.documents import Document, split_of
from athanor.corpus.sources import stdlib
from athanor.corpus.sources.python_prose import LICENCE_WORDS, comment_blocks, is_prose
from athanor.corpus.sources.stdlib import Module

MAX_TABLE_CHARS = 2000  # a longer statement made of literals only is a data table, not code


@dataclass(frozen=True)
class Chunk:
    """Consecutive lines of one module, and the class headers to repeat when a piece begins with them."""

    text: str
    headers: tuple[str, ...] = ()


def documents(module: Module, source: str, val_fraction: float, max_chars: int, min_chars: int) -> Iterator[Document]:
    """The code documents of one module, in order."""
    for part, text in enumerate(pieces(module, max_chars, min_chars)):
        split = split_of(module.name, val_fraction)
        yield Document(text, source, "code", module.license, split, module.meta(part))


def pieces(module: Module, max_chars: int, min_chars: int) -> Iterator[str]:
    """Texts of at most `max_chars`, except where one statement alone is longer."""
    lines = shortened(module)
    run, before = "", ()
    for chunk in chunks(lines, module.tree.body, 1, len(lines), max_chars):
        opening = "".join(chunk.headers[_common(before, chunk.headers) :])
        if run and len(run) + len(opening) + len(chunk.text) > max_chars:
            yield from _piece(run, min_chars)
            run = ""
        run += (opening if run else "".join(chunk.headers)) + chunk.text
        before = chunk.headers
    yield from _piece(run, min_chars)


def _common(left: tuple[str, ...], right: tuple[str, ...]) -> int:
    """Length of the common beginning."""
    pairs = zip(left, right, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _piece(text: str, min_chars: int) -> Iterator[str]:
    text = re.sub(r"\n{4,}", "\n\n\n", text.strip("\n")) + "\n"
    if len(text) > min_chars:
        yield text


def chunks(
    lines: list[str], body: list[ast.stmt], first: int, last: int, max_chars: int, headers: tuple[str, ...] = ()
) -> Iterator[Chunk]:
    """The smallest units that pieces are built of: lines `first`..`last` (1-based) divided among `body`'s statements.

    A statement owns the lines after the one before it, so its comments and
    decorators come with it. Data tables are left out.
    """
    start = first
    for number, node in enumerate(body):
        end = node.end_lineno if number + 1 < len(body) else last
        text = "".join(lines[start - 1 : end])
        if len(text) > max_chars and isinstance(node, ast.ClassDef) and node.body[0].lineno > node.lineno:
            own = _first_line(node)
            if start < own:
                yield Chunk("".join(lines[start - 1 : own - 1]), headers)
            head_end = node.lineno
            while not lines[head_end - 1].rstrip().endswith(":") and head_end + 1 < _first_line(node.body[0]):
                head_end += 1
            header = "".join(lines[own - 1 : head_end])
            yield from chunks(lines, node.body, head_end + 1, end, max_chars, (*headers, header))
        elif not (len(text) > MAX_TABLE_CHARS and is_table(node, len(text) > max_chars)):
            if text:
                yield Chunk(text, headers)
        start = end + 1


def _first_line(node: ast.stmt) -> int:
    """Line of a statement, or of its first decorator."""
    return min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])


def is_table(node: ast.stmt, calls: bool) -> bool:
    """An assignment of literals without logic; with `calls`, of names and calls too (a list of records)."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return False
    plain = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Load, ast.UnaryOp, ast.unaryop)
    plain += (ast.Name, ast.Attribute, ast.Call, ast.keyword, ast.BinOp, ast.operator) if calls else ()
    inner = list(ast.walk(node.value))
    return sum(isinstance(item, plain) for item in inner) >= 0.95 * len(inner)


def shortened(module: Module) -> list[str]:
    """The module's lines, of the same number: cut text leaves empty strings, so that line numbers hold."""
    lines = list(module.lines)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    for start, end, text in comment_blocks(lines, module.string_lines):
        licence = start < 40 and end > start + 2 and LICENCE_WORDS.search(text)
        if licence or is_prose(text):
            lines[start - 1 : end] = [""] * (end - start + 1)
    for node in module.nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if (doc := stdlib.docstring_node(node)) is not None:
                _shorten_docstring(lines, doc)
    return lines


def _shorten_docstring(lines: list[str], doc: ast.Expr) -> None:
    """Keep the first paragraph of a docstring, close its quotes, and empty the rest of its lines."""
    first, last = doc.lineno - 1, doc.end_lineno - 1
    text = "".join(lines[first : last + 1]).encode()  # ast counts columns in UTF-8 bytes
    before, raw = text[: doc.col_offset].decode(), text[doc.col_offset :].decode()
    opening = re.match(r"[rRuU]?(\"{3}|'{3})\s*", raw)
    if last == first or opening is None:
        return
    quotes = opening[1]
    inner, _, _ = raw[opening.end() :].partition(quotes)
    summary = re.split(r"\n[ \t]*\n", inner.rstrip(), maxsplit=1)[0].rstrip()
    if summary.endswith((quotes[0], "\\")):
        summary += " "  # or the closing quotes would be read differently
    rest = raw[raw.rindex(quotes) + 3 :]
    lines[first : last + 1] = [""] * (last - first + 1)
    lines[first] = before + raw[: opening.end()].rstrip() + summary + quotes + rest

"""Documents of Python modules: their documentation as prose, and their source as code.

Prose (docstrings, long comments, the language reference) is a run of
consecutive sections (module docstring, a class with its methods, functions),
each under the dotted name and arguments it describes, so that the text says
what it is about.

Code is cut between top-level statements into pieces of at most `max_chars`;
comments and decorators stay with the statement they introduce. A class that
is too long is cut between its members, each piece under the class's own
header, so that pieces stay valid Python and a method is never seen without
its class.

What became prose is shortened in the code: a docstring keeps its first
paragraph, and a comment block long enough to be a prose section is left out.
Both sources would otherwise hold the same 2.5 MB, which a run of a few
minutes would be taught twice. Summaries stay in both on purpose: code without
them teaches no link between words and code.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from athanor.base.work import Facts, Tick, ignore
from athanor.sources import stdlib
from athanor.sources.params import PackagesSource, PythonSource
from athanor.sources.stdlib import Entry, Module
from athanor.text.documents import Document, split_of

MIN_COMMENT_CHARS = 160  # a shorter comment explains its line and stays with the code
LICENCE_WORDS = re.compile(r"copyright|licen[sc]e|all rights reserved|warrant|permission (is|to)|-\*-", re.IGNORECASE)


def module_documents(module: Module, source: PythonSource | PackagesSource, val_fraction: float) -> list[Document]:
    """The documents of one module, first prose, then code; one that fails gives none."""
    prose = prose_texts(module, source.max_prose_chars, source.min_chars)
    code = code_texts(module, source.max_code_chars, source.min_chars)
    common = (module.license, module.name, val_fraction, module.meta)
    return [*numbered(prose, source.prose_name, "prose", *common), *numbered(code, source.code_name, "code", *common)]


def numbered(
    texts: Iterable[str], source: str, kind: str, license_: str, key: str, val_fraction: float, meta: Facts
) -> Iterator[Document]:
    """Texts that belong together as documents; their split follows the key."""
    for number, text in enumerate(texts):
        yield Document(text, source, kind, license_, split_of(key, val_fraction), {**meta, "part": number})


def read(
    source: PythonSource | None,
    val_fraction: float,
    base: Path,
    tick: Tick = ignore,
    visit: Callable[[Module], None] = ignore,
) -> Iterator[Document]:
    """The documents of the library below `base`, scanned once.

    Modules go to `visit` one by one: none is kept, for trees are big. Without a source only `visit` is served.
    """
    for module in stdlib.scan(base, tick):
        visit(module)
        if source is not None:
            yield from module_documents(module, source, val_fraction)
    for name, text in stdlib.topics(base).items() if source is not None else ():
        key, texts = f"topic:{name}", packed([text.strip("\n")], source.max_prose_chars, source.min_chars)
        yield from numbered(texts, source.prose_name, "prose", stdlib.LICENSE, key, val_fraction, {"module": key})


def prose_texts(module: Module, max_chars: int, min_chars: int) -> Iterator[str]:
    """The documentation of one module, in texts of at most `max_chars` unless a single paragraph is longer."""
    blocks = comment_blocks(module.lines, module.string_lines)
    comments = {start: text for start, _, text in blocks if is_prose(text)}
    sections = []
    for entry in stdlib.entries(module):
        function = isinstance(entry.node, (ast.FunctionDef, ast.AsyncFunctionDef))
        lines = range(entry.node.lineno, entry.node.end_lineno + 1) if function else ()
        texts = [
            text for text in (entry.doc, *(comments.pop(line) for line in sorted(comments) if line in lines)) if text
        ]
        if texts:
            sections.append((getattr(entry.node, "lineno", 0), "\n\n".join([heading(entry), *texts])))
    sections += comments.items()  # between definitions: they introduce what follows
    return packed([text for _, text in sorted(sections)], max_chars, min_chars)


def heading(entry: Entry) -> str:
    """What a reference manual would print: `class queue.Queue(maxsize=0)`, `shutil.copytree(src, dst, ...)`."""
    if isinstance(entry.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"{entry.name}({stdlib.signature(entry.node, drop_self=entry.kind == 'method')})"
    return f"{entry.kind} {entry.name}"


def comment_blocks(lines: list[str], skip: Collection[int]) -> Iterator[tuple[int, int, str]]:
    """Runs of consecutive comment lines as (first line, last line, text without the marks), 1-based."""
    block: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        stripped = line.strip()
        if stripped.startswith("#") and number not in skip:
            block.append(stripped.lstrip("#"))
        elif block:
            yield number - len(block), number - 1, inspect.cleandoc("\n" + "\n".join(block)).strip()
            block = []


def is_prose(text: str) -> bool:
    """Long enough, mostly words, starts like a sentence, and neither a licence nor commented-out code."""
    if len(text) < MIN_COMMENT_CHARS or LICENCE_WORDS.search(text[:600]) or not text[0].isalpha():
        return False
    letters = sum(character.isalpha() or character == " " for character in text)
    return letters >= 0.8 * len(text.replace("\n", "")) and text.count(" ") >= 20


def packed(sections: Iterable[str], max_chars: int, min_chars: int) -> Iterator[str]:
    """Consecutive sections joined up to `max_chars`; what stays below `min_chars` is left out."""
    pieces = [piece for text in sections for piece in paragraphs_up_to(text, max_chars)]
    return (text for text in joined(pieces, max_chars) if len(text) >= min_chars)


def joined(pieces: Iterable[str], max_chars: int, glue: str = "\n\n\n") -> Iterator[str]:
    """Greedy runs of pieces no longer than `max_chars` together."""
    run: list[str] = []
    size = 0
    for piece in pieces:
        if run and size + len(glue) + len(piece) > max_chars:
            yield glue.join(run)
            run, size = [], 0
        size += len(piece) + (len(glue) if run else 0)
        run.append(piece)
    if run:
        yield glue.join(run)


def paragraphs_up_to(text: str, max_chars: int) -> Iterator[str]:
    """A long section cut between paragraphs; a single paragraph is never cut."""
    if len(text) <= max_chars:
        yield text
    else:
        yield from joined(re.split(r"\n[ \t]*\n", text), max_chars, glue="\n\n")


MAX_TABLE_CHARS = 2000  # a longer statement made of literals only is a data table, not code


@dataclass(frozen=True)
class Chunk:
    """Consecutive lines of one module, and the class headers to repeat when a piece begins with them."""

    text: str
    headers: tuple[str, ...] = ()


def code_texts(module: Module, max_chars: int, min_chars: int) -> Iterator[str]:
    """The source code of one module, in texts of at most `max_chars`, except where one statement alone is longer."""
    lines = shortened(module)
    text, last_headers = "", ()
    for chunk in chunks(lines, module.tree.body, 1, len(lines), max_chars):
        repeated_headers = "".join(chunk.headers[len(os.path.commonprefix([last_headers, chunk.headers])) :])
        if text and len(text) + len(repeated_headers) + len(chunk.text) > max_chars:
            yield from _piece(text, min_chars)
            text = ""
        text += (repeated_headers if text else "".join(chunk.headers)) + chunk.text
        last_headers = chunk.headers
    yield from _piece(text, min_chars)


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
            first_line = _first_line(node)
            if start < first_line:
                yield Chunk("".join(lines[start - 1 : first_line - 1]), headers)
            head_end = node.lineno
            while not lines[head_end - 1].rstrip().endswith(":") and head_end + 1 < _first_line(node.body[0]):
                head_end += 1
            header = "".join(lines[first_line - 1 : head_end])
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
    allowed = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Load, ast.UnaryOp, ast.unaryop)
    allowed += (ast.Name, ast.Attribute, ast.Call, ast.keyword, ast.BinOp, ast.operator) if calls else ()
    nodes = list(ast.walk(node.value))
    return sum(isinstance(node, allowed) for node in nodes) >= 0.95 * len(nodes)


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
    before, literal = text[: doc.col_offset].decode(), text[doc.col_offset :].decode()
    opening = re.match(r"[rRuU]?(\"{3}|'{3})\s*", literal)
    if last == first or opening is None:
        return
    quotes = opening[1]
    inner, _, _ = literal[opening.end() :].partition(quotes)
    summary = re.split(r"\n[ \t]*\n", inner.rstrip(), maxsplit=1)[0].rstrip()
    if summary.endswith((quotes[0], "\\")):
        summary += " "  # or the closing quotes would be read differently
    tail = literal[literal.rindex(quotes) + 3 :]
    lines[first : last + 1] = [""] * (last - first + 1)
    lines[first] = before + literal[: opening.end()].rstrip() + summary + quotes + tail

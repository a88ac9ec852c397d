"""Documentation of Python modules as prose: docstrings, long comments and the language reference.

A document belongs to one module. It is a run of consecutive sections (module
docstring, a class with its methods, functions), each under the dotted name
and arguments it describes, so that the text says what it is about.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Iterable, Iterator

from athanor.corpus.documents import Document, split_of
from athanor.corpus.sources import stdlib
from athanor.corpus.sources.stdlib import Entry, Module

MIN_COMMENT_CHARS = 160  # a shorter comment explains its line and stays with the code
LICENCE_WORDS = re.compile(r"copyright|licen[sc]e|all rights reserved|warrant|permission (is|to)|-\*-", re.IGNORECASE)


def documents(
    module: Module, source: str, val_fraction: float, max_chars: int, min_chars: int
) -> Iterator[Document]:
    """The prose documents of one module, each at most `max_chars` long unless a single paragraph is longer."""
    comments = long_comments(module)
    sections = []
    for entry in stdlib.entries(module):
        inside = [comments.pop(line) for line in sorted(comments) if line in body_lines(entry)]
        texts = [text for text in (entry.doc, *inside) if text]
        if texts:
            line = getattr(entry.node, "lineno", 0)
            sections.append((line, "\n\n".join([heading(entry), *texts])))
    sections += comments.items()  # between definitions: they introduce what follows
    for part, text in enumerate(packed([text for _, text in sorted(sections)], max_chars, min_chars)):
        split = split_of(module.name, val_fraction)
        yield Document(text, source, "prose", module.license, split, module.meta(part))


def topic_documents(
    topics: dict[str, str], source: str, val_fraction: float, max_chars: int, min_chars: int
) -> Iterator[Document]:
    for name, text in topics.items():
        key = f"topic:{name}"
        for part, piece in enumerate(packed([text.strip("\n")], max_chars, min_chars)):
            meta = {"module": key, "part": part}
            yield Document(piece, source, "prose", stdlib.LICENSE, split_of(key, val_fraction), meta)


def heading(entry: Entry) -> str:
    """What a reference manual would print: `class queue.Queue(maxsize=0)`, `shutil.copytree(src, dst, ...)`."""
    if isinstance(entry.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"{entry.name}({stdlib.signature(entry.node, drop_self=entry.kind == 'method')})"
    return f"{entry.kind} {entry.name}"


def body_lines(entry: Entry) -> range:
    """Line numbers of a function; empty for modules and classes, whose parts speak for themselves."""
    if isinstance(entry.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return range(entry.node.lineno, entry.node.end_lineno + 1)
    return range(0)


def long_comments(module: Module) -> dict[int, str]:
    """Blocks of whole-line comments that read like prose, by the number of their first line."""
    blocks = comment_blocks(module.lines, module.string_lines)
    return {start: text for start, _, text in blocks if is_prose(text)}


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

"""What a folder of anyone's holds: files by type, the text of those that can be read, and why others cannot."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.base.strict import build
from athanor.sources import select
from athanor.sources.params import FilesSource
from athanor.text import rows
from athanor.text.documents import Document
from athanor.text.encodings import Guess
from athanor.text.globs import Files

MOST_NAMED = 8  # files
WEB_FILES = ("*.js", "*.mjs", "*.css", "*.map")  # of a web site: its search index would be two thirds of the text
LONG_LINE, MIN_LINES = 40, 50  # characters, and lines of that length in a file, to tell what repeats other files
REPEATED = 0.95  # of a file's long lines; pages of one manual share up to 0.85 by what all of them say


@dataclass
class Ending:
    """All files of one type."""

    files: int = 0
    bytes: int = 0
    read: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    errors: select.Unreadable = field(default_factory=select.Unreadable)
    guesses: dict[Path, Guess] = field(default_factory=dict)  # of files that are read though not UTF-8
    documents: list[Document] = field(default_factory=list)
    lines: dict[Path, set[int]] = field(default_factory=dict)  # hashes of the long ones, by file


def look(files: Files, options: Mapping[str, Any]) -> dict[str, Ending]:
    """Files by their ending, or by their name where they have none, read with some options of their source."""
    found: dict[str, Ending] = defaultdict(Ending)
    for name, path in files:
        ending = found[pattern_of(path)]
        ending.files += 1
        ending.bytes += path.stat().st_size
        values: dict[str, Any] = {"type": "files", "name": "own", "globs": [str(path)], "on_unreadable": "skip"}
        values["kind"] = "code" if path.suffix.lower() in rows.CODE else "prose"
        with contextlib.suppress(InputError, OSError, EOFError, zlib.error):  # which are said when it is read
            if (guess := rows.encoding_of(path)) is not None and guess.sure and "encoding" not in options:
                values["encoding"] = guess.encoding
                ending.guesses[path] = guess
        source = build(FilesSource, values | dict(options), "own")
        errors = select.Unreadable()
        documents = list(select.documents(source, [(name, path)], 0.0, unreadable=errors))
        for error in errors.all:
            ending.errors.add(error)
        ending.reasons.update(errors.counts)
        ending.read += bool(documents)
        ending.reasons["empty"] += not documents and not errors.errors
        ending.documents += documents
        text = "\n".join(document.text for document in documents)
        ending.lines[path] = {hash(line) for line in text.split("\n") if len(line) >= LONG_LINE}
    pages = sum(found[pattern].files for pattern in ("*.html", "*.htm") if pattern in found)
    others = [found[pattern] for pattern in WEB_FILES if pattern in found]
    if pages > sum(ending.files for ending in others):
        for ending in others:
            ending.reasons["of a web site, no text"] = ending.read
            ending.read, ending.documents, ending.lines = 0, [], {}
    return {pattern: ending for pattern, ending in found.items() if ending.files}


def repeating(found: Mapping[str, Ending]) -> list[Path]:
    """Files that say again what the others say, such as a book on one page beside its chapters."""
    files = {path: lines for ending in found.values() for path, lines in ending.lines.items()}
    counts = Counter(line for lines in files.values() for line in lines)
    large = [path for path, lines in files.items() if len(lines) >= MIN_LINES]
    shares = {path: sum(counts[line] > 1 for line in files[path]) / len(files[path]) for path in large}
    # Of two that are alike the larger one is named.
    return sorted(path for path in large if shares[path] >= REPEATED and not _within(path, files))


def _within(path: Path, files: Mapping[Path, set[int]]) -> bool:
    """Whether a single larger file holds most of this one."""
    mine = files[path]
    return any(
        len(mine & lines) >= REPEATED * len(mine)
        for other, lines in files.items()
        if other != path and (len(lines), other) > (len(mine), path)
    )


def pattern_of(path: Path) -> str:
    """The last part of a glob that matches files of this type."""
    suffixes = path.suffixes[-2:] if path.suffix.lower() in rows.COMPRESSED else path.suffixes[-1:]
    return f"*{escape(''.join(suffixes))}" if suffixes else escape(path.name)


def kind_of(ending: Ending) -> str:
    return ending.documents[0].kind if ending.documents else ""


def table(found: dict[str, Ending]) -> str:
    """What was read, what not, and why."""
    rows_ = [("type", "files", "kB", "read", "pieces", "not read")]
    for pattern, ending in sorted(found.items(), key=lambda item: (-item[1].bytes, item[0])):
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(ending.reasons.items()) if count)
        sizes = (ending.files, round(ending.bytes / 1000), ending.read, len(ending.documents))
        rows_.append((pattern, *(f"{size:,}" for size in sizes), reasons))
    wide = max(len(row[0]) for row in rows_)
    return "\n".join(
        f"{name:<{wide}} {files:>7} {size:>9} {read:>7} {pieces:>8}   {why}".rstrip()
        for name, files, size, read, pieces, why in rows_
    )


def tell_unread(place: Path, found: Mapping[str, Ending]) -> None:
    """Print what is read in another encoding than UTF-8, and what is left out with what helps."""
    guesses = [item for ending in found.values() for item in ending.guesses.items()]
    if guesses:
        print("\nnot UTF-8, and read as:")
        print("\n".join(f"  {guess.encoding}: {path}: «{guess.line}»" for path, guess in guesses[:MOST_NAMED]))
    if guesses[MOST_NAMED:]:
        print(f"  and {len(guesses) - MOST_NAMED} more")
    groups = [group for ending in found.values() for group in ending.errors.groups()]
    told = [(reason, errors) for reason, errors in groups if not errors[0].fix.startswith("use ")]
    if told:
        print("\ncannot be read, and will be left out:")
    for reason, errors in told:
        for error in errors[:MOST_NAMED]:
            print(f"  {error.where}: {error.what}")
        if errors[MOST_NAMED:]:
            print(f"  and {len(errors) - MOST_NAMED} more: {reason}")
        print(f"    Fix: {errors[0].fix}")
    if any("if «" in errors[0].fix for _, errors in told):
        print(f"  athanor new '{place}' --encoding NAME reads them so")
    for _, errors in told:
        if match := re.search("text_template: ('.*?')", errors[0].fix):
            print(f"  athanor new '{place}' --template {match[1]} reads rows of such columns")


def nothing_read(place: Path, found: Mapping[str, Ending]) -> InputError:
    everything = select.Unreadable()
    for ending in found.values():
        for error in ending.errors.all:
            everything.add(error)
    if not everything.errors:
        return InputError("all files are empty", where=place, fix="put text there")
    error = everything.error(sum(ending.files for ending in found.values()), "")
    return InputError(f"no file can be read: {error.what}", where=error.where or place, fix=error.fix)

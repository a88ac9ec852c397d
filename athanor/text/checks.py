"""What is asked of one row or text, and the errors that name its place."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.text import encodings
from athanor.text.encodings import DETECT, UTF_8, Guess

COLUMN_NAME = r"\w[\w .?-]*"  # that a template may hold
POINTERS = {
    b"version https://git-lfs.github.com/spec/": ("a Git LFS pointer", "git lfs install && git lfs pull"),
    b"/annex/objects/": ("a git-annex pointer", "git annex get ."),
    b"../.git/annex/objects/": ("a git-annex pointer", "git annex get ."),
}


class MalformedRow(InputError):
    """One row that cannot be used; big data sets of others hold a few, and the source says how many it tolerates."""


def check_text(value: Any, where: str, column: str, max_document_bytes: int) -> str:
    """The text of a row; null counts as empty.

    MalformedRow for other types and lone surrogates, InputError for excessive size.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        what, fix = (
            f"column '{column}' holds {type(value).__name__}, not text",
            "name a column of text, or write it in quotes",
        )
        raise MalformedRow(what, where=where, fix=fix)
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        code = f"U+{ord(value[error.start]):04X}"
        what = f"column '{column}' holds a lone surrogate ({code})"
        raise MalformedRow(what, where=where, fix="repair the row") from None
    if size > max_document_bytes:
        raise too_large(where, max_document_bytes)
    return value


def json_object(line: str, where: str) -> Facts:
    """The object of one line of JSON; MalformedRow for anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        if not line.endswith("\n") and line.startswith("{"):  # as a broken download leaves it
            fix = "fetch the file again, or remove its last line"
            raise MalformedRow("the last line is not whole: not valid JSON", where=where, fix=fix) from None
        # The decoder counts lines within the text that it was given, which is one line.
        why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise MalformedRow(f"not valid JSON ({why})", where=where, fix="one JSON object on each line") from None
    if not isinstance(row, dict):
        raise MalformedRow("not a JSON object", where=where, fix="one JSON object on each line")
    return row


def too_large(where: str, max_document_bytes: int) -> InputError:
    return InputError(
        f"a document is larger than max_document_bytes ({max_document_bytes:,})",
        where=where,
        fix="split the document, or raise max_document_bytes",
    )


def no_column(column: str, present: Sequence[str], where: str) -> MalformedRow:
    names = ", ".join(sorted(name[:40] for name in present)) or "none"
    fix = f"name one that exists in params.yaml; found: {names}"
    if not all(re.fullmatch(COLUMN_NAME, name) and len(name) <= 40 for name in present):
        fix += ". Columns of a table without a header are numbers: text_column: '1', text_template: '{1} {2}'"
    elif column in ("text", "messages") and len(present) >= 2:
        first, last = present[0], present[-1]
        if column == "text":
            fix += f". One of them is text_column: {first}, several are text_template: '{{{first}}}\\n\\n{{{last}}}'"
        fix += f". Questions and answers are conversations, below instruct.sources: shape: prompt, columns: [{first}, {last}]"
    return MalformedRow(f"column '{column}' is missing", where=where, fix=fix)


def check_pointer(path: Path) -> None:
    """InputError for a file whose content is elsewhere."""
    with open(path, "rb") as file:
        head = file.read(64)
    for begin, (what, command) in POINTERS.items():
        if head.startswith(begin):
            raise InputError(f"{what}, and not the file itself", where=path, fix=command)


def check_mojibake(text: str, where: str) -> None:
    """MalformedRow for text that was decoded in a wrong encoding."""
    guess = encodings.mojibake(text)
    if guess is None:
        return
    if not guess.encoding:
        what, fix = (
            f"most of what is not ASCII was lost («{guess.line}»)",
            "fetch the text again, and convert it with its own encoding",
        )
    elif guess.encoding == UTF_8:
        what = f"UTF-8 that was read as {guess.other} and written again: it says «{guess.line}»"
        fix = f"fetch the original, or repair it: iconv -f UTF-8 -t {iconv(guess.other)} OLD > NEW"
    else:
        what = f"{guess.encoding} that was read as {guess.other}: it says «{guess.line}»"
        fix = f"bring the original with encoding: {guess.encoding} for the source in params.yaml; or repair it: "
        fix += f"iconv -f UTF-8 -t {iconv(guess.other)} OLD | iconv -f {iconv(guess.encoding)} -t UTF-8 > NEW"
    raise MalformedRow(f"mojibake ({what})", where=where, fix=fix)


def iconv(encoding: str) -> str:
    """The name that iconv has for an encoding."""
    name = encoding.replace("_", "-").upper().replace("ISO2022", "ISO-2022")
    return {"MAC-ROMAN": "MACINTOSH", "MAC-LATIN2": "MAC-CENTRALEUROPE"}.get(name, name)


def decoding_error(data: bytes, setting: str, where: str, line: int | None, damaged: bool = False) -> MalformedRow:
    """What is wrong with bytes that `setting` does not decode, and the encoding to name; `line` is that of the first byte.

    What is `damaged` is UTF-8 elsewhere.
    """
    damaged = damaged or encodings.is_damaged(data)
    guess, wanted = None if damaged else encodings.detect(data), UTF_8 if damaged or setting == DETECT else setting
    fix = encoding_fix(guess, data)
    try:
        data.decode(wanted)
        what = f"{guess.encoding}, not UTF-8" if guess else f"not {wanted}"
    except UnicodeDecodeError as error:
        what = f"not valid {wanted.upper()} (byte 0x{data[error.start]:02x})"
        if damaged and error.reason == "unexpected end of data":
            what, fix = (
                "the end is missing (it ends within a character)",
                "fetch the file again, or remove its last line",
            )
        where += f":{line + data.count(10, 0, error.start)}" if line is not None else ""
    return MalformedRow(what, where=where, fix=fix)


def encoding_fix(guess: Guess | None, data: bytes) -> str:
    place = "for the source in params.yaml"
    if guess is None:
        return f"repair it there; or, if it is text and not UTF-8, name the encoding {place}"
    if guess.sure:
        return f"encoding: {guess.encoding} {place} reads «{guess.line}»"
    fix = f"encoding: {guess.encoding} {place} if «{guess.line}» is right"
    if guess.other:
        other = guess._replace(text=data.decode(guess.other, "replace"))
        fix += f", encoding: {guess.other} if «{other.line}» is; or another one"
    return fix

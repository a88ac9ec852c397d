"""Rows of JSON lines, JSON arrays, CSV and TSV. A row that cannot be read is given as its error, and those after it are read."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from athanor.base.errors import InputError
from athanor.base.work import Facts, Tick, ignore
from athanor.text import encodings
from athanor.text.checks import MalformedRow, decoding_error, json_object, no_column, too_large
from athanor.text.encodings import DETECT, UTF_8

JSON_ESCAPE_BYTES = 6  # a byte of text takes at most this many in a JSON string: \u0000
MAX_WHOLE_BYTES = 512 << 20  # of a JSON array, which is held
MAX_FAULTS = 100  # rows of a table with a quote that does not end: each costs a search for its end
SEPARATORS = ",;\t|"
_BETWEEN = re.compile(r"\}\s*,\s*(?=\{)")
_GAP = re.compile(r"[\s,]*")
_JOINT = re.compile(r"\]\s*\[")  # of lists one after the other

Found = tuple[str, Facts | InputError]


class Line(NamedTuple):
    number: int
    text: str | MalformedRow | InputError
    end: int  # bytes before the next line


class Columns(NamedTuple):
    needed: Sequence[str]
    optional: Sequence[str] = ()

    def of(self, row: Facts, where: str) -> Facts | MalformedRow:
        for column in self.needed:
            if column not in row:
                return no_column(column, list(row), where)
        present = [column for column in self.optional if column in row]
        return {column: row[column] for column in (*self.needed, *present)}


def read(
    file: IO[bytes],
    path: Path,
    kind: str,
    columns: Columns,
    max_document_bytes: int,
    setting: str,
    position: int = 0,
    moved: Tick = ignore,
) -> Iterator[Found]:
    head = b"" if position else file.peek(1024)[:1024]  # type: ignore[attr-defined]
    limit = JSON_ESCAPE_BYTES * max_document_bytes + (1 << 20)
    if kind in (".csv", ".tsv", ".tab"):
        limit = max_document_bytes + (1 << 20)
        yield from _table(_ended(_lines(file, path, head, limit, setting)), path, kind, columns, limit)
        return
    begin = head.decode(encodings.marked(head) or "latin-1", "ignore").lstrip("\ufeff \t\r\n")
    if begin.startswith("[") or (kind == ".json" and not position and not _are_lines(file)):
        yield from _array(_whole(_lines(file, path, head, MAX_WHOLE_BYTES, setting), path), path, columns)
        return
    yield from _objects(_lines(file, path, head, limit, setting, position), path, columns, moved)


def _are_lines(file: IO[bytes]) -> bool:
    """Whether a file begins with one object on each line; such a .json may be of any size."""
    first, _, rest = file.peek(1 << 16).partition(b"\n")  # type: ignore[attr-defined]
    try:
        return rest.lstrip().startswith(b"{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _objects(lines: Iterable[Line], path: Path, columns: Columns, moved: Tick = ignore) -> Iterator[Found]:
    for number, line, end in lines:
        where = f"{path}:{number}"
        if isinstance(line, InputError):
            yield where, line
        elif line.strip():  # else a blank line at the end, as editors leave it
            try:
                found = columns.of(json_object(line, where), where)
            except MalformedRow as error:
                found = error
            if not isinstance(found, InputError):
                moved(end)
            yield where, found


def _lines(file: IO[bytes], path: Path, head: bytes, limit: int, setting: str, position: int = 0) -> Iterator[Line]:
    """Lines, decoded one by one: UTF-8 first, else as `setting` says."""
    mark = encodings.marked(head)
    if (wide := mark if mark not in (None, "utf-8-sig") else _unmarked(head, setting, path)) is not None:
        yield from _wide_lines(file, path, wide, limit)
        return
    number, is_utf8, encoding = 0, False, None if setting == DETECT else setting
    # Short lines of Chinese are valid UTF-8 now and then.
    old = head and setting not in (UTF_8, DETECT) and not encodings.is_utf8(file.peek(1 << 16), cut=True)  # type: ignore[attr-defined]
    while data := file.readline(limit):
        number, position = number + 1, position + len(data)
        where = f"{path}:{number}"
        if len(data) == limit and not data.endswith(b"\n"):
            while (rest := file.readline(limit)) and not rest.endswith(b"\n"):
                pass
            yield Line(number, too_large(where, (limit - (1 << 20)) // JSON_ESCAPE_BYTES), position)
            continue
        data = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
        try:
            few = old and len(data.decode(errors="ignore").encode("ascii", "ignore")) > len(data) - 3 * encodings.FEW
            text: str | InputError = data.decode(setting if few else UTF_8)
            is_utf8 = is_utf8 or not data.isascii()
        except UnicodeDecodeError:
            if encoding is None and not is_utf8 and not encodings.is_damaged(data):
                more = file.peek(1 << 16).rpartition(b"\n")[0]  # type: ignore[attr-defined]
                guess = encodings.detect(data + more)
                encoding = guess.encoding if guess is not None and guess.sure else UTF_8
            try:
                text = data.decode(UTF_8 if encodings.is_damaged(data) else encoding or UTF_8)
            except UnicodeDecodeError:
                text = decoding_error(data, encoding or UTF_8, where, None, is_utf8)
        yield Line(number, text, position)


def _unmarked(head: bytes, setting: str, path: Path) -> str | None:
    """The encoding of UTF-16 without a byte order mark, or of ISO 2022; InputError where the source does not name it."""
    guess = encodings.wide(head)
    if guess is not None and setting == UTF_8:
        raise decoding_error(head, setting, str(path), 1)
    return guess and (guess.encoding if setting == DETECT else setting)


def _wide_lines(file: IO[bytes], path: Path, encoding: str, limit: int) -> Iterator[Line]:
    reader, number = io.TextIOWrapper(file, encoding, newline="\n"), 0
    try:
        while text := reader.readline(limit):
            number += 1
            yield Line(number, text.removeprefix("\ufeff"), 0)
    except UnicodeError as error:
        what, fix = f"not valid {encoding} ({error})", "fetch the file again, or remove its end"
        yield Line(number + 1, MalformedRow(what, where=f"{path}:{number + 1}", fix=fix), 0)
    finally:
        reader.detach()


# -- JSON that is one value ---------------------------------------------------------------------------------------------


def _whole(lines: Iterable[Line], path: Path) -> str:
    parts, size = [], 0
    for line in lines:
        if isinstance(line.text, InputError):
            raise line.text
        parts.append(line.text)
        if (size := size + len(line.text)) >= MAX_WHOLE_BYTES:
            raise _too_long(path)
    return "".join(parts)


def _too_long(path: Path) -> InputError:
    fix = f"write JSON lines: jq -c '.[]' '{path.name}' > '{path.stem}.jsonl'"
    return InputError(f"JSON of more than {MAX_WHOLE_BYTES:,} bytes on one line or in one value", where=path, fix=fix)


def _array(text: str, path: Path, columns: Columns) -> Iterator[Found]:
    """Rows of a list of objects; or of an object that holds one, or is the only row; or of an object on each line."""
    if text.lstrip()[:1] == "[":
        yield from _items(text, path, columns)
        return
    first, _, more = text.partition("\n")
    try:
        if more.strip() and isinstance(json.loads(first), dict):
            lines = (Line(number, line, 0) for number, line in enumerate(io.StringIO(text, newline="\n"), 1))
            yield from _objects(lines, path, columns)
            return
    except (ValueError, RecursionError):
        pass
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        fix = "repair the file; rows are a JSON list of objects, or an object on each line"
        raise InputError(f"not valid JSON ({error})", where=path, fix=fix) from None
    found = columns.of(value, str(path)) if isinstance(value, dict) else no_column(columns.needed[0], (), str(path))
    lists = [each for each in value.values() if _is_rows(each)] if isinstance(value, dict) else []
    if isinstance(found, InputError) and len(lists) == 1:
        for number, row in enumerate(lists[0], 1):
            where = f"{path} item {number}"
            yield where, columns.of(row, where)
        return
    yield str(path), found


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _items(text: str, path: Path, columns: Columns) -> Iterator[Found]:
    decoder, at, line, last, number = json.JSONDecoder(), text.index("[") + 1, 1, 0, 0
    while True:
        at = _GAP.match(text, at).end()  # type: ignore[union-attr]
        line, last, number = line + text.count("\n", last, at), at, number + 1
        where = f"{path}:{line} (item {number})"
        if at == len(text):
            fix = "fetch the file again, or end it with ]"
            yield where, MalformedRow("the JSON list is not whole", where=where, fix=fix)
            return
        if joint := _JOINT.match(text, at):
            at, number = joint.end(), number - 1
            continue
        if text[at] == "]" and _GAP.match(text, at + 1).end() == len(text):  # type: ignore[union-attr]
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else error
            yield where, MalformedRow(f"not valid JSON ({why})", where=where, fix="repair or remove this item")
            following = _BETWEEN.search(text, at)
            if following is None:
                return
            at = following.end()
            continue
        if isinstance(value, dict):
            yield where, columns.of(value, where)
        else:
            yield where, MalformedRow("not a JSON object", where=where, fix="a list of JSON objects")


# -- tables -------------------------------------------------------------------------------------------------------------


def _ended(lines: Iterable[Line]) -> Iterator[Line]:
    """Lines that may also end with a carriage return alone, as old programs write them."""
    for line in lines:
        if isinstance(line.text, str) and "\r" in line.text.rstrip("\r\n"):
            parts = filter(None, re.split(r"(?<=\r)(?!\n)", line.text))
            yield from (Line(line.number + more, part, line.end) for more, part in enumerate(parts))
        else:
            yield line


def _table(lines: Iterator[Line], path: Path, kind: str, columns: Columns, limit: int) -> Iterator[Found]:
    """Rows under a header. Where it has not the columns and these are numbers, there is none, and they count from 1."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the limit is that of all lines of a row
    names: list[str] | None = None
    for number, fields in _records(lines, path, kind, limit):
        where = f"{path}:{number}"
        if isinstance(fields, InputError):
            yield where, fields
            continue
        if names is None:
            names = [name.strip() for name in fields]
            missing = [column for column in columns.needed if column not in names]
            if not missing:
                continue
            if not all(column.isdigit() and 0 < int(column) <= len(names) for column in columns.needed):
                raise no_column(missing[0], names, where)
            names = [str(place) for place in range(1, len(fields) + 1)]
        if len(fields) > len(names) and any(fields[len(names) :]):
            what = f"{len(fields)} fields, and the header has {len(names)}"
            fix = "put fields that hold the separator into double quotes"
            yield where, MalformedRow(what, where=where, fix=fix)
            continue
        row = dict(zip(names, fields, strict=False))
        if any(column not in row for column in columns.needed):
            what, fix = f"{len(fields)} fields, and the header has {len(names)}", "complete or remove the row"
            yield where, MalformedRow(what, where=where, fix=fix)
        else:
            yield where, columns.of(row, where)


def _records(lines: Iterator[Line], path: Path, kind: str, limit: int) -> Iterator[tuple[int, list[str] | InputError]]:
    """The fields of each record, with the number of its first line."""
    pending: deque[Line] = deque()
    separator, width, faults = "" if kind == ".csv" else "\t", 0, 0
    while True:
        taken: list[Line] = []
        bad: list[InputError] = []

        def following() -> Iterator[str]:
            size = 0
            while (line := pending.popleft() if pending else next(lines, None)) is not None:
                taken.append(line)
                if isinstance(line.text, InputError):
                    bad.append(line.text)
                text = line.text if isinstance(line.text, str) else "\n"
                if (size := size + len(text)) > limit:
                    raise csv.Error("a field does not end")
                yield text

        if not separator:
            header = next(following(), "")
            said = re.match(r'"?sep=(.)"?\s*$', header)  # as Excel says it
            separator = said[1] if said else max(SEPARATORS, key=re.sub(r'"[^"]*"', "", header).count)
            pending.extend(() if said else taken)
            taken.clear()
            bad.clear()
        fields, fault = None, ""
        try:
            fields = next(csv.reader(following(), delimiter=separator, strict=True), None)
        except csv.Error as error:
            fault = str(error)
        if not taken:
            return
        number, first = taken[0].number, taken[0].text
        if separator == "\t" and isinstance(first, str) and (fault or len(taken) > 1):
            plain = first.rstrip("\r\n").split("\t")  # such tables are mostly written without quotes
            if (
                fault
                or width > 1
                and all(isinstance(each.text, str) and each.text.count("\t") == width - 1 for each in taken)
            ):
                fields, fault = plain, ""
                pending.extendleft(reversed(taken[1:]))
        if fault:
            faults += 1
            where, fix = f"{path}:{number}", 'write a quote within quotes twice (""), and end every quoted field'
            if faults == MAX_FAULTS:
                raise InputError(f"{faults} rows with quotes at the wrong place", where=where, fix=fix)
            pending.extendleft(reversed(taken[1:]))
            yield number, MalformedRow(f"not a row of a table ({fault})", where=where, fix=fix)
        elif bad:
            yield number, bad[0]
        elif fields:
            width = width or len(fields)
            yield number, fields

"""Rows of local data files: text, source code, pages, notebooks, PDF, JSON lines and Parquet, plain or compressed.

Reads bytes and decodes strictly: what cannot be read is an InputError that
names the file and the line or row, never a row less.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from athanor.base.errors import InputError
from athanor.base.work import Facts, Tick, ignore
from athanor.text import convert

TEXT = frozenset(".txt .text .md .markdown .rst .adoc .org .tex".split())
CODE = frozenset(
    ".py .pyi .pyx .ipy .c .h .cc .cpp .cxx .hh .hpp .hxx .cu .cuh .m .mm .rs .go .java .kt .kts .scala .groovy .clj"
    " .cs .fs .vb .js .mjs .cjs .jsx .ts .tsx .vue .svelte .css .scss .less .php .rb .pl .pm .lua .r .jl .swift .dart"
    " .hs .ml .mli .elm .ex .exs .erl .lisp .el .scm .rkt .nim .zig .d .pas .f .f90 .f95 .asm .s .v .sv .vhd .vhdl"
    " .sh .bash .zsh .fish .ps1 .bat .sql .proto .graphql .cmake .mk .gradle .tf .nix .yaml .yml .toml .ini .cfg".split()
)
# Text files that have no ending.
NAMED_TEXT_FILES = frozenset(("makefile", "dockerfile", "readme", "license", "changelog"))
JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
COMPRESSED = (".gz", ".zst")
BATCH_ROWS, BATCH_BYTES = 256, 64 << 20
# A column that unpacks to more than both is no text: that of books repeated a hundred times packs 300 to 1.
UNPACKED_BYTES, UNPACKED_FACTOR = 256 << 20, 1000
JSON_ESCAPE_BYTES = 6  # a byte of text takes at most this many in a JSON string: \u0000


class MalformedRow(InputError):
    """One row that cannot be used; big data sets of others hold a few, and the source says how many it tolerates."""


class Start(NamedTuple):
    row: int
    byte: int  # of JSON lines, unpacked


BEGIN = Start(0, 0)


def read_rows(
    path: Path, columns: Sequence[str], max_document_bytes: int, start: Start = BEGIN, moved: Tick = ignore
) -> Iterator[tuple[str, Facts]]:
    """Rows of one file as (where, row). `where` is `file:line` (counted from the start), or `file row N` for Parquet.

    A file that is not of rows is one row, its text under `columns[0]`. Only
    `columns` are read; one that is missing is an InputError. `moved` hears the
    first byte of the next line before a row of JSON lines is given.
    """
    kind = file_kind(path)
    try:
        if kind == PARQUET:
            yield from parquet_rows(pq.ParquetFile(path), str(path), columns, max_document_bytes, start=start.row)
            return
        with _open(path) as file:
            if kind in JSON_LINES:
                _skip(file, path, start.byte)
                yield from _json_rows(file, path, columns, max_document_bytes, start.byte, moved)
            else:
                yield str(path), {columns[0]: _text(file, path, kind, max_document_bytes)}
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise InputError(f"cannot be read ({error})", where=path, fix="repair or replace the file") from None


def kind_of_rows(path: Path) -> str | None:
    """The kind of a file that holds one document on each row; None for other files.

    JSON lines may end in .json where a writer numbered its parts: `part-00000.json.gz`, `0.json`.
    """
    name = path.name.lower()
    kinds = (*JSON_LINES, ".json") if name.removeprefix("part-")[:1].isdigit() else JSON_LINES
    is_lines = name.endswith(tuple(kind + packed for kind in kinds for packed in ("", *COMPRESSED)))
    return JSON_LINES[0] if is_lines else PARQUET if name.endswith(PARQUET) else None


def check_text(value: Any, where: str, column: str, max_document_bytes: int) -> str:
    """The text of a row; null counts as empty.

    MalformedRow for other types and lone surrogates, InputError for excessive size.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MalformedRow(f"column '{column}' holds {type(value).__name__}, not text", where=where)
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


def file_kind(path: Path) -> str:
    if kind := kind_of_rows(path):
        return kind
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED and suffixes[-2:-1] != [PARQUET]:
        suffixes.pop()
    kind = suffixes[-1] if suffixes else ".txt" if path.name.lower() in NAMED_TEXT_FILES else ""
    if kind not in (TEXT | CODE) and kind not in convert.RAW_FACTOR:
        fix = "use text, source code, .html, .ipynb, .pdf, .jsonl (these also .gz or .zst) or .parquet; or narrow the glob"
        if kind in (".json", ".csv"):
            fix = "write its rows as JSON lines (.jsonl): one JSON object on each line"
        raise InputError(f"unknown file type '{kind}'", where=path, fix=fix)
    return kind


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")
    if path.suffix.lower() == ".zst":  # the reader of zstandard takes a cut file for a shorter one
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), 1 << 20)
    return open(path, "rb")


def _skip(file: IO[bytes] | gzip.GzipFile, path: Path, count: int) -> None:
    if path.suffix.lower() not in COMPRESSED:
        file.seek(count)
        return
    while data := file.read(min(count, 1 << 20)):  # none of 0 bytes
        count -= len(data)


def _text(file: IO[bytes], path: Path, kind: str, max_document_bytes: int) -> str:
    limit = max_document_bytes * convert.RAW_FACTOR.get(kind, 1)
    data = file.read(limit + 4)  # a byte order mark does not count
    if kind in convert.RAW_FACTOR and len(data) > limit:
        raise too_large(str(path), max_document_bytes)
    if kind == ".pdf":
        text = convert.to_text(kind, data, str(path), max_document_bytes)
    else:
        if (offset := data.find(0)) >= 0:  # UTF-16 of English text is valid UTF-8
            where = f"{path}:{1 + data.count(10, 0, offset)}"
            what = "holds zero bytes: UTF-16, or no text at all"
            raise InputError(what, where=where, fix="convert it (iconv -f UTF-16 -t UTF-8) or leave it out of the glob")
        text = _decode(data.removeprefix(b"\xef\xbb\xbf"), str(path), 1)
        if kind in convert.RAW_FACTOR:
            text = convert.to_text(kind, text, str(path), max_document_bytes)
    return check_text(text, str(path), "text", max_document_bytes)


def _decode(data: bytes, where: str, line: int | None = None) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if line is not None:
            where = f"{where}:{line + data.count(10, 0, error.start)}"
        encoding = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "WINDOWS-1252"
        raise InputError(
            f"not valid UTF-8 (byte 0x{data[error.start]:02x})",
            where=where,
            fix=f"convert the file, for example with iconv -f {encoding} -t UTF-8",
        ) from None


def _json_rows(
    file: IO[bytes], path: Path, columns: Sequence[str], max_document_bytes: int, position: int, moved: Tick
) -> Iterator[tuple[str, Facts]]:
    limit = JSON_ESCAPE_BYTES * max_document_bytes + (1 << 20)
    number = 0
    while line := file.readline(limit):
        number, position = number + 1, position + len(line)
        where = f"{path}:{number}"
        if len(line) == limit:
            raise too_large(where, max_document_bytes)
        text = _decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, where)
        if not text.strip():
            continue  # a blank line at the end, as editors leave it
        row = json_object(text, where)
        for column in columns:
            if column not in row:
                raise _no_column(column, list(row), where)
        moved(position)
        yield where, {column: row[column] for column in columns}


def parquet_rows(
    file: pq.ParquetFile,
    name: str,
    columns: Sequence[str],
    max_document_bytes: int,
    groups: Iterable[int] | None = None,
    number: int = 0,
    start: int = 0,
) -> Iterator[tuple[str, Facts]]:
    """Rows of a Parquet file, or of some of its row groups, of which the first row has the number after `number`.

    Those before row `start` (from 0) are not read.
    """
    for column in columns:
        if column not in file.schema_arrow.names:
            raise _no_column(column, file.schema_arrow.names, name)
    for group in range(file.num_row_groups) if groups is None else groups:
        header = file.metadata.row_group(group)
        if number + header.num_rows <= start:
            number += header.num_rows
            continue
        size = _batch_rows(header, columns, f"{name} row group {group}", max_document_bytes)
        for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=list(columns)):
            skipped = min(max(start - number, 0), batch.num_rows)
            number, batch = number + skipped, batch.slice(skipped)
            arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
            for index in range(batch.num_rows):
                number += 1
                where = f"{name} row {number}"
                try:
                    yield where, {column: arrays[column][index].as_py() for column in columns}
                except UnicodeDecodeError as error:
                    raise InputError(f"not valid UTF-8 ({error})", where=where, fix="write the file again") from None


def _batch_rows(group: Any, columns: Sequence[str], where: str, max_document_bytes: int) -> int:
    """How many rows of a row group may be read at once, by the sizes in its header; InputError for a compression bomb.

    A dictionary's value may come back in each row, so there the whole column stands for one value.
    """
    row_bytes = 1
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema.split(".")[0] not in columns:
            continue
        unpacked_bytes, packed_bytes = column.total_uncompressed_size, column.total_compressed_size
        if unpacked_bytes > max(UNPACKED_BYTES, UNPACKED_FACTOR * packed_bytes):
            what = f"{packed_bytes:,} bytes of a column unpack to {unpacked_bytes:,}"
            raise InputError(what, where=where, fix="look at what wrote the file; no text is packed like that")
        if unpacked_bytes > group.num_rows * max_document_bytes + (1 << 20):
            raise too_large(where, max_document_bytes)
        row_bytes += unpacked_bytes if column.has_dictionary_page else -(-unpacked_bytes // max(group.num_rows, 1))
    return max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))


def _no_column(column: str, present: Sequence[str], where: str) -> InputError:
    names = ", ".join(sorted(present)) or "none"
    fix = f"name one that exists in params.yaml; found: {names}"
    if column == "messages" and len(present) >= 2:
        fix += ". Questions and answers in columns of their own are shape: prompt with columns: [QUESTION, ANSWER]"
    return InputError(f"column '{column}' is missing", where=where, fix=fix)

"""Rows of local data files: text, source code, pages, notebooks, PDF, JSON lines and Parquet, plain or compressed.

Reads bytes and decodes strictly: what cannot be read is an InputError that
names the file and the line or row, never a row less.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from athanor.base.errors import InputError
from athanor.base.work import Facts, Tick, ignore
from athanor.text import convert, encodings, tables
from athanor.text.checks import MalformedRow as MalformedRow
from athanor.text.checks import check_mojibake as check_mojibake
from athanor.text.checks import check_pointer, decoding_error, no_column, too_large
from athanor.text.checks import check_text as check_text
from athanor.text.checks import json_object as json_object
from athanor.text.encodings import UTF_8, Guess
from athanor.text.tables import Columns, Found

TEXT = frozenset(
    ".txt .text .md .markdown .rst .adoc .org .tex .log .srt .vtt .bib .wiki .fasta .fa .fna .smi .pgn .abc".split()
)
CODE = frozenset(
    ".py .pyi .pyx .ipy .c .h .cc .cpp .cxx .hh .hpp .hxx .cu .cuh .m .mm .rs .go .java .kt .kts .scala .groovy .clj"
    " .cs .fs .vb .js .mjs .cjs .jsx .ts .tsx .vue .svelte .css .scss .less .php .rb .pl .pm .lua .r .jl .swift .dart"
    " .hs .ml .mli .elm .ex .exs .erl .lisp .el .scm .rkt .nim .zig .d .pas .f .f90 .f95 .asm .s .v .sv .vhd .vhdl"
    " .sh .bash .zsh .fish .ps1 .bat .sql .proto .graphql .cmake .mk .gradle .tf .nix .yaml .yml .toml .ini .cfg".split()
)
# Text files that have no ending.
NAMED_TEXT_FILES = frozenset(("makefile", "dockerfile", "readme", "license", "changelog"))
JSON_LINES = (".jsonl", ".ndjson")
ROWS = frozenset((*JSON_LINES, ".json", ".csv", ".tsv", ".tab"))
PARQUET = ".parquet"
READ = "text, source code, .html, .epub, .docx, .ipynb, .pdf, .jsonl, .json, .csv, .tsv (also .gz or .zst) or .parquet"
OFFICE = "save it as .docx: soffice --headless --convert-to docx FILE"
BOOK = "convert it to .epub: ebook-convert FILE BOOK.epub (Calibre)"
TABLE = "save it as .csv: soffice --headless --convert-to csv FILE"
CONVERT = {".doc": OFFICE, ".odt": OFFICE, ".rtf": OFFICE, ".xls": TABLE, ".xlsx": TABLE, ".ods": TABLE}
CONVERT |= dict.fromkeys((".mobi", ".azw", ".azw3", ".fb2", ".djvu", ".lit"), BOOK)
COMPRESSED = (".gz", ".zst")
LOOK_BYTES = 4 << 20
BATCH_ROWS, BATCH_BYTES = 256, 64 << 20
# A column that unpacks to more than both is no text: that of books repeated a hundred times packs 300 to 1.
UNPACKED_BYTES, UNPACKED_FACTOR = 256 << 20, 1000


class Start(NamedTuple):
    row: int
    byte: int  # of JSON lines, unpacked


BEGIN = Start(0, 0)


def read_rows(
    path: Path,
    columns: Sequence[str],
    max_document_bytes: int,
    start: Start = BEGIN,
    moved: Tick = ignore,
    *,
    encoding: str = UTF_8,
    optional: Sequence[str] = (),
) -> Iterator[tuple[str, Facts]]:
    """Rows of one file as (where, row). `where` is `file:line` (counted from the start), or `file row N` for Parquet.

    A file that is not of rows is one row, its text under `columns[0]`. Only
    `columns` are read, and `optional` ones that are there; one that is missing is an InputError. `moved` hears the
    first byte of the next line before a row of JSON lines is given. `encoding` is that of what is not UTF-8.
    """
    for where, row in read_all_rows(path, columns, max_document_bytes, start, moved, encoding, optional):
        if isinstance(row, InputError):
            raise row
        yield where, row


def read_all_rows(
    path: Path,
    columns: Sequence[str],
    max_document_bytes: int,
    start: Start = BEGIN,
    moved: Tick = ignore,
    encoding: str = UTF_8,
    optional: Sequence[str] = (),
) -> Iterator[Found]:
    """Rows as `read_rows` has them, with an error in place of each row that cannot be read. InputError for a file that cannot."""
    kind, last = file_kind(path), ""
    try:
        check_pointer(path)
        if kind == PARQUET:
            file = pq.ParquetFile(path)
            present = [column for column in optional if column in file.schema_arrow.names]
            found = parquet_rows(file, str(path), [*columns, *present], max_document_bytes, start=start.row)
            for last, row in found:
                yield last, row
            return
        with _open(path) as file:
            if kind in ROWS:
                _skip(file, path, start.byte)
                chosen = Columns(columns, optional)
                for last, row in tables.read(file, path, kind, chosen, max_document_bytes, encoding, start.byte, moved):
                    yield last, row
            else:
                yield str(path), {columns[0]: _text(file, path, kind, max_document_bytes, encoding)}
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        what = f"cannot be read {f'after {last} ' if last else ''}({error})"
        damage = MalformedRow(what, where=path, fix="repair or replace the file")
        if not last:
            raise damage from None
        yield str(path), damage


def kind_of_rows(path: Path) -> str | None:
    """The kind of a file that holds one document on each row; None for other files.

    JSON lines may end in .json where a writer numbered its parts: `part-00000.json.gz`, `0.json`.
    """
    name = path.name.lower()
    kinds = (*JSON_LINES, ".json") if name.removeprefix("part-")[:1].isdigit() else JSON_LINES
    is_lines = name.endswith(tuple(kind + packed for kind in kinds for packed in ("", *COMPRESSED)))
    return JSON_LINES[0] if is_lines else PARQUET if name.endswith(PARQUET) else None


def file_kind(path: Path) -> str:
    if kind := kind_of_rows(path):
        return kind
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED and suffixes[-2:-1] != [PARQUET]:
        suffixes.pop()
    kind = suffixes[-1] if suffixes else ".txt" if path.name.lower() in NAMED_TEXT_FILES else ""
    if kind not in (TEXT | CODE) and kind not in ROWS and kind not in convert.RAW_FACTOR:
        fix = CONVERT.get(kind, f"use {READ}; or narrow the glob")
        raise InputError(f"unknown file type '{kind}'", where=path, fix=fix)
    return kind


def encoding_of(path: Path) -> Guess | None:
    """A guess at the encoding of a file by its beginning; None where it needs none."""
    kind = file_kind(path)
    if kind == PARQUET or kind in convert.BINARY:
        return None
    with _open(path) as file:
        data = file.read(LOOK_BYTES)
    chosen = encodings.choose(data, UTF_8, cut=len(data) == LOOK_BYTES)
    if isinstance(chosen, str) or (kind in convert.PAGES and convert.declared(data) is not None):
        return None
    return chosen


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")
    if path.suffix.lower() == ".zst":  # the reader of zstandard takes a cut file for a shorter one
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), 1 << 20)
    return open(path, "rb", 1 << 16)  # its beginning decides how it is read


def _skip(file: IO[bytes] | gzip.GzipFile, path: Path, count: int) -> None:
    if path.suffix.lower() not in COMPRESSED:
        file.seek(count)
        return
    while data := file.read(min(count, 1 << 20)):  # none of 0 bytes
        count -= len(data)


def _text(file: IO[bytes], path: Path, kind: str, max_document_bytes: int, setting: str) -> str:
    limit = max_document_bytes * convert.RAW_FACTOR.get(kind, 1)
    data = file.read(limit + 4)  # a byte order mark does not count
    if len(data) == limit + 4 and encodings.choose(data[:1024], UTF_8, cut=True) != UTF_8:
        data += file.read(3 * limit)  # UTF-16 and others take more bytes than UTF-8
    elif len(data) > limit and (kind in convert.RAW_FACTOR or len(data) == limit + 4):
        raise too_large(str(path), max_document_bytes)
    if kind in convert.BINARY:
        return check_text(
            convert.to_text(kind, data, str(path), max_document_bytes), str(path), "text", max_document_bytes
        )
    text = _decode(data, str(path), convert.declared(data) if kind in convert.PAGES else None, setting)
    if (offset := text.find("\0")) >= 0:
        where = f"{path}:{1 + text.count(chr(10), 0, offset)}"
        raise InputError("holds zero bytes: not text", where=where, fix="leave it out of the glob")
    if kind in convert.RAW_FACTOR:
        text = convert.to_text(kind, text, str(path), max_document_bytes)
    return check_text(text, str(path), "text", max_document_bytes)


def _decode(data: bytes, where: str, declared: str | None, setting: str) -> str:
    chosen = encodings.choose(data, UTF_8 if declared is not None else setting)
    if not isinstance(chosen, str) and declared is not None:
        chosen = declared
    try:
        if isinstance(chosen, str):
            return encodings.decode(data, chosen).removeprefix("\ufeff")
    except (UnicodeError, LookupError):
        setting = chosen
    raise decoding_error(data, setting, where, 1)


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
            raise no_column(column, file.schema_arrow.names, name)
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

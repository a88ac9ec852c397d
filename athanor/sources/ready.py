"""Ready corpora: folders of Parquet and JSON lines that stay where they lie, and of which only an index is made.

The index of a shard has a row for each document, with its id, split, licence
and meta but without its text, and names the files that hold the texts (see
`documents.read_rows`). The id is the hash of the text, so a text that
changed after it was indexed is found when it is read. The files of a corpus
are indexed by the executor: small ones together, a large one in several shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from athanor.base.artifacts import digest, link
from athanor.base.errors import InputError
from athanor.base.work import Facts, MapShards
from athanor.sources import select
from athanor.sources.params import CorpusSource
from athanor.sources.raw_shards import Tally
from athanor.text import globs, rows
from athanor.text.documents import INDEX, INDEX_SCHEMA, SHARD_BYTES, Document, ShardWriter, in_batches
from athanor.text.globs import Files
from athanor.text.rows import BEGIN, Start

TEXT_FACTOR = 2.5  # bytes of text in a byte of a compressed file; only for shards of about the same size
INDEX_RATIO = 0.02  # bytes of index for a byte on disk
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


def find(source: CorpusSource) -> Files:
    """The files of rows below the folder, by name; what Spark and others keep there (`_SUCCESS`, `.x.crc`) stays out."""
    folder = Path(source.folder).expanduser()
    if not folder.is_dir():
        raise InputError("no such folder", where=source.folder, fix="correct folder in params.yaml, or mount it")
    found = globs.find([f"{escape(source.folder)}/**/*"])
    visible = [(name, path) for name, path in found if not any(part[0] in "._" for part in Path(name).parts)]
    files = [(name, path) for name, path in visible if rows.kind_of_rows(path)]
    if not files:
        fix = "name a folder of .parquet or .jsonl (also part-*.json, .gz, .zst)"
        raise InputError(f"none of {len(visible):,} files holds rows", where=source.folder, fix=fix)
    return files


def probe(source: CorpusSource) -> tuple[int, int]:
    """Read a row of the first and of the last file; returns how many files there are, and their bytes."""
    files = find(source)
    for file in (files[0], files[-1]):
        next(_outcomes(source, *file, 0.0, lambda position: None), None)
    return len(files), sum(path.stat().st_size for _, path in files)


def index(source: CorpusSource, raw: Path, slot: Path, val_fraction: float, map_shards: MapShards) -> tuple[Tally, int]:
    """Write the source's shards below `raw`; returns the tally and the number of files. What `slot` holds is not done again."""
    files = find(source)
    stats = {name: path.stat() for name, path in files}

    def text_bytes(file: tuple[str, Path]) -> int:
        packed = rows.kind_of_rows(file[1]) == rows.PARQUET or file[1].suffix.lower() in rows.COMPRESSED
        return int(stats[file[0]].st_size * (TEXT_FACTOR if packed else 1))

    tasks: dict[str, Facts] = {}
    sizes: dict[str, int] = {}
    for batch in in_batches(files, text_bytes, SHARD_BYTES):
        state = [(name, stats[name].st_size, stats[name].st_mtime_ns) for name, _ in batch]
        task = digest(state)[:32]
        tasks[task] = {"source": source, "files": batch, "val_fraction": val_fraction}
        sizes[task] = sum(size for _, size, _ in state)
    made, tally, count = slot / "index", Tally(), 0
    (raw / source.name).mkdir(parents=True, exist_ok=True)
    for name, facts in map_shards(index_files, tasks, made, desc=source.name, sizes=sizes).items():
        tally.merge(facts)
        for reason, number in facts["left_out"].items():
            tally.leave_out(reason, number)
        for path in sorted((made / name).glob("*.parquet")):
            link(path, raw / source.name / f"{count:05d}.parquet")
            count += 1
    return tally, len(files)


def index_files(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: index files one after the other; facts: their tally."""
    source, tally = task["source"], Tally()
    with IndexWriter(out, source) as writer:
        for name, path in task["files"]:
            writer.begin(name, path.stat().st_size)
            for outcome in _outcomes(source, name, path, task["val_fraction"], writer.move):
                if isinstance(outcome, str):
                    tally.leave_out(outcome)
                else:
                    tally.add(outcome)
                    writer.add(outcome)
    return asdict(tally)


def _outcomes(source: CorpusSource, name: str, path: Path, val_fraction: float, moved: Any) -> Iterator[Document | str]:
    partitions = partitions_of(name)
    columns = [column for column in select.columns(source) if column not in partitions]
    nested = [column for column in columns if "." in column]
    stored = list(dict.fromkeys(column.partition(".")[0] for column in columns))
    found = rows.read_rows(path, stored, source.max_document_bytes, moved=moved)
    for number, (where, row) in enumerate(found):
        row |= partitions | {column: _inner(row, column) for column in nested}
        yield select.document(source, row, where, {"file": name, "row": number}, val_fraction)


def partitions_of(name: str) -> Facts:
    """Columns of folders such as `lang=en`; whole numbers are numbers."""
    pairs = (part.split("=", 1) for part in Path(name).parts[:-1] if "=" in part)
    values = {column: unquote(value) for column, value in pairs}
    return {
        column: None if value == NO_VALUE else int(value) if re.fullmatch(r"0|-?[1-9]\d{0,17}", value) else value
        for column, value in values.items()
    }


def _inner(row: Mapping[str, Any], column: str) -> Any:
    """A value of a nested column: `metadata.score`; None where there is none."""
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


class IndexWriter(ShardWriter):
    """Writes indexes of about SHARD_BYTES of text, each with the part of every file that it covers."""

    schema = INDEX_SCHEMA

    def __init__(self, folder: Path, source: CorpusSource) -> None:
        super().__init__(folder)
        limits = {"text_column": source.text_column, "max_document_bytes": source.max_document_bytes}
        self._facts: Facts = {"folder": source.folder, **limits}
        self._files: dict[str, Facts] = {}
        self._bytes = 0
        self._row = self._next = BEGIN

    def begin(self, name: str, size: int) -> None:
        """What is added from now on is of this file."""
        self._bytes, self._row, self._next = size, BEGIN, BEGIN

    def move(self, position: int) -> None:
        """The row that comes next begins where the one before it ended."""
        self._row, self._next = self._next, Start(0, position)

    def add(self, document: Document) -> None:
        start = {"bytes": self._bytes, "row": document.meta["row"], "byte": self._row.byte}
        self._files.setdefault(document.meta["file"], start)
        super().add(document)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.describe(INDEX, {**self._facts, "files": self._files})
        self._files = {}
        super().close()

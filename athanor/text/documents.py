"""The document: one schema from download to clean, in Parquet with zstd.

A document is never joined with others by blank lines: that shredded the
predecessors' code and split questions from their answers.

A source is a folder of numbered shards, `<source>/00000.parquet` and so on, so
that work on it can be spread over processes and machines and be resumed. A
shard of a ready corpus (type corpus) is an index: it has no texts, and names
the files that have them. What reads documents finds no difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.text import rows

T = TypeVar("T")
ROW_GROUP_DOCUMENTS = 4096
READ_DOCUMENTS = 256
SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # content hash of text, 32 hex digits
        ("text", pa.large_string()),
        ("source", pa.string()),  # name of the source in params.yaml
        ("kind", pa.string()),  # one of sources.params.KINDS
        ("license", pa.string()),  # SPDX expression, or "unknown"
        ("split", pa.string()),  # train or val, decided once, at download
        ("meta", pa.string()),  # JSON object
    ]
)
INDEX = b"athanor.index"  # key in an index's Parquet footer; the value is JSON: folder, text_column, files, ...
INDEX_SCHEMA = pa.schema([column for column in SCHEMA if column.name != "text"])
NEIGHBOURHOOD = "neighbourhood"  # in the meta of a piece of a long text: what is on one side of every split with it
# Of text; about 12 MB on disk. A shard is the unit of parallel work and of what an interruption costs.
SHARD_BYTES = 32_000_000


def content_id(text: str) -> str:
    """128-bit BLAKE2b of the UTF-8 text, in hex. Lone surrogates are an error (ValueError)."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def hash64(text: str) -> int:
    """A 64-bit BLAKE2b hash of the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def split_of(key: str, val_fraction: float) -> str:
    """The split of a group of documents: "val" for a fixed `val_fraction` of keys, else "train".

    Depends on the key alone, so adding or removing other data moves nothing
    across the line. The key is what must not be divided: a module, a
    conversation, or a document's own content id.
    """
    return "val" if hash64(key) / 2**64 < val_fraction else "train"


@dataclass(frozen=True)
class Document:
    """One text with its provenance. `id` follows from `text`."""

    text: str
    source: str
    kind: str
    license: str
    split: str
    meta: Facts = field(default_factory=dict)

    @property
    def id(self) -> str:
        return content_id(self.text)


def write_documents(path: str | Path, documents: Iterable[Document]) -> int:
    """Write documents in the given order to one file; returns their number.

    Byte-deterministic: explicit schema, fixed row groups, no pandas metadata.
    """
    count = 0
    with DocumentWriter(path) as writer:
        for document in documents:
            writer.add(document)
            count += 1
    return count


def in_batches(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Divide items into consecutive batches; a batch ends with the item with which the sum of its sizes reaches the limit."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= limit:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


class DocumentWriter:
    """Writes one Parquet file of documents, row group by row group."""

    def __init__(self, path: str | Path, schema: pa.Schema = SCHEMA) -> None:
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", compression_level=3)
        self._schema = schema
        self._batch: list[Document] = []

    def add(self, document: Document) -> None:
        self._batch.append(document)
        if len(self._batch) == ROW_GROUP_DOCUMENTS:
            self._flush()

    def _flush(self) -> None:
        table = pa.table(_columns(self._batch, self._schema), schema=self._schema)
        self._writer.write_table(table, row_group_size=ROW_GROUP_DOCUMENTS)
        self._batch = []

    def describe(self, key: bytes, value: Facts) -> None:
        """Write facts into the file's footer."""
        self._writer.add_key_value_metadata({key: json.dumps(value, sort_keys=True)})

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._batch:
            self._flush()
        self._writer.close()


class ShardWriter:
    """Writes documents in the given order as numbered shards of about `shard_bytes` of text.

    A shard is closed by the document that reaches the limit.
    """

    schema = SCHEMA

    def __init__(self, folder: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self.count = self._shards = self._size = 0
        self._writer: DocumentWriter | None = None

    def add(self, document: Document) -> None:
        if self._writer is None:
            self._writer = DocumentWriter(self.folder / f"{self._shards:05d}.parquet", self.schema)
        self._writer.add(document)
        self.count += 1
        self._size += len(document.text.encode())
        if self._size >= self.shard_bytes:
            self.close()

    def close(self) -> None:
        """Finish the shard that is open; the next document begins another."""
        if self._writer is not None:
            self._writer.__exit__(None)
            self._writer, self._shards, self._size = None, self._shards + 1, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_shards(folder: str | Path, documents: Iterable[Document], shard_bytes: int = SHARD_BYTES) -> int:
    """Write documents as the shards of a source (see ShardWriter); returns their number."""
    with ShardWriter(folder, shard_bytes) as writer:
        for document in documents:
            writer.add(document)
    return writer.count


LABELS = "labels"  # the folder below data/raw of texts that classifiers learn from: one level too deep for a source


def shard_files(folder: str | Path) -> dict[str, list[Path]]:
    """The shards of each source in a folder of sources, in order; sources without a shard are left out."""
    shards: dict[str, list[Path]] = {}
    for path in sorted(Path(folder).glob("*/*.parquet")):
        shards.setdefault(path.parent.name, []).append(path)
    return shards


def read_sources(folder: str | Path) -> Iterator[Document]:
    """Every document below a folder of sources: by name of the source, in the source's order."""
    for paths in shard_files(folder).values():
        for path in paths:
            yield from read_documents(path)


def _columns(batch: list[Document], schema: pa.Schema) -> dict[str, list[Any]]:
    columns = {name: [getattr(document, name) for document in batch] for name in schema.names}
    return columns | {"meta": [json.dumps(meta, sort_keys=True, ensure_ascii=False) for meta in columns["meta"]]}


def read_documents(path: str | Path) -> Iterator[Document]:
    """Stream the documents of one Parquet file, row group by row group; further columns are not read."""
    for row in read_rows(path):
        del row["id"]
        yield Document(**row | {"meta": json.loads(row["meta"])})


def read_rows(path: str | Path) -> Iterator[Facts]:
    """The rows of one Parquet file with the columns of SCHEMA, also of an index."""
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"not a readable Parquet file ({error})", where=path) from None
    index = index_of(file)
    names = (SCHEMA if index is None else INDEX_SCHEMA).names
    if file.schema_arrow.names[: len(names)] != names:
        raise InputError(f"columns {file.schema_arrow.names}, expected {names}", where=path)
    batches = file.iter_batches(batch_size=READ_DOCUMENTS, columns=names)
    found = (row for batch in batches for row in batch.to_pylist())
    if index is None:
        yield from found
    else:
        for name, group in groupby(found, lambda row: json.loads(row["meta"])["file"]):
            yield from _with_texts(group, index, name)


def index_of(file: pq.ParquetFile) -> Facts | None:
    """What an index says of its corpus; None for a file with texts."""
    footer = file.metadata.metadata or {}
    return json.loads(footer[INDEX]) if INDEX in footer else None


def _with_texts(indexed: Iterable[Facts], index: Mapping[str, Any], name: str) -> Iterator[Facts]:
    """Rows of an index that are in one file of the corpus, with their texts; InputError unless these are what was indexed."""
    path, file = Path(index["folder"]).expanduser() / name, index["files"][name]
    column, limit, fix = index["text_column"], index["max_document_bytes"], "index it again: dvc repro -f -s download"
    try:
        size = path.stat().st_size
    except OSError as error:
        what = f"a file of a ready corpus cannot be read ({error.strerror})"
        raise InputError(what, where=path, fix=f"put it back, on every machine that works; or {fix}") from None
    start = rows.Start(file["row"], file["byte"])
    if not start.byte and rows.kind_of_rows(path) != rows.PARQUET:  # a list, or UTF-16: read from its beginning
        start = rows.BEGIN
    texts = enumerate(rows.read_rows(path, [column], limit, start), start.row)
    for row in indexed:
        wanted = json.loads(row["meta"])["row"]
        where, text = next(
            ((where, found[column]) for number, (where, found) in texts if number == wanted), (str(path), None)
        )
        text = rows.check_text(text, where, column, limit) if size == file["bytes"] else ""
        if content_id(text) != row["id"]:
            raise InputError("changed after it was indexed", where=where, fix=f"put it back as it was, or {fix}")
        yield row | {"text": text}

"""The document: one schema from download to clean, in Parquet with zstd.

A document is never joined with others by blank lines: that shredded the
predecessors' code and split questions from their answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from athanor.errors import InputError

SCHEMA_VERSION = 1
ROW_GROUP_DOCUMENTS = 4096
SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # content hash of text, 32 hex digits
        ("text", pa.large_string()),
        ("source", pa.string()),  # name of the source in params.yaml
        ("kind", pa.string()),  # web, prose, code, math, qa
        ("license", pa.string()),  # SPDX expression, or "unknown"
        ("split", pa.string()),  # train or val, decided once, at download
        ("meta", pa.string()),  # JSON object
    ]
)
KINDS = ("web", "prose", "code", "math", "qa")


def content_id(text: str) -> str:
    """128-bit BLAKE2b of the UTF-8 text, in hex. Lone surrogates are an error (ValueError)."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def split_of(key: str, val_fraction: float) -> str:
    """The split of a group of documents: "val" for a fixed `val_fraction` of keys, else "train".

    Depends on the key alone, so adding or removing other data moves nothing
    across the line. The key is what must not be divided: a module, a
    conversation, or a document's own content id.
    """
    bucket = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
    return "val" if bucket < val_fraction else "train"


@dataclass(frozen=True)
class Document:
    """One text with its provenance. `id` follows from `text`."""

    text: str
    source: str
    kind: str
    license: str
    split: str
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return content_id(self.text)


def write_documents(path: str | Path, documents: Iterable[Document]) -> int:
    """Write documents in the given order; returns their number.

    Byte-deterministic: explicit schema, fixed row groups, no pandas metadata.
    """
    count = 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd", compression_level=3) as writer:
        batch: list[Document] = []
        for document in documents:
            batch.append(document)
            count += 1
            if len(batch) == ROW_GROUP_DOCUMENTS:
                writer.write_table(_table(batch), row_group_size=ROW_GROUP_DOCUMENTS)
                batch = []
        if batch:
            writer.write_table(_table(batch), row_group_size=ROW_GROUP_DOCUMENTS)
    return count


def _table(batch: list[Document]) -> pa.Table:
    columns = {
        "id": [d.id for d in batch],
        "text": [d.text for d in batch],
        "source": [d.source for d in batch],
        "kind": [d.kind for d in batch],
        "license": [d.license for d in batch],
        "split": [d.split for d in batch],
        "meta": [json.dumps(d.meta, sort_keys=True, ensure_ascii=False) for d in batch],
    }
    return pa.table(columns, schema=SCHEMA)


def read_documents(path: str | Path) -> Iterator[Document]:
    """Stream the documents of one Parquet file, row group by row group."""
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"not a readable Parquet file ({error})", where=str(path)) from None
    if file.schema_arrow.names != SCHEMA.names:
        raise InputError(f"columns {file.schema_arrow.names}, expected {SCHEMA.names}", where=str(path))
    for batch in file.iter_batches(batch_size=ROW_GROUP_DOCUMENTS):
        for row in batch.to_pylist():
            yield Document(
                row["text"], row["source"], row["kind"], row["license"], row["split"], json.loads(row["meta"])
            )

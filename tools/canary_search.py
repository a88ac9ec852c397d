"""What to look for, and what is packed in a file: the half of tools/canaries.py that finds."""

from __future__ import annotations

import base64
import contextlib
import gzip
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow.parquet as pq
import zstandard


def forms(cores: Mapping[str, str]) -> dict[bytes, str]:
    """The bytes to look for: each secret in plain, and in base64 however it lies in there."""
    found = {}
    for name, core in cores.items():
        found[core.encode()] = name
        for before in range(3):
            coded = base64.b64encode(b"x" * before + core.encode())
            found[coded[4 if before else 0 : -4]] = name
    return found


def contents(path: Path, data: bytes) -> Iterator[bytes]:
    """A file's bytes, and what is packed in them."""
    yield data
    with contextlib.suppress(OSError, EOFError, zlib.error):
        if data[:2] == b"\x1f\x8b":
            yield gzip.decompress(data)
        elif data[:1] == b"\x78":
            yield zlib.decompress(data)
    with contextlib.suppress(zstandard.ZstdError):
        if data[:4] == b"\x28\xb5\x2f\xfd":
            yield zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    if data[:4] == b"PAR1":
        file = pq.ParquetFile(path)
        yield str(file.schema_arrow.metadata).encode()
        for batch in file.iter_batches(1000):
            yield str(batch.to_pylist()).encode()
    if data[:15] == b"SQLite format 3":  # a long text is spread over pages
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db,
        ):
            db.text_factory = bytes
            for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                for row in db.execute(f'SELECT * FROM "{table.decode()}"'):
                    yield b"\n".join(value for value in row if isinstance(value, bytes))

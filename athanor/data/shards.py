"""Token shards: little-endian id files with document offsets, written once and read in any order.

    train/00000.bin       ids, uint16 where the vocabulary fits, else uint32
    train/00000.idx.npy   uint64 [documents + 1]: where each document starts, and the end
    train/00000.src.npy   uint8 [documents]: number of each document's source in the manifest
    val/<source>/00000.bin, 00000.idx.npy
    cooldown/             as train, with the mixture of the cooldown; only where params.yaml has one

A document never crosses a shard. Every document is `<|bos|>` ids `<|eos|>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.artifacts import digest, read_manifest
from athanor.base.errors import InputError
from athanor.base.files import OpenFiles, joined

KIND, VERSION = "shards", 1
TRAIN = "train"  # the folder of the main stream
COOLDOWN = "cooldown"  # the folder, and the manifest's entry on it


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Write documents in the given order into numbered shards of about `shard_tokens`.

    A shard is closed by the document that reaches the limit, so documents stay whole.
    """

    def __init__(self, folder: Path, dtype: np.dtype, shard_tokens: int, *, sources: bool) -> None:
        self._folder, self._dtype, self._limit, self._sources = folder, dtype, shard_tokens, sources
        self._file: Any = None
        self._starts: list[int] = [0]
        self._source_numbers: list[int] = []
        self.shards = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, ids: np.ndarray, source: int = 0) -> None:
        if self._file is None:
            self._file = open(self._folder / f"{self.shards:05d}.bin", "wb")
        self._file.write(np.ascontiguousarray(ids, dtype=self._dtype).data)
        self._starts.append(self._starts[-1] + len(ids))
        self._source_numbers.append(source)
        if self._starts[-1] >= self._limit:
            self.close()

    def close(self) -> None:
        if self._file is None:
            return
        self._file.close()
        stem = self._folder / f"{self.shards:05d}"
        np.save(f"{stem}.idx.npy", np.array(self._starts, dtype=np.uint64))
        if self._sources:
            np.save(f"{stem}.src.npy", np.array(self._source_numbers, dtype=np.uint8))
        self._file, self._starts, self._source_numbers = None, [0], []
        self.shards += 1


class TokenStream:
    """The shards of one folder as a single stream of tokens and documents.

    `tokens` and `documents` are totals; `starts` is int64 [documents + 1], the
    position of each document in the stream and the end of the last. Memory: 8
    bytes for each document. `files` may be shared with other streams, so that
    all have few files open.
    """

    def __init__(self, folder: str | Path, dtype: np.dtype, files: OpenFiles | None = None) -> None:
        paths = sorted(Path(folder).glob("*.bin"))
        if not paths:
            raise InputError("no token shards", where=str(folder), fix="dvc repro shard")
        self._open(paths, dtype, files)

    @classmethod
    def of(cls, paths: Sequence[Path], dtype: np.dtype, files: OpenFiles | None = None) -> TokenStream:
        """The stream of these files, in this order; at least one."""
        stream = cls.__new__(cls)
        stream._open(paths, dtype, files)
        return stream

    def _open(self, paths: Sequence[Path], dtype: np.dtype, files: OpenFiles | None) -> None:
        self._paths, self._dtype, self._files = paths, dtype, files or OpenFiles()
        bases = [0]

        def starts() -> Iterator[np.ndarray]:
            for path in paths:
                index = np.load(path.with_suffix(".idx.npy"))
                if path.stat().st_size != int(index[-1]) * dtype.itemsize:
                    what = "length differs from its document index"
                    raise InputError(what, where=str(path), fix="dvc checkout --force")
                yield index[:-1].astype(np.int64) + bases[-1]
                bases.append(bases[-1] + int(index[-1]))
            yield np.array(bases[-1:])

        self.starts = joined(starts(), np.int64)
        self._bases = np.array(bases)
        self.tokens, self.documents = bases[-1], len(self.starts) - 1

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` ids from stream position `start`, across shard ends, as int64."""
        if start < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.tokens}")
        out = np.empty(count, dtype=np.int64)
        copied, shard = 0, int(np.searchsorted(self._bases, start, side="right")) - 1
        while copied < count:
            base, end = self._bases[shard : shard + 2].tolist()
            size = min(count - copied, end - start - copied)
            offset = (start + copied - base) * self._dtype.itemsize
            out[copied : copied + size] = self._files.read(self._paths[shard], offset, size, self._dtype)
            copied, shard = copied + size, shard + 1
        return out

    def document_of(self, positions: np.ndarray) -> np.ndarray:
        """Ordinal of the document that holds each stream position, int64."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    @cached_property
    def sources(self) -> np.ndarray:
        """Number of each document's source in the manifest, uint8; 0 for a stream that has one source only."""
        paths = [path.with_suffix(".src.npy") for path in self._paths]
        if not all(path.is_file() for path in paths):
            return np.zeros(self.documents, dtype=np.uint8)
        return joined(map(np.load, paths), np.uint8)

    def document(self, number: int) -> np.ndarray:
        """Ids of one document, with its `<|bos|>` and `<|eos|>`."""
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        return self.read(start, end - start)


def read_shards_manifest(folder: str | Path) -> dict[str, Any]:
    return read_manifest(folder, KIND, VERSION)


def open_train(folder: str | Path) -> TokenStream:
    """The training stream of a data/shards folder."""
    manifest = read_shards_manifest(folder)
    return TokenStream(Path(folder) / TRAIN, np.dtype(manifest["dtype"]))


def open_cooldown(folder: str | Path) -> TokenStream | None:
    """The stream of the cooldown, where the mixture has one."""
    manifest = read_shards_manifest(folder)
    return TokenStream(Path(folder) / COOLDOWN, np.dtype(manifest["dtype"])) if COOLDOWN in manifest else None


def main_digest(folder: str | Path) -> str:
    """Stands for all of the folder but the cooldown: what the manifest's digest would be without one."""
    manifest = read_shards_manifest(folder)
    manifest.pop(COOLDOWN, None)
    files = manifest["files"]
    return digest({**manifest, "files": {name: files[name] for name in files if not name.startswith(f"{COOLDOWN}/")}})


def open_val(folder: str | Path) -> dict[str, TokenStream]:
    """The validation stream of each source that has held-out documents, in order of name."""
    manifest = read_shards_manifest(folder)
    dtype = np.dtype(manifest["dtype"])
    names, files = sorted(name for name, facts in manifest["val"].items() if facts["documents"]), OpenFiles()
    return {name: TokenStream(Path(folder) / "val" / name, dtype, files) for name in names}

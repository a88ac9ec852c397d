"""The clean corpus tokenised once, into a spool of one folder for each Parquet file of data/clean.

A mixture only orders documents, so it is made from the spool, and another
share or length tokenises nothing again. Both mixtures, of the main stream and
of the cooldown, read the same spool.

    <file>/tokens/<source>/00000.bin, 00000.idx.npy   as in `shards`
    <file>/tokens/<source>/content.npy                uint64 [documents, 2]: the 128-bit hash of each text
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from athanor.base.files import OpenFiles, joined
from athanor.base.work import Facts, MapShards
from athanor.data.shards import ShardWriter, TokenStream, token_dtype
from athanor.text.documents import in_batches, read_documents
from athanor.tokenizer.tokenizer import Tokenizer

BATCH_CHARS = 1 << 20
CONTENT = "content.npy"
ONE_FILE = 1 << 62  # more tokens than a file will have


class SpoolWriter:
    """Writes the spool's folder of one file: documents of any sources, each source in the order given."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        self._folder, self._dtype = folder / "tokens", dtype
        self._writers: dict[str, ShardWriter] = {}
        self._hashes: dict[str, bytearray] = {}
        self._text_bytes: dict[str, int] = {}

    def add(self, source: str, ids: np.ndarray, text: bytes) -> None:
        """One document: its ids with `<|bos|>` and `<|eos|>`, and the text that they stand for."""
        if source not in self._writers:
            self._writers[source] = ShardWriter(self._folder / source, self._dtype, ONE_FILE, sources=False)
            self._hashes[source], self._text_bytes[source] = bytearray(), 0
        self._writers[source].add(ids)
        self._hashes[source] += hashlib.blake2b(text, digest_size=16).digest()
        self._text_bytes[source] += len(text)

    def close(self) -> dict[str, int]:
        """Finish the files; returns the bytes of text of each source."""
        for source, writer in self._writers.items():
            writer.close()
            hashes = np.frombuffer(self._hashes[source], ">u8").reshape(-1, 2)
            np.save(self._folder / source / CONTENT, hashes.astype("<u8"))
        return self._text_bytes


@dataclass(frozen=True)
class Tokens:
    """One source of a split, tokenised: `paths` of its token files in order, `lengths` int64 [documents] in tokens.

    8 bytes of memory per document; ids and content hashes stay on disk.
    """

    paths: tuple[Path, ...]
    lengths: np.ndarray
    text_bytes: int

    @property
    def documents(self) -> int:
        return len(self.lengths)

    def stream(self, dtype: np.dtype, files: OpenFiles | None = None) -> TokenStream:
        return TokenStream.of(self.paths, dtype, files)

    def content_hashes(self) -> Iterator[np.ndarray]:
        """uint64 [documents, 2] of one file after the other."""
        for path in self.paths:
            yield np.load(path.with_name(CONTENT))


def read_spool(folder: Path, text_bytes: Mapping[str, Mapping[str, int]]) -> dict[str, Tokens]:
    """The tokens of each source, from the bytes of text by file and source; files in the order given."""
    paths: dict[str, list[Path]] = {}
    total_bytes: dict[str, int] = {}
    for name, sizes in text_bytes.items():
        for source, size in sizes.items():
            paths.setdefault(source, []).append(folder / name / "tokens" / source / "00000.bin")
            total_bytes[source] = total_bytes.get(source, 0) + size
    return {
        source: Tokens(tuple(source_paths), _lengths(source_paths), total_bytes[source])
        for source, source_paths in sorted(paths.items())
    }


def _lengths(paths: Sequence[Path]) -> np.ndarray:
    return joined((np.diff(np.load(path.with_suffix(".idx.npy")).astype(np.int64)) for path in paths), np.int64)


def tokenise(
    map_shards: MapShards,
    files: Mapping[str, Sequence[Path]],
    tokenizer: Path,
    folder: Path,
    desc: str,
    text_bytes: int,
) -> dict[str, Tokens]:
    """Tokenise Parquet files into `folder`, which may hold some of it already; returns the tokens of each source.

    `files` are groups of files by a name (a source, or anything for a file of
    many sources), in the order that their documents have; `text_bytes` is all
    their text, for the progress.
    """
    paths_by_name = {f"{name}-{number:05d}": path for name, paths in files.items() for number, path in enumerate(paths)}
    tasks = {
        name: {"documents": path.absolute(), "tokenizer": tokenizer.absolute()} for name, path in paths_by_name.items()
    }
    file_sizes = {name: path.stat().st_size for name, path in paths_by_name.items()}
    sizes = {name: text_bytes * size // max(1, sum(file_sizes.values())) for name, size in file_sizes.items()}
    facts_by_file = map_shards(tokenise_file, tasks, folder, desc=desc, sizes=sizes)
    return read_spool(folder, {name: facts["text_bytes"] for name, facts in facts_by_file.items()})


def tokenise_file(task: Mapping[str, Path], out: Path) -> Facts:
    """Write the documents of one Parquet file as `<|bos|>` ids `<|eos|>` into the spool.

    Work as in `athanor.base.work`. Memory: a batch of about a megabyte of
    text, the row group that Parquet reads, and 60 bytes for each document of the file.
    """
    tokenizer = Tokenizer.load(task["tokenizer"])
    bos, eos = np.array([tokenizer.bos], dtype=np.int32), np.array([tokenizer.eos], dtype=np.int32)
    writer = SpoolWriter(out, token_dtype(tokenizer.vocab_size))
    for batch in in_batches(read_documents(task["documents"]), lambda document: len(document.text), BATCH_CHARS):
        encoded = tokenizer.encode_arrays([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            writer.add(document.source, np.concatenate([bos, ids, eos]), document.text.encode())
    return {"text_bytes": writer.close()}

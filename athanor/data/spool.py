"""The spool: every document tokenised once, one folder for each Parquet file of data/clean.

A mixture only orders documents, so it is made from the spool, and another
share or length tokenises nothing again. Both mixtures, of the main stream and
of the cooldown, read the same spool.

    <file>/tokens/<source>/00000.bin, 00000.idx.npy   as in `shards`
    <file>/tokens/<source>/content.npy                uint64 [documents, 2]: the 128-bit hash of each text
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from athanor.corpus.work import MapShards
from athanor.data.shards import ShardWriter, TokenStream, token_dtype

BATCH_CHARS = 1 << 20
CONTENT = "content.npy"
ONE_FILE = 1 << 62  # more tokens than a file will have


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

    def stream(self, dtype: np.dtype) -> TokenStream:
        return TokenStream.of(self.paths, dtype)

    def contents(self) -> Iterator[np.ndarray]:
        """uint64 [documents, 2] of one file after the other."""
        for path in self.paths:
            yield np.load(path.with_name(CONTENT))


def spool(
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
    named = {f"{name}-{number:05d}": path for name, paths in files.items() for number, path in enumerate(paths)}
    model = str(tokenizer.absolute())
    tasks = {name: {"documents": str(path.absolute()), "tokenizer": model} for name, path in named.items()}
    on_disk = {name: path.stat().st_size for name, path in named.items()}
    share = text_bytes / max(1, sum(on_disk.values()))
    sizes = {name: int(size * share) for name, size in on_disk.items()}
    found = map_shards(tokenise_file, tasks, folder, desc=desc, sizes=sizes)
    paths: dict[str, list[Path]] = {}
    sums: dict[str, int] = {}
    for name, facts in found.items():
        for source, size in facts["text_bytes"].items():
            paths.setdefault(source, []).append(folder / name / "tokens" / source / "00000.bin")
            sums[source] = sums.get(source, 0) + size
    return {source: Tokens(tuple(at), _lengths(at), sums[source]) for source, at in sorted(paths.items())}


def _lengths(paths: Sequence[Path]) -> np.ndarray:
    return np.concatenate([np.diff(np.load(path.with_suffix(".idx.npy")).astype(np.int64)) for path in paths])


def tokenise_file(task: Mapping[str, str], out: Path) -> dict[str, Any]:
    """Write the documents of one Parquet file as `<|bos|>` ids `<|eos|>`, a folder for each source.

    Work as in `athanor.corpus.work`; its facts are the bytes of text of each
    source. Needs a batch of documents and 50 bytes for each document of the file.
    """
    # Here, because training imports this package where neither SentencePiece nor Parquet is installed.
    from athanor.corpus.documents import read_documents
    from athanor.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(task["tokenizer"])
    dtype = token_dtype(tokenizer.vocab_size)
    bos, eos = np.array([tokenizer.bos], dtype=np.int32), np.array([tokenizer.eos], dtype=np.int32)
    writers: dict[str, ShardWriter] = {}
    text_bytes: dict[str, int] = {}
    hashes: dict[str, bytearray] = {}
    documents = ((document.source, document.text) for document in read_documents(task["documents"]))
    for batch in _batches(documents):
        encoded = tokenizer.encode_arrays([text for _, text in batch])
        for (source, text), ids in zip(batch, encoded, strict=True):
            if source not in writers:
                writers[source] = ShardWriter(out / "tokens" / source, dtype, ONE_FILE, sources=False)
                text_bytes[source], hashes[source] = 0, bytearray()
            data = text.encode()
            writers[source].add(np.concatenate([bos, ids, eos]))
            text_bytes[source] += len(data)
            hashes[source] += hashlib.blake2b(data, digest_size=16).digest()
    for source, writer in writers.items():
        writer.close()
        np.save(out / "tokens" / source / CONTENT, np.frombuffer(hashes[source], ">u8").reshape(-1, 2).astype("<u8"))
    return {"text_bytes": text_bytes}


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document[1])
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch

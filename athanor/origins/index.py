"""The index of a stream of documents: made once for its bytes, kept below .athanor/, read by memory map.

    00000.ids.npy     ids of distinct documents, one after the other; a block, about BLOCK_TOKENS of them
    00000.order.npy   uint32: the block's suffix array
    starts.npy        int64 [distinct + 1]: where each distinct document starts in all blocks together, and the end
    distinct.npy      int64 [documents]: number of the distinct document that each document of the stream equals
    counts.npy        int64 [vocabulary]: how often each id occurs in the distinct documents

A stream repeats documents, epoch after epoch, so only one of equal ones is indexed. The index is a cache: nothing is
lost with it, and that of older data goes when a new one is made.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from athanor.base.artifacts import MANIFEST, new_dir, read_manifest, write_manifest
from athanor.base.work import Tick, ignore
from athanor.origins.suffixes import Block, suffix_array

FOLDER = Path(".athanor/origins")
KIND, VERSION = "origins", 1
BLOCK_TOKENS = 16_000_000  # 0.8 GB of memory while it is sorted


class Documents(Protocol):
    """What can be indexed: numbered documents as token ids. `digest` stands for all of their bytes."""

    name: str
    digest: str
    vocab_size: int

    def __len__(self) -> int: ...

    def ids(self, number: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Index:
    """An index on disk, opened. `bases`: int64 [blocks + 1], where each block starts in all together."""

    blocks: list[Block]
    bases: np.ndarray
    starts: np.ndarray
    distinct: np.ndarray
    counts: np.ndarray

    def document_of(self, places: np.ndarray) -> np.ndarray:
        """Numbers of the distinct documents that hold these places of all blocks together, int64."""
        return np.searchsorted(self.starts, places, side="right") - 1

    def copies(self, number: int) -> np.ndarray:
        """Numbers of the stream's documents that equal a distinct one, ascending."""
        documents, numbers = self._by_number
        return documents[slice(*np.searchsorted(numbers, (number, number + 1)))]

    @cached_property
    def _by_number(self) -> tuple[np.ndarray, np.ndarray]:
        """The stream's documents in the order of their distinct documents, and the numbers of these."""
        documents = np.argsort(self.distinct, kind="stable")
        return documents, self.distinct[documents]

    def around(self, place: int, tokens: int, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Up to `most` ids before and after these tokens, in their document."""
        document = int(np.searchsorted(self.starts, place, side="right")) - 1
        first, last = int(self.starts[document]), int(self.starts[document + 1])
        block = int(np.searchsorted(self.bases, place, side="right")) - 1
        base, ids = int(self.bases[block]), self.blocks[block].ids
        end = place + tokens
        return ids[max(first, place - most) - base : place - base], ids[end - base : min(last, end + most) - base]

    def longest(self, query: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """As `Block.longest`, over all blocks."""
        return np.max([block.longest(query, starts) for block in self.blocks], axis=0)

    def places(self, patterns: list[np.ndarray], most: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """For each pattern how often it occurs, int64, and up to `most` of the places where it begins."""
        times, found = np.zeros(len(patterns), np.int64), [np.zeros(0, np.int64) for _ in patterns]
        for block, base in zip(self.blocks, self.bases[:-1], strict=True) if patterns else ():
            for number, (low, high) in enumerate(block.ranges(patterns).tolist()):
                times[number] += high - low
                rest = min(high - low, most - len(found[number]))
                found[number] = np.append(found[number], block.order[low : low + rest].astype(np.int64) + base)
        return times, found


def folder_of(root: Path, documents: Documents) -> Path:
    """Where the index of these documents is, or will be."""
    return root / FOLDER / f"{documents.name}-{documents.digest[:16]}"


def ready(root: Path, documents: Documents) -> bool:
    return (folder_of(root, documents) / MANIFEST).is_file()


def open_index(root: Path, documents: Documents, advance: Tick = ignore) -> Index:
    """The index of these documents, which is made if it is not there; `advance` hears of the tokens indexed."""
    folder = folder_of(root, documents)
    if not (folder / MANIFEST).is_file():
        with new_dir(folder) as temporary:
            _build(temporary, documents, advance)
        for other in folder.parent.glob(f"{documents.name}-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    count = read_manifest(folder, KIND, VERSION)["counts"]["blocks"]

    def mapped(name: str) -> np.ndarray:
        return np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray)

    blocks = [Block(mapped(f"{number:05d}.ids"), mapped(f"{number:05d}.order")) for number in range(count)]
    bases = np.cumsum([0, *[len(block.ids) for block in blocks]])
    return Index(blocks, bases, *(np.load(folder / f"{name}.npy") for name in ("starts", "distinct", "counts")))


def _build(folder: Path, documents: Documents, advance: Tick) -> None:
    hashes = np.array([_hash(documents.ids(number)) for number in range(len(documents))], np.uint64)
    _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
    # Numbered by their first place in the stream, so that neighbours there are neighbours here.
    by_place = np.argsort(first)
    number_of = np.empty(len(first), np.int64)
    number_of[by_place] = np.arange(len(first))
    starts, blocks, counts = [0], 0, np.zeros(documents.vocab_size, np.int64)
    for block in _blocks(documents, first[by_place]):
        ids = np.concatenate(block)
        np.save(folder / f"{blocks:05d}.ids.npy", ids)
        np.save(folder / f"{blocks:05d}.order.npy", suffix_array(ids))
        counts += np.bincount(ids, minlength=len(counts))
        starts += (starts[-1] + np.cumsum([len(document) for document in block])).tolist()
        blocks += 1
        advance(len(ids))
    np.save(folder / "starts.npy", np.array(starts, np.int64))
    np.save(folder / "distinct.npy", number_of[group])
    np.save(folder / "counts.npy", counts)
    sizes = {"blocks": blocks, "tokens": starts[-1], "documents": len(documents), "distinct": len(first)}
    write_manifest(folder, kind=KIND, version=VERSION, counts=sizes, parents={"data": documents.digest})


def _hash(ids: np.ndarray) -> int:
    # Of two billion tokens in a million documents, 64 bits take two different ones for equal once in 10^7 times.
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(ids).data, digest_size=8).digest(), "big")


def _blocks(documents: Documents, numbers: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Documents in whole blocks; one ends with the document that reaches the limit."""
    block: list[np.ndarray] = []
    tokens = 0
    for number in numbers.tolist():
        block.append(documents.ids(number))
        tokens += len(block[-1])
        if tokens >= BLOCK_TOKENS:
            yield block
            block, tokens = [], 0
    if block:
        yield block

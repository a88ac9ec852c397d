"""Rows of a fixed number of tokens: packing, writer and memory-mapped reader. An entry is a conversation, or a piece of pretraining text.

    <split>_ids.bin       ids of every entry, one after the other
    <split>_mask.bin      uint8, 1 = supervised target
    <split>_idx.npy       uint64 [entries + 1]: where each entry starts, and the end
    <split>_sources.npy   uint16 [entries]: number of the entry's source in the manifest's lists
    <split>_rows.npy      int64: entry numbers, row after row (a repeated conversation appears again)
    <split>_row_idx.npy   int64 [rows + 1]: where each row starts in it

The manifest's `sources` names the conversation sources and `replay_sources`
those of pretraining text, whose numbers go on after them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from athanor.base.artifacts import read_manifest
from athanor.base.errors import InputError
from athanor.data.order import permutation
from athanor.data.shards import token_dtype

KIND, VERSION = "sft", 2


def write_split(
    folder: Path,
    split: str,
    entries: Sequence[tuple[Sequence[int], Sequence[int]]],
    rows: Sequence[Sequence[int]],
    vocab_size: int,
    sources: Sequence[int] | None = None,
) -> None:
    """Write the (ids, mask) of each entry, the number of its source (0 if None) and the rows made of their numbers."""
    dtype = token_dtype(vocab_size)
    with open(folder / f"{split}_ids.bin", "wb") as ids_file, open(folder / f"{split}_mask.bin", "wb") as mask_file:
        for ids, mask in entries:
            ids_file.write(np.asarray(ids, dtype=dtype).data)
            mask_file.write(np.asarray(mask, dtype=np.uint8).data)
    np.save(folder / f"{split}_idx.npy", np.cumsum([0, *[len(ids) for ids, _ in entries]], dtype=np.uint64))
    np.save(folder / f"{split}_sources.npy", np.asarray([0] * len(entries) if sources is None else sources, np.uint16))
    np.save(folder / f"{split}_rows.npy", np.array([number for row in rows for number in row], dtype=np.int64))
    np.save(folder / f"{split}_row_idx.npy", np.cumsum([0, *[len(row) for row in rows]], dtype=np.int64))


class PackedRows:
    """Memory-mapped rows of one split of a data/sft folder; `len` is the number of rows."""

    def __init__(self, folder: str | Path, split: str = "train") -> None:
        folder = Path(folder)
        self.split = split
        manifest = read_manifest(folder, KIND, VERSION)
        self.context_tokens: int = manifest["context_tokens"]
        self.pad: int = manifest["pad_id"]
        self.stop: int = manifest["stop_id"]  # ends every answer
        self._conversation_sources: list[str] = manifest.get("sources", ["conversations"])
        replayed = manifest.get("replay_sources", [])
        self._names = [*self._conversation_sources, *replayed]
        # A source of conversations and one of text may have the same name.
        self.unique_names = (*self._conversation_sources, *(f"text.{name}" for name in replayed))
        self._starts = np.load(folder / f"{split}_idx.npy").astype(np.int64)
        self._sources = np.load(folder / f"{split}_sources.npy")
        self._rows = np.load(folder / f"{split}_rows.npy")
        self._row_starts = np.load(folder / f"{split}_row_idx.npy")
        if len(self) < 1:
            raise InputError(f"no {split} rows", where=str(folder), fix="dvc repro sft-data")
        self._ids = np.memmap(folder / f"{split}_ids.bin", dtype=np.dtype(manifest["dtype"]), mode="r")
        self._mask = np.memmap(folder / f"{split}_mask.bin", dtype=np.uint8, mode="r")
        if not len(self._ids) == len(self._mask) == self._starts[-1] or len(self._sources) != len(self._starts) - 1:
            raise InputError("ids, mask and index differ in length", where=str(folder), fix="dvc checkout --force")

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    @property
    def conversation_count(self) -> int:
        """Entries: conversations, and pieces of text where there is replay."""
        return len(self._starts) - 1

    def lengths(self) -> np.ndarray:
        """Tokens of each entry, int64."""
        return np.diff(self._starts)

    def supervised(self) -> np.ndarray:
        """Supervised tokens of each entry, int64."""
        return np.diff(np.concatenate([[0], np.cumsum(self._mask, dtype=np.int64)])[self._starts])

    def numbers(self, row: int) -> list[int]:
        """Entry numbers of a row."""
        return self._rows[self._row_starts[row] : self._row_starts[row + 1]].tolist()

    def source_number(self, number: int) -> int:
        """Number of an entry's source: conversation sources come first, then those of text."""
        return int(self._sources[number])

    def source(self, number: int) -> str:
        """Name of an entry's source."""
        return self._names[self._sources[number]]

    def is_text(self, number: int) -> bool:
        """Whether an entry is a piece of pretraining text and not a conversation."""
        return int(self._sources[number]) >= len(self._conversation_sources)

    def name(self, number: int) -> str:
        """What an entry is called, for people."""
        return f"{'text' if self.is_text(number) else 'conversation'} {number} of {self.source(number)}"

    def conversation(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and mask of one entry."""
        start, end = self._starts[number], self._starts[number + 1]
        return self._ids[start:end], self._mask[start:end]

    def conversations(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """ids and mask of each entry of a row, in place order."""
        return [self.conversation(number) for number in self.numbers(row)]


def held_out(folder: str | Path, max_conversations: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """(ids, mask) of held-out conversations, a fixed mixed choice of at most `max_conversations`, and the id that ends answers."""
    rows = PackedRows(folder, "val")
    numbers = permutation(rows.conversation_count, "validation")[:max_conversations].tolist()
    return [rows.conversation(number) for number in numbers], rows.stop


def pack(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Best-fit decreasing: numbers of the pieces in each row; no piece is divided.

    Each piece goes to the fullest row it still fits. Pieces of equal length are
    taken in a seeded order, so rows mix sources. ValueError for a piece longer than `capacity`.
    """
    order = permutation(len(lengths), seed, "pack").tolist()
    order.sort(key=lambda number: -lengths[number])
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # free tokens -> rows with exactly that room
    rooms: list[int] = []  # the keys of by_room, ascending
    for number in order:
        length = lengths[number]
        if length > capacity:
            raise ValueError(f"piece {number} has {length} tokens, a row holds {capacity}")
        index = bisect.bisect_left(rooms, length)
        if index == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[index]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[index]
        rows[row].append(number)
        remaining = room - length
        if remaining not in by_room:
            bisect.insort(rooms, remaining)
            by_room[remaining] = []
        by_room[remaining].append(row)
    return rows


def fit_turns(mask: Sequence[int], capacity: int) -> int:
    """How many leading tokens of a conversation to keep: all, or up to the last assistant turn that fits, or 0.

    A conversation is cut only right after a supervised run, where an assistant turn has ended.
    """
    if len(mask) <= capacity:
        return len(mask)
    values = np.asarray(mask, dtype=np.int8)
    ends = np.flatnonzero((values[:-1] == 1) & (values[1:] == 0)) + 1
    fitting = ends[ends <= capacity]
    return int(fitting[-1]) if len(fitting) else 0

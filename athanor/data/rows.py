"""Packed conversation rows on disk: writer and memory-mapped reader.

    <split>_ids.bin       ids of every conversation, one after the other
    <split>_mask.bin      uint8, 1 = supervised target
    <split>_idx.npy       uint64 [conversations + 1]: where each conversation starts, and the end
    <split>_rows.npy      int64: conversation numbers, row after row (a repeated conversation appears again)
    <split>_row_idx.npy   int64 [rows + 1]: where each row starts in it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from athanor.artifacts import read_manifest
from athanor.data.shards import token_dtype
from athanor.errors import InputError

KIND, VERSION = "sft", 1


def write_split(
    folder: Path,
    split: str,
    conversations: Sequence[tuple[Sequence[int], Sequence[int]]],
    rows: Sequence[Sequence[int]],
    vocab_size: int,
) -> None:
    """Write the (ids, mask) of each conversation and the rows made of their numbers."""
    dtype = token_dtype(vocab_size)
    with open(folder / f"{split}_ids.bin", "wb") as ids_file, open(folder / f"{split}_mask.bin", "wb") as mask_file:
        for ids, mask in conversations:
            ids_file.write(np.asarray(ids, dtype=dtype).data)
            mask_file.write(np.asarray(mask, dtype=np.uint8).data)
    np.save(folder / f"{split}_idx.npy", np.cumsum([0, *[len(ids) for ids, _ in conversations]], dtype=np.uint64))
    np.save(folder / f"{split}_rows.npy", np.array([number for row in rows for number in row], dtype=np.int64))
    np.save(folder / f"{split}_row_idx.npy", np.cumsum([0, *[len(row) for row in rows]], dtype=np.int64))


class PackedRows:
    """Memory-mapped rows of one split of a data/sft folder; `len` is the number of rows."""

    def __init__(self, folder: str | Path, split: str = "train") -> None:
        folder = Path(folder)
        manifest = read_manifest(folder, KIND, VERSION)
        self.context_tokens: int = manifest["context_tokens"]
        self.pad: int = manifest["pad_id"]
        self._starts = np.load(folder / f"{split}_idx.npy").astype(np.int64)
        self._rows = np.load(folder / f"{split}_rows.npy")
        self._row_starts = np.load(folder / f"{split}_row_idx.npy")
        if len(self) < 1:
            raise InputError(f"no {split} rows", where=str(folder), fix="dvc repro sft-data")
        self._ids = np.memmap(folder / f"{split}_ids.bin", dtype=np.dtype(manifest["dtype"]), mode="r")
        self._mask = np.memmap(folder / f"{split}_mask.bin", dtype=np.uint8, mode="r")
        if not len(self._ids) == len(self._mask) == self._starts[-1]:
            raise InputError("ids, mask and index differ in length", where=str(folder), fix="dvc checkout --force")

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    @property
    def conversation_count(self) -> int:
        return len(self._starts) - 1

    def lengths(self) -> np.ndarray:
        """Tokens of each conversation, int64."""
        return np.diff(self._starts)

    def supervised(self) -> np.ndarray:
        """Supervised tokens of each conversation, int64."""
        return np.diff(np.concatenate([[0], np.cumsum(self._mask, dtype=np.int64)])[self._starts])

    def numbers(self, row: int) -> list[int]:
        """Conversation numbers of a row."""
        return self._rows[self._row_starts[row] : self._row_starts[row + 1]].tolist()

    def conversation(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and mask of one conversation."""
        start, end = self._starts[number], self._starts[number + 1]
        return self._ids[start:end], self._mask[start:end]

    def conversations(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """ids and mask of each conversation of a row, in place order."""
        return [self.conversation(number) for number in self.numbers(row)]

"""Work on swept shards for the decisions about the whole corpus: shingle sets, and the search for near copies."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from athanor.corpus import dedup
from athanor.corpus.documents import Document, read_documents
from athanor.corpus.sweep import DOCUMENTS
from athanor.corpus.table import Shard, Table
from athanor.corpus.work import MapShards

SETS, OFFSETS, PAIRS, NUMBERS = "sets.npy", "offsets.npy", "pairs.npy", "numbers.npy"


def chosen(folder: Path, numbers: np.ndarray) -> Iterator[tuple[int, Document]]:
    """Documents of a swept shard by number in it (ascending), with the number."""
    wanted = iter(numbers.tolist())
    following = next(wanted, None)
    for number, document in enumerate(read_documents(folder / DOCUMENTS)):
        if number == following:
            yield number, document
            following = next(wanted, None)
            if following is None:
                return


def write_sets(task: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Work: the shingle sets of the documents of `task["shard"]` that the file `task["numbers"]` lists."""
    texts = ((number, document.text) for number, document in chosen(Path(task["shard"]), np.load(task["numbers"])))
    sets = [item for _, item in dedup.shingle_sets(texts)]
    np.save(out / SETS, np.concatenate([np.zeros(0, np.uint64), *sets]))
    np.save(out / OFFSETS, np.cumsum([0, *map(len, sets)], dtype=np.int64))
    return {"documents": len(sets)}


def find_copies(task: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Work: which listed documents of a shard nearly equal one of the index; pairs of table rows, int64 [pairs, 2]."""
    numbers = np.load(task["numbers"])
    texts = ((number + task["start"], d.text) for number, d in chosen(Path(task["shard"]), numbers))
    found = load_index(task["index"]).find(dedup.shingle_sets(texts), task["threshold"])
    np.save(out / PAIRS, np.array(sorted(found.items()), np.int64).reshape(-1, 2))
    return {"documents": len(numbers), "found": len(found)}


@functools.lru_cache(maxsize=1)
def load_index(folder: str) -> dedup.Index:
    sets, offsets = np.load(Path(folder) / SETS), np.load(Path(folder) / OFFSETS)
    return dedup.Index(np.load(Path(folder) / NUMBERS), np.split(sets, offsets[1:-1]))


class ShingleSets:
    """The sorted shingle sets of some documents by table row, computed shard by shard and read from disk when asked."""

    def __init__(self, shards: Sequence[Shard], rows: np.ndarray, folder: Path, map_shards: MapShards, desc: str) -> None:
        self.rows = np.sort(rows)
        tasks, self._places = {}, {}
        for shard in shards:
            low, high = np.searchsorted(self.rows, [shard.rows.start, shard.rows.stop])
            if low < high:
                path = save(folder / "numbers" / f"{shard.name}.npy", self.rows[low:high] - shard.rows.start)
                tasks[shard.name] = {"shard": str(shard.folder.absolute()), "numbers": str(path.absolute())}
                self._places[shard.name] = int(low)
        map_shards(write_sets, tasks, folder / "sets", desc=desc)
        self._starts = np.array(list(self._places.values()), np.int64)
        paths = [folder / "sets" / name for name in self._places]
        self._sets = [_mapped(path / SETS) for path in paths]
        self._offsets = [np.load(path / OFFSETS) for path in paths]

    def __call__(self, row: int) -> np.ndarray:
        """uint64, sorted. `row` must be one of `rows`."""
        place = int(np.searchsorted(self.rows, row))
        part = int(np.searchsorted(self._starts, place, "right")) - 1
        offsets, at = self._offsets[part], place - int(self._starts[part])
        return np.asarray(self._sets[part][offsets[at] : offsets[at + 1]])

    def write_index(self, folder: Path, rows: Sequence[int]) -> str:
        """Save the sets of some rows for `load_index`; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        sets = [self(row) for row in rows]
        save(folder / SETS, np.concatenate([np.zeros(0, np.uint64), *sets]))
        save(folder / OFFSETS, np.cumsum([0, *map(len, sets)], dtype=np.int64))
        save(folder / NUMBERS, np.asarray(rows, np.int64))
        return str(folder.absolute())


def copies(
    table: Table, rows: np.ndarray, index: str, threshold: float, folder: Path, map_shards: MapShards
) -> np.ndarray:
    """Which of `rows` (sorted) nearly equal a document of the index: int64 [pairs, 2], row and row of the index."""
    tasks, sizes = {}, {}
    for shard in table.shards:
        low, high = np.searchsorted(rows, [shard.rows.start, shard.rows.stop])
        if low < high:
            path = save(folder / "numbers" / f"{shard.name}.npy", rows[low:high] - shard.rows.start)
            place = {"shard": str(shard.folder.absolute()), "numbers": str(path.absolute()), "start": shard.rows.start}
            tasks[shard.name] = {**place, "index": index, "threshold": threshold}
            sizes[shard.name] = int(table.bytes[rows[low:high]].sum())
    map_shards(find_copies, tasks, folder / "pairs", desc="compare with validation", sizes=sizes)
    pairs = [np.load(folder / "pairs" / name / PAIRS) for name in tasks]
    return np.concatenate([np.zeros((0, 2), np.int64), *pairs])


def save(path: Path, values: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, values)
    return path


def _mapped(path: Path) -> np.ndarray:
    values = np.load(path, mmap_mode="r")
    return values if len(values) else np.zeros(0, values.dtype)

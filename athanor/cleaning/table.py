"""Every measured document as one row of a few arrays, on which the decisions about the whole corpus are taken.

Texts, signatures and measures stay on disk. A row needs about 80 bytes, and
the decisions about 100 more for a while, so a hundred million documents fit
into 20 GB whatever their length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from athanor.base.work import Facts, MapShards
from athanor.cleaning import dedup, minhash, rules
from athanor.cleaning.measuring import BANDS, DOCUMENTS, HITS, MEASURES, SIGNATURES, read_hits
from athanor.cleaning.params import RuleParams
from athanor.text.documents import Document, read_documents
from athanor.words.decontaminate import Hits
from athanor.words.words import concatenated

KEPT = -1
EMPTY = np.uint32(0xFFFFFFFF)
EXACT, NEAR = "exact_duplicate", "near_duplicate"
EXACT_VAL, NEAR_VAL = "exact_duplicate_of_val", "near_duplicate_of_val"
ITEM = "evaluation_item"
SETS, OFFSETS, PAIRS, NUMBERS = "sets.npy", "offsets.npy", "pairs.npy", "numbers.npy"
REASONS = (*rules.RULES, EXACT, NEAR, EXACT_VAL, NEAR_VAL, ITEM)


@dataclass(frozen=True)
class Shard:
    """A measured shard: source, number within it, the folder of its measures, its rows of the table."""

    source: str
    number: int
    folder: Path
    rows: range

    @property
    def name(self) -> str:
        return f"{self.source}/{self.number:05d}"


@dataclass
class Table:
    """One row per document, shard after shard; `reason` is an index into REASONS, or KEPT.

    `twin` is the row of the document that a duplicate repeats, or -1; `value`
    what the rule measured.
    """

    shards: list[Shard]
    id: np.ndarray  # uint64 [documents, 2], which sort like the hex text
    raw_id: np.ndarray
    tie: np.ndarray  # uint64
    bytes: np.ndarray  # int64
    val: np.ndarray  # bool
    source: np.ndarray  # int16, place in `sources`
    reason: np.ndarray  # int16
    value: np.ndarray  # float64
    twin: np.ndarray  # int64
    sources: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.reason)

    @property
    def kept(self) -> np.ndarray:
        """int64: rows of the documents that are still in."""
        return np.flatnonzero(self.reason == KEPT)

    def drop(self, rows: np.ndarray, reason: str, twins: np.ndarray | int = -1) -> None:
        self.reason[rows] = REASONS.index(reason)
        self.twin[rows] = twins

    def hex(self, row: int, *, raw: bool = False) -> str:
        return hex_id((self.raw_id if raw else self.id)[row])

    def rank(self, source_ranks: Mapping[str, int]) -> np.ndarray:
        """int64 [documents]: rows, the best first: validation, then rank of the source, length, id, `tie`."""
        ranks = np.array([source_ranks[name] for name in self.sources], np.int64)
        return np.lexsort((self.tie, self.id[:, 1], self.id[:, 0], -self.bytes, ranks[self.source], ~self.val))


def read_table(folders: Mapping[str, Sequence[Path]], params: RuleParams) -> Table:
    """The table of measured shards (source name to folders), judged by the rules."""
    shards, columns_by_shard, row = [], [], 0
    names = sorted(folders)
    for source in names:
        for number, folder in enumerate(folders[source]):
            shard_columns = _read_shard(folder, names.index(source), params)
            shards.append(Shard(source, number, folder, range(row, row + len(shard_columns["reason"]))))
            columns_by_shard.append(shard_columns)
            row += len(shard_columns["reason"])
    columns = {
        name: np.concatenate([shard_columns[name] for shard_columns in columns_by_shard])
        for name in columns_by_shard[0]
    }
    return Table(shards, **columns, twin=np.full(row, -1, np.int64), sources=names)


def ids_of(digests: Iterable[bytes]) -> np.ndarray:
    """uint64 [digests, 2] of digests of 16 bytes."""
    return np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)


def hex_id(pair: np.ndarray) -> str:
    return f"{int(pair[0]):016x}{int(pair[1]):016x}"


def read_measures(folder: Path) -> dict[str, np.ndarray]:
    """measures.parquet as arrays; ids as [documents, 2] uint64."""
    table = pq.read_table(folder / MEASURES)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    return {**columns, **{name: ids_of(columns[name]) for name in ("id", "raw_id")}}


def _read_shard(folder: Path, source: int, params: RuleParams) -> dict[str, np.ndarray]:
    measures = read_measures(folder)
    reason, value = rules.verdicts(measures, measures["kind"], params)
    return {
        **{name: measures[name] for name in ("id", "raw_id", "tie", "bytes", "val")},
        "source": np.full(len(reason), source, np.int16),
        "reason": reason.astype(np.int16),  # `verdicts` numbers the rules as RULES does, and -1 is none
        "value": value,
    }


class ShardSignatures:
    """The signatures of all documents, by row, read from the shards' files as they are asked for."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = [shard for shard in shards if len(shard.rows)]
        self._starts = np.array([shard.rows.start for shard in self._shards], np.int64)
        self._maps = [np.load(shard.folder / SIGNATURES, mmap_mode="r") for shard in self._shards]

    def empty(self) -> np.ndarray:
        """bool [documents]: texts without shingles, whose signature says nothing."""
        masks = [(mapped[:, 0] == EMPTY) & (mapped == EMPTY).all(axis=1) for mapped in self._maps]
        return concatenated(masks, bool)

    def __getitem__(self, rows: int | np.ndarray) -> np.ndarray:
        """uint32 [permutations], or [rows, permutations]."""
        if np.ndim(rows) == 0:
            return self[np.array([rows])][0]
        rows = np.asarray(rows, np.int64)
        out = np.empty((len(rows), minhash.PERMUTATIONS), np.uint32)
        owner = np.searchsorted(self._starts, rows, "right") - 1
        for shard in np.unique(owner):
            positions = np.flatnonzero(owner == shard)
            out[positions] = self._maps[shard][rows[positions] - self._starts[shard]]
        return out


def band_keys(shards: Sequence[Shard], band: int) -> np.ndarray:
    """uint64 [documents]: the keys of one band; the other bands are not read."""
    keys = [np.load(shard.folder / BANDS, mmap_mode="r")[band] for shard in shards if len(shard.rows)]
    return concatenated(keys, np.uint64)


def read_all_hits(shards: Sequence[Shard]) -> tuple[np.ndarray, list[Hits]]:
    """Rows of the documents that hold anything of an evaluation item, and what."""
    rows, hits = [np.zeros(0, np.int64)], []
    for shard in shards:
        numbers, shard_hits = read_hits(shard.folder / HITS)
        rows.append(numbers + shard.rows.start)
        hits += shard_hits
    return np.concatenate(rows), hits


def read_numbered(folder: Path, numbers: np.ndarray) -> Iterator[tuple[int, Document]]:
    """Documents of a measured shard by number in it (ascending), with the number."""
    remaining = iter(numbers.tolist())
    next_number = next(remaining, None)
    for number, document in enumerate(read_documents(folder / DOCUMENTS)):
        if number == next_number:
            yield number, document
            next_number = next(remaining, None)
            if next_number is None:
                return


# -- work on shards for the search of near copies: shingle sets of some documents, and their comparison -------------


def write_sets(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: the shingle sets of the documents of `task["shard"]` that the file `task["numbers"]` lists."""
    texts = ((number, document.text) for number, document in read_numbered(task["shard"], np.load(task["numbers"])))
    sets = [item for _, item in dedup.shingle_sets(texts)]
    np.save(out / SETS, concatenated(sets, np.uint64))
    np.save(out / OFFSETS, np.cumsum([0, *map(len, sets)], dtype=np.int64))
    return {"documents": len(sets)}


def find_copies(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: which listed documents of a shard nearly equal one of the index; pairs of table rows, int64 [pairs, 2]."""
    numbers = np.load(task["numbers"])
    texts = ((number + task["start"], d.text) for number, d in read_numbered(task["shard"], numbers))
    twins = load_index(task["index"]).find(dedup.shingle_sets(texts), task["threshold"])
    np.save(out / PAIRS, np.array(sorted(twins.items()), np.int64).reshape(-1, 2))
    return {"documents": len(numbers), "found": len(twins)}


@functools.lru_cache(maxsize=1)
def load_index(folder: Path) -> dedup.Index:
    sets, offsets, numbers = (np.load(folder / name) for name in (SETS, OFFSETS, NUMBERS))
    return dedup.Index(numbers, np.split(sets, offsets[1:-1]))


def shard_tasks(shards: Sequence[Shard], rows: np.ndarray, folder: Path) -> Iterator[tuple[Shard, int, int, Facts]]:
    """Shards with any of `rows` (sorted), their first and last place in it, and a task that lists the documents."""
    for shard in shards:
        low, high = np.searchsorted(rows, [shard.rows.start, shard.rows.stop]).tolist()
        if low < high:
            path = save(folder / "numbers" / f"{shard.name}.npy", rows[low:high] - shard.rows.start)
            yield shard, low, high, {"shard": shard.folder.absolute(), "numbers": path.absolute()}


class ShingleSets:
    """The sorted shingle sets of some documents by table row, computed shard by shard and read from disk when asked."""

    def __init__(
        self, shards: Sequence[Shard], rows: np.ndarray, folder: Path, map_shards: MapShards, desc: str
    ) -> None:
        self.rows = np.sort(rows)
        tasks = list(shard_tasks(shards, self.rows, folder))
        map_shards(write_sets, {shard.name: task for shard, _, _, task in tasks}, folder / "sets", desc=desc)
        self._starts = np.array([low for _, low, _, _ in tasks], np.int64)
        paths = [folder / "sets" / shard.name for shard, *_ in tasks]
        self._sets = [_mapped(path / SETS) for path in paths]
        self._offsets = [np.load(path / OFFSETS) for path in paths]

    def __call__(self, row: int) -> np.ndarray:
        """uint64, sorted. `row` must be one of `rows`."""
        index = int(np.searchsorted(self.rows, row))
        shard = int(np.searchsorted(self._starts, index, "right")) - 1
        offsets, position = self._offsets[shard], index - int(self._starts[shard])
        return np.asarray(self._sets[shard][offsets[position] : offsets[position + 1]])

    def write_index(self, folder: Path, rows: Sequence[int]) -> Path:
        """Save the sets of some rows for `load_index`; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        sets = [self(row) for row in rows]
        save(folder / SETS, concatenated(sets, np.uint64))
        save(folder / OFFSETS, np.cumsum([0, *map(len, sets)], dtype=np.int64))
        save(folder / NUMBERS, np.asarray(rows, np.int64))
        return folder.absolute()


def find_near_copies(
    table: Table, rows: np.ndarray, index: Path, threshold: float, folder: Path, map_shards: MapShards
) -> np.ndarray:
    """Which of `rows` (sorted) nearly equal a document of the index: int64 [pairs, 2], row and row of the index."""
    tasks, sizes = {}, {}
    for shard, low, high, task in shard_tasks(table.shards, rows, folder):
        tasks[shard.name] = {**task, "start": shard.rows.start, "index": index, "threshold": threshold}
        sizes[shard.name] = int(table.bytes[rows[low:high]].sum())
    map_shards(find_copies, tasks, folder / "pairs", desc="compare with validation", sizes=sizes)
    pairs = [np.load(folder / "pairs" / name / PAIRS) for name in tasks]
    return concatenated(pairs, np.int64, 2)


def save(path: Path, values: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, values)
    return path


def _mapped(path: Path) -> np.ndarray:
    values = np.load(path, mmap_mode="r")
    return values if len(values) else np.zeros(0, values.dtype)

"""Groups of measured shards: the unit of the decisions for which documents are compared with each other.

A document is known by its row: shards follow each other by source and number,
and their documents are numbered through the whole corpus. A group is a run of
consecutive shards. `judge` writes the arrays of a group, one value for each row:

    id.npy, raw_id.npy   uint64 [rows, 2], which sort like the hex text
    major.npy            uint64: what decides before the id which of two copies stays, the smaller the better
    tie.npy              uint64: orders equal texts of one source
    reason.npy           int16: index into REASONS of the rule that drops it, or KEPT
    ids.npy, rows.npy    uint64 [2, kept], uint32 [kept]: ids of the kept documents in order, and their rows in the group

A task opens one file after the other and closes it again, and holds one group
or one range of keys. So memory, open files and mappings do not grow with the
corpus, in any process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from athanor.base.work import Facts
from athanor.cleaning import rules
from athanor.cleaning.measuring import DOCUMENTS, MEASURES
from athanor.cleaning.params import RuleParams
from athanor.cleaning.reasons import KEPT
from athanor.text.documents import Document, read_documents

GROUP_ROWS, GROUP_SHARDS = 200_000, 256  # 60 MB in `judge`; a shard is never divided
JUDGED, STARTS = "judged", "starts.npy"
_BYTES_BITS, _RANK_BITS = 48, 15
_MAX_BYTES = np.uint64((1 << _BYTES_BITS) - 1)
_TRAIN = np.uint64(1 << 63)


@dataclass(frozen=True, slots=True)
class Shard:
    """A measured shard: source, number within it, the folder of its measures, its first row and the row after its last."""

    source: str
    number: int
    folder: Path
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.source}/{self.number:05d}"


@dataclass(frozen=True, slots=True)
class Group:
    number: int
    shards: tuple[Shard, ...]

    @property
    def name(self) -> str:
        return f"{self.number:05d}"

    @property
    def start(self) -> int:
        return self.shards[0].start

    @property
    def stop(self) -> int:
        return self.shards[-1].stop


def grouped(shards: Iterable[Shard]) -> list[Group]:
    """Consecutive shards, up to GROUP_SHARDS and until GROUP_ROWS are reached."""
    groups: list[Group] = []
    run: list[Shard] = []
    for shard in shards:
        run.append(shard)
        if len(run) == GROUP_SHARDS or shard.stop - run[0].start >= GROUP_ROWS:
            groups.append(Group(len(groups), tuple(run)))
            run = []
    return [*groups, Group(len(groups), tuple(run))] if run else groups


def by_group(groups: Sequence[Group], sizes: Mapping[str, int]) -> dict[str, int]:
    """Sums by group of sizes by shard."""
    return {group.name: sum(sizes[shard.name] for shard in group.shards) for group in groups}


def save_starts(work: Path, groups: Sequence[Group]) -> Rows:
    work.mkdir(parents=True, exist_ok=True)
    np.save(work / STARTS, np.array([*(group.start for group in groups), groups[-1].stop], np.int64))
    return Rows(work.absolute())


@dataclass(frozen=True)
class Rows:
    """Arrays by group below `work`, read by row of the corpus."""

    work: Path

    @property
    def starts(self) -> np.ndarray:
        """int64 [groups + 1]: first row of each group, and the end."""
        return _starts(self.work)

    @property
    def groups(self) -> int:
        return len(self.starts) - 1

    def path(self, step: str, group: int, name: str) -> Path:
        return self.work / step / f"{group:05d}" / f"{name}.npy"

    def open(self, step: str, group: int, name: str) -> np.ndarray:
        """One array of one group, mapped; it is closed with the last reference to it."""
        return np.load(self.path(step, group, name), mmap_mode="r")

    def gather(self, step: str, name: str, rows: np.ndarray) -> np.ndarray:
        """[rows, ...]: the values at some rows, in any order; one file is open at a time."""
        values = None
        for group, positions in self.by_group(rows):
            found = self.open(step, group, name)[rows[positions] - self.starts[group]]
            if values is None:
                values = np.empty((len(rows), *found.shape[1:]), found.dtype)
            values[positions] = found
        return self.open(step, 0, name)[:0] if values is None else values

    def by_group(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Groups with any of `rows`, and the positions of theirs."""
        if not len(rows):
            return
        owners = np.searchsorted(self.starts, rows, "right") - 1
        order = np.argsort(owners, kind="stable")
        cuts = np.flatnonzero(np.diff(owners[order])) + 1
        for positions in np.split(order, cuts):
            yield int(owners[positions[0]]), positions

    def rank(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Keys for np.lexsort that order documents of different texts, the best first."""
        ids = self.gather(JUDGED, "id", rows)
        return rows, ids[:, 1], ids[:, 0], self.gather(JUDGED, "major", rows)


@functools.lru_cache(maxsize=1)
def _starts(work: Path) -> np.ndarray:
    return np.load(work / STARTS)


def between(path: Path, low: int, high: int) -> np.ndarray:
    """int64 [2, found]: of stored pairs of rows, sorted by the first, those whose first is in [low, high)."""
    pairs = np.load(path, mmap_mode="r")
    first, last = np.searchsorted(pairs[0], (low, high))
    return np.array(pairs[:, first:last])


def judge(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: the arrays of one group; `task` has its `shards` (folders), the rank of each one's source, and `rules`."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("id", "raw_id", "major", "tie", "reason")}
    for folder, rank in zip(task["shards"], task["ranks"], strict=True):
        measures = read_measures(folder)
        reason, _ = rules.verdicts(measures, measures["kind"], task["rules"])
        measures["major"] = major_of(measures["val"], rank, measures["bytes"])
        measures["reason"] = reason.astype(np.int16)  # `verdicts` numbers the rules as REASONS does, and -1 is none
        for name, parts in columns.items():
            parts.append(measures[name])
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    kept = np.flatnonzero(arrays["reason"] == KEPT)
    order = kept[np.lexsort((arrays["id"][kept, 1], arrays["id"][kept, 0]))]
    arrays |= {"ids": arrays["id"][order].T.copy(), "rows": order.astype(np.uint32)}
    for name, values in arrays.items():
        np.save(out / f"{name}.npy", values)
    return {"kept": len(kept)}


def major_of(val: np.ndarray, rank: int, size: np.ndarray) -> np.ndarray:
    """uint64 by which documents rank before their ids decide: validation, then the source's rank, then length."""
    if rank >= 1 << _RANK_BITS:
        raise ValueError(f"more than {1 << _RANK_BITS} sources")
    shorter = _MAX_BYTES - np.minimum(size.astype(np.uint64), _MAX_BYTES)
    return np.where(val, np.uint64(0), _TRAIN) | np.uint64(rank << _BYTES_BITS) | shorter


def is_val(major: np.ndarray) -> np.ndarray:
    return major < _TRAIN


def bytes_of(major: np.ndarray) -> np.ndarray:
    return (_MAX_BYTES - (major & _MAX_BYTES)).astype(np.int64)


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


def judge_task(group: Group, ranks: Mapping[str, int], params: RuleParams) -> Facts:
    return {
        "shards": [shard.folder.absolute() for shard in group.shards],
        "ranks": [ranks[shard.source] for shard in group.shards],
        "rules": params,
    }


def read_numbered(folder: Path, numbers: np.ndarray) -> Iterator[tuple[int, Document]]:
    """Documents of a measured shard by number in it (ascending), with the number."""
    remaining = iter(numbers.tolist())
    next_number = next(remaining, None)
    if next_number is None:
        return
    for number, document in enumerate(read_documents(folder / DOCUMENTS)):
        if number == next_number:
            yield number, document
            next_number = next(remaining, None)
            if next_number is None:
                return

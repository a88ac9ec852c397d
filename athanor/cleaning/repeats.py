"""Equal texts: documents that repeat a better ranked one, found one range of ids at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.work import Facts
from athanor.cleaning.groups import JUDGED, Rows

PART_IDS = 1_000_000  # of a range, about: 24 bytes for each, and 60 more while they are sorted
EXACT_STEP, PAIRS = "exact", "pairs"


def bits_for(count: int, limit: int) -> int:
    """Leading bits that divide `count` evenly spread keys into ranges of at most `limit` keys, about."""
    return max(0, (max(count, 1) - 1) // limit).bit_length()


def in_part(column: np.ndarray, part: int, bits: int) -> slice:
    """The entries of a sorted uint64 column whose leading `bits` are `part`."""
    if not bits:
        return slice(0, len(column))
    low = np.searchsorted(column, np.uint64(part << (64 - bits)))
    last = part + 1 == 1 << bits
    return slice(int(low), len(column) if last else int(np.searchsorted(column, np.uint64((part + 1) << (64 - bits)))))


def runs(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of two or more equal entries of sorted keys [parts, entries]: bool, the entries in one; int64, each such one's run."""
    equals_previous = np.zeros(keys.shape[1], bool)
    equals_previous[1:] = (keys[:, 1:] == keys[:, :-1]).all(axis=0)
    equals_next = np.zeros_like(equals_previous)
    equals_next[:-1] = equals_previous[1:]
    shared = equals_next | equals_previous
    return shared, np.cumsum(shared & ~equals_previous)[shared] - 1


def drop_repeats(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: pairs.npy of one range of ids, int64 [2, repeats]: each row that repeats a better ranked one, and that one."""
    corpus, part, bits = Rows(task["work"]), task["part"], task["bits"]
    ids, rows = [], []
    for group in range(corpus.groups):
        stored = corpus.open(JUDGED, group, "ids")
        own = in_part(stored[0], part, bits)
        ids.append(np.array(stored[:, own]))
        rows.append(corpus.open(JUDGED, group, "rows")[own] + corpus.starts[group])
    shared, run = _equal(np.concatenate(ids, axis=1))
    members = np.concatenate(rows)[shared]
    tie, major = (corpus.gather(JUDGED, name, members) for name in ("tie", "major"))
    order = np.lexsort((members, tie, major, run))
    members, is_first = members[order], np.diff(run[order], prepend=-1) > 0
    firsts = members[is_first][run[order]] if len(members) else members
    pairs = np.stack([members[~is_first], firsts[~is_first]])
    np.save(out / f"{PAIRS}.npy", pairs[:, np.argsort(pairs[0])])
    return {"repeats": pairs.shape[1]}


def count_repeats(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: how many ids of one range occur again in the sorted ids of some folders, which the file `folders` lists."""
    names = task["folders"].read_text(encoding="utf-8").splitlines()
    return {
        "repeats": repeated(_range(task["written"] / name / "ids.npy", task["part"], task["bits"]) for name in names)
    }


def _range(path: Path, part: int, bits: int) -> np.ndarray:
    ids = np.load(path, mmap_mode="r")
    return np.array(ids[:, in_part(ids[0], part, bits)])


def repeated(ids: Iterable[np.ndarray]) -> int:
    """How many of some ids, uint64 [2, ids] each, are equal to an earlier one."""
    shared, run = _equal(np.concatenate([np.zeros((2, 0), np.uint64), *ids], axis=1))
    return len(run) - len(np.unique(run))


def _equal(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64: positions of the ids that occur more than once, equal ones together; and the number of each one's run."""
    order = np.lexsort((ids[1], ids[0]))
    shared, run = runs(ids[:, order])
    return order[shared], run

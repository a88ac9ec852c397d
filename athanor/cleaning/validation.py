"""Exhaustive comparison with some documents: training with all of validation, and everything with a sample.

Banding misses one pair in seventy at the threshold. Between training and
validation none may be missed. The documents to compare with are indexed in
pieces, which are mapped and not read; all others are streamed past them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.work import Facts, MapShards
from athanor.cleaning import dedup
from athanor.cleaning.groups import JUDGED, Group, Rows, by_group, is_val, read_numbered
from athanor.cleaning.near import STATE, STAYS, group_task, read_sets, write_sets

PIECE_SHINGLES = 16_000_000  # of an index: 200 MB mapped, and 500 MB while it is made
PAIRS = "pairs.npy"

Sizes = Mapping[str, int]


def near_validation(
    corpus: Rows, groups: Sequence[Group], state: str, threshold: float, map_shards: MapShards, sizes: Sizes
) -> bool:
    """Write pairs.npy for each shard, int64 [2, pairs]: training rows that nearly equal a validation one, and the best such.

    False, and nothing is written, without a validation document. `sizes` are bytes of text by shard.
    """
    tasks = {group.name: {**group_task(group), "work": corpus.work, "state": state} for group in groups}
    group_sizes = by_group(groups, sizes)
    found = map_shards(
        sets_of_validation, tasks, corpus.work / "validation-sets", desc="read validation", sizes=group_sizes
    )
    if not any(found[name]["documents"] for name in tasks):
        return False
    pieces = index(corpus, "validation-sets", groups, map_shards)
    shared = {"work": corpus.work, "state": state, "pieces": pieces, "threshold": threshold}
    compared = {
        shard.name: {**shared, "shard": shard.folder.absolute(), "start": shard.start, "stop": shard.stop}
        for group in groups
        for shard in group.shards
    }
    map_shards(find_copies, compared, corpus.work / "validation", desc="compare with validation", sizes=sizes)
    return True


def sets_of_validation(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: the shingle sets of the validation documents of one group that stay."""
    corpus, group = Rows(task["work"]), task["group"]
    stays = corpus.open(task["state"], group, STATE)[:] == STAYS
    rows = np.flatnonzero(stays & is_val(corpus.open(JUDGED, group, "major")[:])) + task["start"]
    return write_sets(task["shards"], rows, out)


def sets_of_sample(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: the shingle sets of those of some rows (a sorted file) that are in one group."""
    rows = np.load(task["rows"])
    own = rows[slice(*np.searchsorted(rows, (task["start"], task["stop"])))]
    return write_sets(task["shards"], own, out)


def sample_index(corpus: Rows, groups: Sequence[Group], rows: np.ndarray, map_shards: MapShards) -> tuple[Path, ...]:
    """The pieces of an index of some rows."""
    path = corpus.work / "sample.npy"
    np.save(path, np.sort(rows))
    tasks = {group.name: {**group_task(group), "rows": path} for group in groups}
    map_shards(sets_of_sample, tasks, corpus.work / "sample-sets", desc="read the sample")
    return index(corpus, "sample-sets", groups, map_shards)


def index(corpus: Rows, step: str, groups: Sequence[Group], map_shards: MapShards) -> tuple[Path, ...]:
    """Index the stored sets of a step in pieces of at most PIECE_SHINGLES, or of one document; returns their folders."""
    pieces: list[list[tuple[int, int, int]]] = [[]]
    size = 0
    for group in groups:
        offsets = np.load(corpus.path(step, group.number, "offsets"))
        first, end = 0, len(offsets) - 1
        while first < end:
            fitting = int(np.searchsorted(offsets, offsets[first] + PIECE_SHINGLES - size, "right")) - 1
            last = min(max(fitting, first + (size == 0)), end)
            if last > first:
                pieces[-1].append((group.number, first, last))
                size += int(offsets[last] - offsets[first])
            if last < end:
                pieces.append([])
                size = 0
            first = last
    folder = corpus.work / f"{step}-index"
    tasks = {
        f"{number:05d}": {"work": corpus.work, "step": step, "parts": parts}
        for number, parts in enumerate(pieces)
        if parts
    }
    map_shards(write_index, tasks, folder, desc="index")
    return tuple(folder / name for name in tasks)


def write_index(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: the index of some documents of some groups, the best ranked first."""
    corpus = Rows(task["work"])
    rows = np.concatenate(
        [np.load(corpus.path(task["step"], group, "rows"))[first:last] for group, first, last in task["parts"]]
    )
    rows = rows[np.lexsort(corpus.rank(rows))]
    sets = read_sets(corpus, task["step"], rows)
    dedup.Index(rows, [sets[row] for row in rows.tolist()]).save(out)
    return {"documents": len(rows)}


@functools.lru_cache(maxsize=1)
def load(pieces: tuple[Path, ...]) -> tuple[dedup.Index, ...]:
    return tuple(dedup.Index.load(folder) for folder in pieces)


def find_copies(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: of one shard, which training documents that stay nearly equal one of the index."""
    corpus, start, stop = Rows(task["work"]), task["start"], task["stop"]
    rows = np.arange(start, stop)
    train = rows[(corpus.gather(task["state"], STATE, rows) == STAYS) & ~is_val(corpus.gather(JUDGED, "major", rows))]
    texts = ((number + start, document.text) for number, document in read_numbered(task["shard"], train - start))
    pairs = near_ones(dedup.shingle_sets(texts), load(tuple(task["pieces"])), task["threshold"])
    # Of the pieces of the index, the one that holds the best ranked copy decides.
    order = np.lexsort((*corpus.rank(pairs[1]), pairs[0]))
    pairs = pairs[:, order][:, np.unique(pairs[0, order], return_index=True)[1]]
    np.save(out / PAIRS, pairs)
    return {"documents": len(train), "found": pairs.shape[1]}


def near_ones(sets: Iterable[tuple[int, np.ndarray]], pieces: Sequence[dedup.Index], threshold: float) -> np.ndarray:
    """int64 [2, pairs]: numbers of those that nearly equal an indexed document, and of the first such one of each piece."""
    found = [pair for item in sets for piece in pieces for pair in piece.find([item], threshold).items()]
    return np.array(found, np.int64).reshape(-1, 2).T


def pairs_of(work: Path, shards: Iterable[str]) -> np.ndarray:
    """The pairs that `near_validation` found in some shards, int64 [2, pairs]."""
    found = (np.load(work / "validation" / name / PAIRS) for name in shards)
    return np.concatenate([np.zeros((2, 0), np.int64), *found], axis=1)

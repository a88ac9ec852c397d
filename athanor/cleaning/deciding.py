"""What becomes of each document of a group, put together from the searches for copies and for evaluation items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.work import Facts
from athanor.cleaning import repeats, validation
from athanor.cleaning.groups import JUDGED, Group, Rows, between, bytes_of, is_val
from athanor.cleaning.measuring import HITS, read_hits
from athanor.cleaning.near import STATE, STAYS, TWINS
from athanor.cleaning.reasons import EXACT, EXACT_VAL, ITEM, KEPT, NEAR, NEAR_VAL, REASONS
from athanor.words.decontaminate import Hits

DECIDED = "decided"
REASON, MARKS, MARK_IDS, SAMPLE = "reason", "marks", "mark_ids", "sample"


def hits_of_kept(corpus: Rows, groups: Sequence[Group], state: str, validated: bool) -> Iterator[tuple[int, Hits]]:
    """Row and hits of each document that duplicates leave and that holds anything of an evaluation item."""
    for group in groups:
        stays = np.load(corpus.path(state, group.number, STATE)) == STAYS
        if validated:
            stays[validation.pairs_of(corpus.work, [shard.name for shard in group.shards])[0] - group.start] = False
        for shard in group.shards:
            numbers, hits = read_hits(shard.folder / HITS)
            rows = numbers + shard.start
            yield from ((row, hit) for row, hit in zip(rows.tolist(), hits, strict=True) if stays[row - group.start])


def decide(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: reason.npy of one group, int16 [rows], KEPT or an index into REASONS.

    marks.npy, int64 [2, marks]: row and the row that it repeats, or the number
    of the evaluation item that it holds; mark_ids.npy, uint64 [marks, 2]: the
    id in data/raw of the repeated one. sample.npy, uint64 [3, documents]: the
    smallest ids of the kept documents (two halves), and their rows.
    Facts: documents and bytes of each reason by shard.
    """
    corpus, start, stop, group = Rows(task["work"]), task["start"], task["stop"], task["group"]
    reason = np.load(corpus.path(JUDGED, group, "reason"))
    major = np.load(corpus.path(JUDGED, group, "major"))
    exact = [
        between(corpus.path(repeats.EXACT_STEP, part, repeats.PAIRS), start, stop)
        for part in range(task["exact_parts"])
    ]
    near = [np.load(corpus.path(task["state"], group, TWINS))]
    if task["validated"]:
        near.append(validation.pairs_of(corpus.work, task["names"]))
    marks = []
    for found, code, code_if_val in ((exact, EXACT, EXACT_VAL), (near, NEAR, NEAR_VAL)):
        pairs = np.concatenate([np.zeros((2, 0), np.int64), *found], axis=1)
        crossing = ~is_val(major[pairs[0] - start]) & is_val(corpus.gather(JUDGED, "major", pairs[1]))
        reason[pairs[0] - start] = np.where(crossing, REASONS.index(code_if_val), REASONS.index(code))
        marks.append(pairs)
    copies = np.concatenate(marks, axis=1)
    items = between(task["items"], start, stop)
    reason[items[0] - start] = REASONS.index(ITEM)
    ids = np.concatenate([corpus.gather(JUDGED, "raw_id", copies[1]), np.zeros((items.shape[1], 2), np.uint64)])
    both = np.concatenate([copies, items], axis=1)
    order = np.argsort(both[0])
    np.save(out / f"{REASON}.npy", reason)
    np.save(out / f"{MARKS}.npy", both[:, order])
    np.save(out / f"{MARK_IDS}.npy", ids[order])
    np.save(out / f"{SAMPLE}.npy", _smallest(corpus, group, np.flatnonzero(reason == KEPT), task["sample"]))
    size = bytes_of(major)
    return {"shards": {name: _counts(reason[own], size[own]) for name, own in _slices(task)}}


def _slices(task: Mapping[str, Any]) -> Iterator[tuple[str, slice]]:
    for name, (_, first, last) in zip(task["names"], task["shards"], strict=True):
        yield name, slice(first - task["start"], last - task["start"])


def _counts(reason: np.ndarray, size: np.ndarray) -> dict[str, list[int]]:
    """Documents and bytes by reason, those kept under ""."""
    masks = {"" if code == KEPT else REASONS[code]: reason == code for code in np.unique(reason).tolist()}
    return {name: [int(mask.sum()), int(size[mask].sum())] for name, mask in masks.items()}


def _smallest(corpus: Rows, group: int, kept: np.ndarray, count: int) -> np.ndarray:
    """The kept documents with the smallest content hashes: as good as random, and independent of order."""
    ids = np.load(corpus.path(JUDGED, group, "id"))[kept]
    order = np.lexsort((ids[:, 1], ids[:, 0]))[:count]
    return np.stack([ids[order, 0], ids[order, 1], (kept[order] + corpus.starts[group]).astype(np.uint64)])


def sample_of(corpus: Rows, count: int) -> np.ndarray:
    """Rows of the sample of the whole corpus, `count` or all."""
    found = np.zeros((3, 0), np.uint64)
    for group in range(corpus.groups):
        found = np.concatenate([found, np.load(corpus.path(DECIDED, group, SAMPLE))], axis=1)
        found = found[:, np.lexsort((found[1], found[0]))[:count]]
    return found[2].astype(np.int64)


def read_decisions(task: Mapping[str, Any]) -> tuple[np.ndarray, dict[int, tuple[int, np.ndarray]]]:
    """Of one shard: int16 [documents], the reasons; and by number of a document its mark with the repeated one's id."""
    corpus, group, start, stop = Rows(task["work"]), task["group"], task["start"], task["stop"]
    first = int(corpus.starts[group])
    reason = np.array(corpus.open(DECIDED, group, REASON)[start - first : stop - first])
    marks = corpus.open(DECIDED, group, MARKS)
    own = slice(*np.searchsorted(marks[0], (start, stop)))
    ids = np.array(corpus.open(DECIDED, group, MARK_IDS)[own])
    rows, values = np.array(marks[:, own])
    return reason, dict(zip((rows - start).tolist(), zip(values.tolist(), ids, strict=True), strict=True))

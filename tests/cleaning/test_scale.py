"""What the cleaning takes as functions of the corpus: open files, and the memory of the coordinator and of each kind of task."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from athanor.cleaning import cleaning, deciding, groups, minhash, near, repeats
from athanor.cleaning.groups import JUDGED, Group, Rows, Shard, save_starts
from tests.cleaning.test_cleaning import ITEM, PARAMS, document, prose
from tests.cleaning.world import clean
from tests.e2e.clone import ROOT

FEW_FILES = """
import resource, sys
sys.path.insert(0, sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
from tests.cleaning.test_cleaning import ITEM, PARAMS, document, prose
from tests.cleaning.world import clean
from athanor.cleaning import groups, near, repeats
groups.GROUP_SHARDS, repeats.PART_IDS, near.PART_KEYS = 8, 16, 32
books = [document(prose(seed), split="val" if seed < 3 else "train") for seed in range(56)]
done = clean({"books": [*books, *books[:8]]}, [ITEM], PARAMS, shard_bytes=1)
assert len(done.cleaned.shard_folders["books"]) == 64 and len(done.dropped) == 8, len(done.dropped)
"""


def test_more_than_twice_as_many_shards_as_files_that_may_be_open():
    done = subprocess.run([sys.executable, "-c", FEW_FILES, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def peak(function: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_coordinator_holds_nothing_for_a_document(monkeypatch):
    """Workers do the work; what the coordinator holds depends on the shards."""
    monkeypatch.setattr(groups, "GROUP_SHARDS", 4)  # a single task would be done in the coordinator
    monkeypatch.setattr(repeats, "PART_IDS", 100)
    monkeypatch.setattr(near, "PART_KEYS", 800)

    peaks, whole = [], cleaning.clean

    def watched(*args):
        tracemalloc.start()
        try:
            return whole(*args)
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    monkeypatch.setattr(cleaning, "clean", watched)
    few_sampled = dataclasses.replace(PARAMS, dedup=dataclasses.replace(PARAMS.dedup, duplicate_check_documents=20))
    for documents in (150, 150, 900):  # the first imports and fills caches
        books = [document(prose(seed, 60)) for seed in range(documents)]
        size = sum(len(book.text) for book in books) // 8
        clean({"books": books}, [ITEM], few_sampled, shard_bytes=size, workers=2)
    assert peaks[2] - peaks[1] < 750 * 80, peaks


def corpus(folder: Path, rows: int) -> Rows:
    """The arrays of one group whose documents all differ."""
    rng = np.random.default_rng(rows)
    found = save_starts(folder, [Group(0, (Shard("books", 0, folder, 0, rows),))])
    ids = rng.integers(0, 2**63, (2, rows), np.uint64)
    keys = np.sort(rng.integers(0, 2**63, (minhash.BANDS, rows), np.uint64), axis=1)
    arrays = {
        JUDGED: {"ids": ids[:, np.argsort(ids[0])], "id": ids.T, "rows": np.arange(rows, dtype=np.uint32)},
        "keys": {"keys": keys, "rows": np.tile(np.arange(rows, dtype=np.uint32), (minhash.BANDS, 1))},
    }
    arrays[JUDGED] |= {name: np.zeros(rows, np.uint64) for name in ("tie", "major")}
    for step, columns in arrays.items():
        (folder / step / "00000").mkdir(parents=True)
        for name, values in columns.items():
            np.save(found.path(step, 0, name), values)
    (folder / "out").mkdir()
    return found


@pytest.mark.parametrize(
    ("function", "task", "bytes_each"),
    [
        (repeats.drop_repeats, {"part": 0, "bits": 0}, 88),
        (near.buckets, {"bands": [3], "part": 0, "bits": 0}, 88),
        (near.buckets, {"bands": [0, 9], "part": 1, "bits": 2}, 22 + 12),
    ],
)
def test_a_range_takes_the_memory_that_is_said(function, task, bytes_each, tmp_path):
    rows, more = 20_000, 100_000
    small, large = (corpus(tmp_path / str(n), n) for n in (rows, more))
    taken = [peak(lambda c=c: function({"work": c.work, **task}, c.work / "out")) for c in (small, large)]
    assert (taken[1] - taken[0]) / (more - rows) < bytes_each


def test_ranges_and_groups_are_bounded():
    for count in (1, 10**6, 10**6 + 1, 45 * 10**6, 660 * 10**6):
        bits = repeats.bits_for(count, repeats.PART_IDS)
        assert count / 2**bits <= repeats.PART_IDS and (not bits or count / 2 ** (bits - 1) > repeats.PART_IDS)
    shards = [Shard("web", n, Path(), 10_000 * n, 10_000 * (n + 1)) for n in range(1000)]
    found = groups.grouped(shards)
    assert [shard for group in found for shard in group.shards] == shards
    assert {group.stop - group.start for group in found} == {groups.GROUP_ROWS}
    tiny = [Shard("web", n, Path(), n, n + 1) for n in range(600)]
    assert [len(group.shards) for group in groups.grouped(tiny)] == [256, 256, 88]


def test_the_sample_is_the_same_for_any_groups(tmp_path):
    """The smallest ids of all groups, found a group at a time."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 2**63, (2, 90), np.uint64)
    expected = np.lexsort((ids[1], ids[0]))[:20]
    for size in (90, 7):
        folder = tmp_path / str(size)
        starts = range(0, 90, size)
        found = save_starts(
            folder, [Group(n, (Shard("a", n, folder, s, min(s + size, 90)),)) for n, s in enumerate(starts)]
        )
        for number, start in enumerate(starts):
            path = found.path(deciding.DECIDED, number, deciding.SAMPLE)
            path.parent.mkdir(parents=True)
            rows = np.arange(start, min(start + size, 90), dtype=np.uint64)
            own = ids[:, start : start + size]
            order = np.lexsort((own[1], own[0]))[:20]
            np.save(path, np.stack([own[0, order], own[1, order], rows[order]]))
        assert deciding.sample_of(found, 20).tolist() == expected.tolist()

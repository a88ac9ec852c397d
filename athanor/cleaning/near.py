"""Near duplicates of a corpus of any size: by signature, bucket, comparison and decision, each as tasks of the executor.

All documents are ranked by what should survive (see `groups`), and a document
is dropped when one that ranks higher, that is itself kept and that shares a
bucket with it (one band of their signatures, see `minhash`), is nearly the
same: true Jaccard similarity of the word 5-grams at or above the threshold.
Going by rank instead of by connected components means that nothing is dropped
for resembling a document that was dropped too.

    keys     of each group: the band keys of its documents, sorted, and their state (OPEN, STAYS, GONE)
    buckets  of each range of keys of each band: who shares a key, and whom each is compared with
    sets     of each group: the shingle sets of the documents that are compared
    verify   of each group: which of its pairs are nearly the same
    settle   of each group, until nothing changes: who is dropped for whom

Of a bucket each document is compared with the BLOCK best ones. One that is
still open is then compared with the next of them, in further rounds, up to
MAX_RIVALS; most corpora need one round. A task holds a range of about a million
keys or a group, so its memory does not follow the size of the corpus: 24 bytes
for each key of a range and 16 for each pair, at most LATER_BLOCK for each key.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.work import Facts, MapShards, Work
from athanor.cleaning import dedup, minhash, repeats
from athanor.cleaning.groups import JUDGED, Group, Rows, Shard, between, major_of, read_numbered, save_starts
from athanor.cleaning.measuring import DOCUMENTS, SIGNATURES
from athanor.cleaning.reasons import KEPT
from athanor.text.documents import Document, write_documents
from athanor.words.words import concatenated, shingles, tokenise

OPEN, STAYS, GONE = 0, 1, 2
EMPTY = np.uint32(0xFFFFFFFF)
PART_KEYS = 1_000_000
BLOCK, LATER_BLOCK, MAX_ROUNDS = 8, 64, 16
MAX_RIVALS = BLOCK + (MAX_ROUNDS - 1) * LATER_BLOCK
CHUNK_SHINGLES = 8_000_000  # held by `verify` at a time, 64 MB
STATE, TWINS = "state", "twins"


def find(
    corpus: Rows,
    groups: Sequence[Group],
    exact_parts: int,
    threshold: float,
    map_shards: MapShards,
    sizes: Mapping[str, int],
) -> str:
    """The step whose arrays `state` and `twins` (int64 [2, dropped]: row and the row that it repeats) hold the decisions.

    `exact_parts` is the number of results of `repeats.drop_repeats`; `sizes` are bytes of text by group, for the progress.
    """
    work = corpus.work

    def of_groups(function: Work, step: str, desc: str, **task: Any) -> list[Facts]:
        tasks = {group.name: {**group_task(group), "work": work, **task} for group in groups}
        facts = map_shards(function, tasks, work / step, desc=f"near duplicates, {desc}", sizes=sizes)
        return [facts[name] for name in tasks]

    keyed = of_groups(keys, "keys", "keys", exact_parts=exact_parts)
    units = _units(sum(facts["eligible"] for facts in keyed), keyed[0]["bands"])
    state, verified, step = "keys", [], 0
    for number in range(MAX_ROUNDS):
        shared = {"work": work, "number": number, "state": state, "verified": verified}
        tasks = {name: {**unit, **shared} for name, unit in units.items()}
        function = more_rivals if number else buckets
        map_shards(function, tasks, work / f"pairs-{number}", desc="near duplicates, buckets")
        names = {"pairs": f"pairs-{number}", "units": len(units), "sets": f"sets-{number}"}
        of_groups(sets_of_pairs, names["sets"], "shingles", **names)
        verified = [*verified, f"verified-{number}"]
        of_groups(verify, verified[-1], "comparison", threshold=threshold, **names)
        while True:
            before, state, step = state, f"settled-{step}", step + 1
            facts = of_groups(settle, state, "decisions", state=before, verified=verified)
            if not sum(row["changed"] for row in facts):
                break
        if not sum(row["open"] for row in facts):
            break
    return state


def _units(eligible: int, bands: int) -> dict[str, Facts]:
    """Tasks of `buckets`: several bands of a small corpus, or one range of the keys of one band."""
    bits = repeats.bits_for(eligible, PART_KEYS)
    together = max(1, PART_KEYS // max(eligible, 1)) if not bits else 1
    runs = [list(range(first, min(first + together, bands))) for first in range(0, bands, together)]
    units = [{"bands": run, "part": part, "bits": bits} for run in runs for part in range(1 << bits)]
    return {f"{number:05d}": {**unit, "unit": number} for number, unit in enumerate(units)}


def group_task(group: Group) -> Facts:
    shards = [(shard.folder.absolute(), shard.start, shard.stop) for shard in group.shards]
    return {"group": group.number, "start": group.start, "stop": group.stop, "shards": shards}


def keys(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: of one group `state`, and by band the sorted keys of its open documents (`keys`) with their rows (`rows`)."""
    corpus, start, stop = Rows(task["work"]), task["start"], task["stop"]
    reason = np.load(corpus.path(JUDGED, task["group"], "reason"))
    state = np.where(reason == KEPT, OPEN, GONE).astype(np.uint8)
    for part in range(task["exact_parts"]):
        state[between(corpus.path(repeats.EXACT_STEP, part, repeats.PAIRS), start, stop)[0] - start] = GONE
    found_keys, found_rows = [], []
    for folder, first, last in task["shards"]:
        own = np.flatnonzero(state[first - start : last - start] == OPEN)
        signatures = np.load(folder / SIGNATURES)[own]
        filled = (signatures != EMPTY).any(axis=1)  # a text without shingles resembles no other
        own += first - start
        state[own[~filled]] = STAYS
        found_keys.append(minhash.band_keys(signatures[filled]))
        found_rows.append(own[filled])
    by_band = np.ascontiguousarray(np.concatenate(found_keys).T)
    order = np.argsort(by_band, axis=1, kind="stable")
    np.save(out / "keys.npy", np.take_along_axis(by_band, order, axis=1))
    np.save(out / "rows.npy", np.concatenate(found_rows).astype(np.uint32)[order])
    _save_state(out, state, np.zeros((2, 0), np.int64))
    return {"bands": by_band.shape[0], "eligible": by_band.shape[1]}


def buckets(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: members.npy, int64 [2, members]: rows that share a key, and their bucket, the best first; and the first pairs."""
    corpus, rows, numbers, count = Rows(task["work"]), [], [], 0
    for band in task["bands"]:
        band_keys, band_rows = [], []
        for group in range(corpus.groups):
            stored = corpus.open("keys", group, "keys")[band]
            own = repeats.in_part(stored, task["part"], task["bits"])
            band_keys.append(np.array(stored[own]))
            band_rows.append(corpus.open("keys", group, "rows")[band, own] + corpus.starts[group])
        merged = np.concatenate(band_keys)
        order = np.argsort(merged, kind="stable")
        shared, bucket = repeats.runs(merged[None, order])
        rows.append(np.concatenate(band_rows)[order[shared]])
        numbers.append(bucket + count)
        count += int(bucket[-1]) + 1 if len(bucket) else 0
    members, bucket = concatenated(rows, np.int64), concatenated(numbers, np.int64)
    order = np.lexsort((*corpus.rank(members), bucket))
    members, bucket = members[order], bucket[order]
    np.save(out / "members.npy", np.stack([members, bucket]))
    return _save_pairs(out, members, bucket, 0, BLOCK, np.ones(len(members), bool))


def more_rivals(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: further pairs of the documents that are open after all comparisons so far, with rivals that are not gone."""
    corpus, number = Rows(task["work"]), task["number"]
    members, bucket = np.load(corpus.path("pairs-0", task["unit"], "members"))
    state = corpus.gather(task["state"], STATE, members)
    wanted = (state == OPEN) & (corpus.gather(task["verified"][-1], "more", members) > 0)
    offset = BLOCK + (number - 1) * LATER_BLOCK
    return _save_pairs(out, members, bucket, offset, LATER_BLOCK, wanted, state == GONE, number == MAX_ROUNDS - 1)


def _save_pairs(
    out: Path,
    members: np.ndarray,
    bucket: np.ndarray,
    offset: int,
    block: int,
    wanted: np.ndarray,
    gone: np.ndarray | None = None,
    last: bool = False,
) -> Facts:
    """pairs.npy, int64 [2, pairs]: a wanted row and the one at a position from `offset` on in its bucket, if that is better.

    rivals.npy: the second ones, sorted; more.npy: rows with better ones behind this block.
    """
    first = np.searchsorted(bucket, bucket) if len(bucket) else bucket
    position = np.arange(len(bucket)) - first
    pairs = [np.zeros((2, 0), np.int64)]
    for place in range(offset, offset + block):
        own = np.flatnonzero(wanted & (position > place))
        if not len(own):
            break
        rivals = first[own] + place
        if gone is not None:
            own, rivals = own[~gone[rivals]], rivals[~gone[rivals]]
        pairs.append(np.stack([members[own], members[rivals]]))
    found = _distinct(np.concatenate(pairs, axis=1))
    np.save(out / "pairs.npy", found)
    np.save(out / "rivals.npy", np.unique(found[1]))
    np.save(out / "more.npy", np.unique(members[wanted & (position > offset + block) & (not last)]))
    return {"pairs": found.shape[1]}


def _distinct(pairs: np.ndarray) -> np.ndarray:
    pairs = pairs[:, np.lexsort((pairs[1], pairs[0]))]
    return pairs[:, np.append(True, (pairs[:, 1:] != pairs[:, :-1]).any(axis=0))] if pairs.shape[1] else pairs


def sets_of_pairs(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: the shingle sets of the documents of one group that are in any pair."""
    corpus, rows = Rows(task["work"]), [np.zeros(0, np.int64)]
    for unit in range(task["units"]):
        rows.append(np.unique(between(corpus.path(task["pairs"], unit, "pairs"), task["start"], task["stop"])[0]))
        rivals = np.load(corpus.path(task["pairs"], unit, "rivals"), mmap_mode="r")
        # A view would keep the file of each unit open.
        rows.append(np.array(rivals[slice(*np.searchsorted(rivals, (task["start"], task["stop"])))]))
    return write_sets(task["shards"], np.unique(np.concatenate(rows)), out)


def write_sets(shards: Sequence[tuple[Path, int, int]], rows: np.ndarray, out: Path) -> Facts:
    """Write the sorted shingle sets of some rows (sorted, of these shards): rows.npy, offsets.npy, and sets.bin of uint64."""
    lengths = [0]
    with open(out / "sets.bin", "wb") as file:
        for folder, first, last in shards:
            own = rows[slice(*np.searchsorted(rows, (first, last)))] - first
            texts = ((number, document.text) for number, document in read_numbered(folder, own))
            for _, found in dedup.shingle_sets(texts):
                found.tofile(file)
                lengths.append(len(found))
    np.save(out / "rows.npy", rows)
    np.save(out / "offsets.npy", np.cumsum(lengths, dtype=np.int64))
    return {"documents": len(rows), "shingles": sum(lengths)}


def read_sets(corpus: Rows, step: str, rows: np.ndarray) -> dict[int, np.ndarray]:
    """The stored shingle sets of some rows."""
    sets: dict[int, np.ndarray] = {}
    for group, positions in corpus.by_group(rows):
        index = np.searchsorted(np.load(corpus.path(step, group, "rows")), rows[positions])
        offsets = np.load(corpus.path(step, group, "offsets"))
        with open(corpus.path(step, group, "sets").with_suffix(".bin"), "rb") as file:
            for row, place in sorted(zip(rows[positions].tolist(), index.tolist(), strict=True)):
                file.seek(8 * offsets[place])
                sets[row] = np.fromfile(file, np.uint64, int(offsets[place + 1] - offsets[place]))
    return sets


def verify(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: near.npy, int64 [2, pairs], the pairs of one group that are nearly the same, each document's best rival first.

    more.npy: uint8 [rows of the group], documents with better ones in a bucket that they were not compared with.
    """
    corpus, start, stop = Rows(task["work"]), task["start"], task["stop"]
    more, found = np.zeros(stop - start, np.uint8), [np.zeros((2, 0), np.int64)]
    for unit in range(task["units"]):
        found.append(between(corpus.path(task["pairs"], unit, "pairs"), start, stop))
        rows = np.load(corpus.path(task["pairs"], unit, "more"), mmap_mode="r")
        more[rows[slice(*np.searchsorted(rows, (start, stop)))] - start] = 1
    pairs = _distinct(np.concatenate(found, axis=1))
    pairs = pairs[:, np.lexsort((*corpus.rank(pairs[1]), pairs[0]))]
    near = [np.zeros((2, 0), np.int64), *_near(corpus, pairs, task["sets"], task["threshold"])]
    np.save(out / "near.npy", np.concatenate(near, axis=1))
    np.save(out / "more.npy", more)
    return {"pairs": pairs.shape[1], "near": sum(part.shape[1] for part in near)}


def _near(corpus: Rows, pairs: np.ndarray, step: str, threshold: float) -> Iterator[np.ndarray]:
    shingles = np.cumsum(_set_sizes(corpus, step, pairs[0]) + _set_sizes(corpus, step, pairs[1]))
    cuts = np.flatnonzero(np.diff(shingles // CHUNK_SHINGLES)) + 1
    for chunk in np.split(pairs, cuts, axis=1):
        sets = read_sets(corpus, step, np.unique(chunk))
        yield (
            chunk[:, [_alike(sets[row], sets[rival], threshold) for row, rival in chunk.T.tolist()]]
            if chunk.size
            else chunk
        )


def _alike(first: np.ndarray, second: np.ndarray, threshold: float) -> bool:
    small, large = sorted((len(first), len(second)))
    return small >= threshold * large and minhash.jaccard(first, second) >= threshold


def _set_sizes(corpus: Rows, step: str, rows: np.ndarray) -> np.ndarray:
    sizes = np.zeros(len(rows), np.int64)
    for group, positions in corpus.by_group(rows):
        index = np.searchsorted(np.load(corpus.path(step, group, "rows")), rows[positions])
        sizes[positions] = np.diff(np.load(corpus.path(step, group, "offsets")))[index]
    return sizes


def settle(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: the state of one group after one more look at its near pairs.

    Gone is a document that nearly equals a better one that stays; one stays when all better ones that it nearly equals
    are gone, and it was compared with all it has to be.
    """
    corpus, start, group = Rows(task["work"]), task["start"], task["group"]
    state = np.load(corpus.path(task["state"], group, STATE))
    twins = np.load(corpus.path(task["state"], group, TWINS))
    near = [np.load(corpus.path(step, group, "near")) for step in task["verified"]]
    pairs = np.concatenate([np.zeros((2, 0), np.int64), *near], axis=1)
    before = state == OPEN
    pairs = pairs[:, before[pairs[0] - start]]
    pairs = pairs[:, np.argsort(pairs[0], kind="stable")]
    rivals = corpus.gather(task["state"], STATE, pairs[1])
    repeating, first = np.unique(pairs[0, rivals == STAYS], return_index=True)
    state[repeating - start] = GONE
    waiting = (
        np.load(corpus.path(task["verified"][-1], group, "more")) > 0
        if task["verified"]
        else np.zeros(len(state), bool)
    )
    waiting[pairs[0, rivals == OPEN] - start] = True
    state[(state == OPEN) & ~waiting] = STAYS
    twins = np.concatenate([twins, np.stack([repeating, pairs[1, rivals == STAYS][first]])], axis=1)
    _save_state(out, state, twins)
    still_open = int((state == OPEN).sum())
    return {"open": still_open, "changed": int(before.sum()) - still_open}


def _save_state(out: Path, state: np.ndarray, twins: np.ndarray) -> None:
    np.save(out / f"{STATE}.npy", state)
    np.save(out / f"{TWINS}.npy", twins[:, np.argsort(twins[0])])


def repeating(texts: Sequence[str], threshold: float) -> dict[int, int]:
    """Number of each text that nearly repeats an earlier one that is kept, with that one's number; for a few thousand."""
    if not texts:
        return {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / DOCUMENTS, (Document(text, "texts", "prose", "unknown", "train") for text in texts))
        np.save(folder / SIGNATURES, minhash.signatures(shingles(tokenise(texts).words, minhash.SHINGLE_WORDS)))
        group = Group(0, (Shard("texts", 0, folder, 0, len(texts)),))
        corpus, numbers = save_starts(folder, [group]), np.arange(len(texts), dtype=np.uint64)
        (folder / JUDGED / group.name).mkdir(parents=True)
        arrays = {
            "major": major_of(np.zeros(len(texts), bool), 0, np.zeros(len(texts), np.int64)),
            "id": np.stack([numbers, numbers], axis=1),
            "reason": np.full(len(texts), KEPT, np.int16),
        }
        for array_name, values in arrays.items():
            np.save(corpus.path(JUDGED, 0, array_name), values)
        step = find(corpus, [group], 0, threshold, _here, {group.name: 0})
        return dict(np.load(corpus.path(step, 0, TWINS)).T.tolist())


def _here(work: Work, tasks: Mapping[str, Any], folder: Path, *, desc: str, sizes: Any = None) -> dict[str, Facts]:
    facts = {}
    for name, task in tasks.items():
        (folder / name).mkdir(parents=True)
        facts[name] = work(task, folder / name)
    return facts

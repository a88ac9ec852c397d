"""Which documents repeat others, decided without regard to the order they came in.

All documents are ranked by what should survive (see `cleaning`), and a document
is dropped when one that ranks higher and is itself kept says the same: exactly
(equal text) or nearly (true Jaccard similarity of the word 5-grams at or above
the threshold). Going by rank instead of by connected components means that
nothing is dropped for resembling a document that was dropped too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from athanor.cleaning import minhash
from athanor.text.documents import in_batches
from athanor.words.words import concatenated, shingles, tokenise

# The estimate from 126 permutations has a standard deviation of at most 0.045; pairs five of them below the
# threshold are not worth the true comparison.
ESTIMATE_MARGIN = 0.2
_FILTER_BITS = 22
_FILTER_SHIFT = np.uint64(64 - _FILTER_BITS)

ShinglesOf = Callable[[int], np.ndarray]  # document number to its sorted set of shingles


class SignaturesOf(Protocol):
    """An array of signatures, or an object that is indexed like one."""

    def __getitem__(self, numbers: np.ndarray | int) -> np.ndarray: ...


def exact_duplicates(ids: np.ndarray, ranked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the documents that repeat a better ranked one, and the numbers of those they repeat; both int64.

    ids: uint64 [documents, 2], equal for equal texts. ranked: numbers of the documents to compare, the best first.
    """
    ranked = np.asarray(ranked, np.int64)
    ranked_ids = ids[ranked]
    order = np.lexsort(
        (np.arange(len(ranked)), ranked_ids[:, 1], ranked_ids[:, 0])
    )  # equal ids together, each run by rank
    is_first = np.ones(len(order), bool)
    is_first[1:] = (ranked_ids[order[1:]] != ranked_ids[order[:-1]]).any(axis=1)
    first = order[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]] if len(order) else order
    return ranked[order[~is_first]], ranked[first[~is_first]]


def candidates(keys: Callable[[int], np.ndarray], eligible: np.ndarray, bands: int) -> tuple[np.ndarray, np.ndarray]:
    """Which documents share a band: (numbers, buckets), both int64, one entry for each document of a shared bucket.

    `keys(band)` are the uint64 keys of all documents; only those in `eligible` (bool) count. One band is held at a
    time: 24 bytes for each document, and 16 for each entry found.
    """
    rows = np.flatnonzero(eligible)
    numbers, buckets, bucket_count = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for band in range(bands):
        band_keys = keys(band)[rows]
        order = np.argsort(band_keys, kind="stable")
        same = band_keys[order[1:]] == band_keys[order[:-1]]
        shared = np.zeros(len(order), bool)
        shared[1:] = same
        shared[:-1] |= same
        starts_bucket = np.ones(len(order), bool)
        starts_bucket[1:] = ~same
        numbers.append(rows[order[shared]])
        buckets.append(bucket_count + np.cumsum(starts_bucket & shared)[shared])
        bucket_count += int((starts_bucket & shared).sum())
    return np.concatenate(numbers), np.concatenate(buckets)


def near_duplicates(
    signatures: SignaturesOf,
    ranked: Sequence[int] | np.ndarray,
    shingles_of: ShinglesOf,
    threshold: float,
    known_candidates: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[int, int]:
    """Number of each document of `ranked` that nearly repeats a kept one of higher rank, with that one's number.

    `signatures[numbers]` is uint32 [numbers, permutations]. Candidates share a
    band; each is verified by `minhash.jaccard`. Finds pairs with the
    probability that `minhash` states. `known_candidates` are the result of `candidates`, if known;
    documents that are in no shared bucket are not looked at.
    """
    ranked = np.asarray(ranked, np.int64)
    if known_candidates is None:
        # A text without shingles has a signature of nothing; it resembles no other.
        sketch = signatures[ranked]
        keys = minhash.band_keys(sketch)
        eligible = (sketch != np.uint32(0xFFFFFFFF)).any(axis=1)
        indices, buckets = candidates(lambda band: keys[:, band], eligible, keys.shape[1])
        known_candidates = ranked[indices], buckets
    numbers, buckets = known_candidates
    rank_of = np.full(int(max(ranked.max(initial=-1), numbers.max(initial=-1))) + 1, -1, np.int64)
    rank_of[ranked] = np.arange(len(ranked))
    order = np.lexsort((buckets, rank_of[numbers]))
    order = order[rank_of[numbers[order]] >= 0]
    numbers, buckets = numbers[order], buckets[order]
    kept_by_bucket: dict[int, list[int]] = {}
    repeats: dict[int, int] = {}
    boundaries = [*np.flatnonzero(np.diff(numbers, prepend=-1)).tolist(), len(numbers)]
    for start, end in itertools.pairwise(boundaries):
        number, own_buckets = int(numbers[start]), buckets[start:end].tolist()
        rivals = sorted({rival for bucket in own_buckets for rival in kept_by_bucket.get(bucket, ())})
        twin = _twin(number, ranked[rivals], signatures, shingles_of, threshold) if rivals else None
        if twin is None:
            for bucket in own_buckets:
                kept_by_bucket.setdefault(bucket, []).append(int(rank_of[number]))
        else:
            repeats[number] = twin
    return repeats


def _twin(
    number: int, rivals: np.ndarray, signatures: SignaturesOf, shingles_of: ShinglesOf, threshold: float
) -> int | None:
    """The highest ranked of `rivals` that `number` nearly repeats."""
    estimates = minhash.agreement(signatures[number], signatures[rivals])
    own_shingles = shingles_of(number)
    for rival in rivals[estimates >= threshold - ESTIMATE_MARGIN].tolist():
        if minhash.jaccard(own_shingles, shingles_of(rival)) >= threshold:
            return rival
    return None


class Index:
    """An inverted index of shingle sets, for an exact and exhaustive search: no signature, no band, no chance.

    It makes sure that training holds no near copy of a validation document,
    and it measures what `near_duplicates` left behind. Memory follows the sets
    in the index (12 bytes for each shingle); what is compared is streamed.
    """

    def __init__(self, numbers: Sequence[int], sets: Sequence[np.ndarray]) -> None:
        self.numbers = np.asarray(numbers, np.int64)
        self._sizes = np.array([len(item) for item in sets], np.int64)
        values = concatenated(sets, np.uint64)
        owners = np.repeat(np.arange(len(self._sizes), dtype=np.int32), self._sizes)
        order = np.argsort(values, kind="stable")
        self._values, self._owners = values[order], owners[order]
        # Most shingles are not in the index. A table over their leading bits, small enough for the cache, shows it fast.
        self._filter = np.zeros(1 << _FILTER_BITS, bool)
        self._filter[values >> _FILTER_SHIFT] = True

    def find(self, queries: Iterable[tuple[int, np.ndarray]], threshold: float) -> dict[int, int]:
        """Number of each of `queries` that nearly equals an indexed one (not itself), with the first such's number."""
        copies = {}
        for number, own_shingles in queries:
            indexed_shingles = own_shingles[self._filter[own_shingles >> _FILTER_SHIFT]]
            low = np.searchsorted(self._values, indexed_shingles, "left")
            hit = low < len(self._values)
            hit[hit] = self._values[low[hit]] == indexed_shingles[hit]
            low = low[hit]
            if not len(low):
                continue
            lengths = np.searchsorted(self._values, indexed_shingles[hit], "right") - low
            positions = np.repeat(low - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
            shared = np.bincount(self._owners[positions], minlength=len(self._sizes))
            min_shared = threshold * (len(own_shingles) + self._sizes - shared)
            near = np.flatnonzero((shared > 0) & (shared >= min_shared) & (self.numbers != number))
            if len(near):
                copies[number] = int(self.numbers[near[0]])
        return copies


def shingle_sets(texts: Iterable[tuple[int, str]], batch_chars: int = 1_000_000) -> Iterator[tuple[int, np.ndarray]]:
    """(number, sorted shingle set) for each (number, text), tokenised a batch at a time."""
    for batch in in_batches(texts, lambda item: len(item[1]), batch_chars):
        grams = shingles(tokenise([text for _, text in batch]).words, minhash.SHINGLE_WORDS)
        for index, (number, _) in enumerate(batch):
            yield number, np.unique(grams.of(index))

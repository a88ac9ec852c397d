"""Which documents repeat others, decided without regard to the order they came in.

All documents are ranked by what should survive (see `cleaning`), and a document
is dropped when one that ranks higher and is itself kept says the same: exactly
(equal text) or nearly (true Jaccard similarity of the word 5-grams at or above
the threshold). Going by rank instead of by connected components means that
nothing is dropped for resembling a document that was dropped too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import numpy as np

from athanor.corpus import minhash
from athanor.corpus.words import shingles, tokenise

# The estimate from 128 permutations has a standard deviation of at most 0.045; pairs five of them below the
# threshold are not worth the true comparison.
ESTIMATE_MARGIN = 0.2
_SEEN_BITS = 22
_SEEN_SHIFT = np.uint64(64 - _SEEN_BITS)

ShinglesOf = Callable[[int], np.ndarray]  # document number to its sorted set of shingles


def exact_duplicates(contents: Sequence[Hashable], ranked: Sequence[int]) -> dict[int, int]:
    """Number of each document that repeats a better one, with the number of that one."""
    best: dict[Hashable, int] = {}
    repeats = {}
    for number in ranked:
        kept = best.setdefault(contents[number], number)
        if kept != number:
            repeats[number] = kept
    return repeats


def near_duplicates(
    signatures: np.ndarray, ranked: Sequence[int], shingles_of: ShinglesOf, threshold: float
) -> dict[int, int]:
    """Number of each document of `ranked` that nearly repeats a kept one of higher rank, with that one's number.

    signatures: uint32 [documents, 128]. Candidates share a band; each is
    verified by `minhash.jaccard`. Finds pairs with the probability that
    `minhash` states.
    """
    ranked = np.asarray(ranked, np.int64)
    # A text without shingles has a signature of nothing; it resembles no other.
    ranked = ranked[(signatures[ranked] != np.uint32(0xFFFFFFFF)).any(axis=1)] if len(ranked) else ranked
    keys = minhash.band_keys(signatures[ranked])
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    shared = (counts > 1)[inverse].reshape(keys.shape)
    inverse = inverse.reshape(keys.shape)
    buckets: dict[int, list[int]] = {}
    repeats: dict[int, int] = {}
    for row in np.flatnonzero(shared.any(axis=1)):
        number, mine = int(ranked[row]), inverse[row][shared[row]].tolist()
        rivals = sorted({rival for key in mine for rival in buckets.get(key, ())})
        kept = _twin(number, ranked[rivals], signatures, shingles_of, threshold) if rivals else None
        if kept is None:
            for key in mine:
                buckets.setdefault(key, []).append(int(row))
        else:
            repeats[number] = kept
    return repeats


def _twin(
    number: int, rivals: np.ndarray, signatures: np.ndarray, shingles_of: ShinglesOf, threshold: float
) -> int | None:
    """The highest ranked of `rivals` that `number` nearly repeats."""
    estimates = minhash.agreement(signatures[number], signatures[rivals])
    mine = shingles_of(number)
    for rival in rivals[estimates >= threshold - ESTIMATE_MARGIN].tolist():
        if minhash.jaccard(mine, shingles_of(rival)) >= threshold:
            return rival
    return None


def resembling(
    queries: Sequence[int], query_sets: Sequence[np.ndarray], others: Iterable[tuple[int, np.ndarray]], threshold: float
) -> dict[int, int]:
    """Number of each of `others` that nearly equals a query (other than itself), with the first such query's number.

    Exact and exhaustive, by an inverted index of the queries' shingle sets: no
    signature, no band, no chance. Memory follows the queries, `others` are
    streamed, so the queries should be the smaller side. It makes sure that
    training holds no near copy of a validation document, and it measures what
    `near_duplicates` left behind.
    """
    if not len(queries):
        return {}
    sizes = np.array([len(item) for item in query_sets])
    values = np.concatenate(query_sets)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    order = np.argsort(values, kind="stable")
    values, owners = values[order], owners[order]
    numbers = np.asarray(queries)
    # Most shingles are no query's. A table over their leading bits, small enough for the cache, says so quickly.
    seen = np.zeros(1 << _SEEN_BITS, bool)
    seen[values >> _SEEN_SHIFT] = True
    found = {}
    for number, all_mine in others:
        mine = all_mine[seen[all_mine >> _SEEN_SHIFT]]
        low = np.searchsorted(values, mine, "left")
        hit = low < len(values)
        hit[hit] = values[low[hit]] == mine[hit]
        low = low[hit]
        lengths = np.searchsorted(values, mine[hit], "right") - low
        places = np.repeat(low - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
        shared = np.bincount(owners[places], minlength=len(sizes))
        enough = threshold * (len(all_mine) + sizes - shared)
        close = np.flatnonzero((shared > 0) & (shared >= enough) & (numbers != number))
        if len(close):
            found[number] = int(numbers[close[0]])
    return found


def shingle_sets(texts: Iterable[tuple[int, str]], batch_chars: int = 1_000_000) -> Iterator[tuple[int, np.ndarray]]:
    """(number, sorted shingle set) for each (number, text), tokenised a batch at a time."""
    batch: list[tuple[int, str]] = []
    size = 0
    for number, text in texts:
        batch.append((number, text))
        size += len(text)
        if size >= batch_chars:
            yield from _sets(batch)
            batch, size = [], 0
    yield from _sets(batch)


def _sets(batch: list[tuple[int, str]]) -> Iterator[tuple[int, np.ndarray]]:
    if batch:
        found = shingles(tokenise([text for _, text in batch]).words, minhash.SHINGLE_WORDS)
        for place, (number, _) in enumerate(batch):
            yield number, np.unique(found.of(place))

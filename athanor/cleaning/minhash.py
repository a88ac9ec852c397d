"""MinHash signatures of word shingles and the banding that finds candidate pairs.

The signature of a text is, for each of 126 permutations of the 32-bit numbers,
the smallest image of its shingles; two signatures agree in a share of places
that estimates the Jaccard similarity of the shingle sets (Broder 1997). A
permutation is h -> a * h + b modulo 2^32 with odd a, computed in uint32, whose
arithmetic is modulo 2^32 by definition: no product can overflow into a wrong
value.

Two texts are candidates when all rows of a band agree, which with b bands of r
rows has the probability 1 - (1 - J^r)^b. For the usual 0.8:

    bands x rows   J = 0.8   0.85     0.9       0.5 (work for nothing)
    16 x 8         0.947     0.994    0.9999    0.061
    18 x 7         0.986     0.999    0.99999   0.132
    21 x 6         0.998     0.99995  1         0.282

18 x 7 finds 95 of 100 pairs at 0.8 with room to spare, for no more hashing than 16 x 8 needs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from athanor.words.words import Words, mix, splitmix64

SHINGLE_WORDS = 5
BANDS, ROWS = 18, 7
PERMUTATIONS = BANDS * ROWS
_BLOCK_SHINGLES = 1 << 17  # as 32-bit numbers half a megabyte, which stays in the cache for all permutations

_A = (splitmix64(11, PERMUTATIONS) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
_B = (splitmix64(12, PERMUTATIONS) >> np.uint64(32)).astype(np.uint32)


def signatures(shingles: Words) -> np.ndarray:
    """uint32 [texts, PERMUTATIONS]; a text without shingles gets the largest value everywhere."""
    result = np.full((len(shingles), PERMUTATIONS), 0xFFFFFFFF, np.uint32)
    for texts in _blocks(np.flatnonzero(shingles.counts), shingles.offsets):
        first, last = shingles.offsets[texts[0]], shingles.offsets[texts[-1] + 1]
        starts = shingles.offsets[texts] - first
        values = (shingles.hashes[first:last] >> np.uint64(32)).astype(np.uint32)
        image = np.empty_like(values)
        columns = np.empty((PERMUTATIONS, len(texts)), np.uint32)
        for number in range(PERMUTATIONS):
            np.multiply(values, _A[number], out=image)
            image += _B[number]
            np.minimum.reduceat(image, starts, out=columns[number])
        result[texts] = columns.T
    return result


def _blocks(texts: np.ndarray, offsets: np.ndarray) -> Iterator[np.ndarray]:
    """Runs of texts that begin within the same _BLOCK_SHINGLES."""
    if len(texts):
        cuts = np.flatnonzero(np.diff(offsets[texts] // _BLOCK_SHINGLES)) + 1
        yield from np.split(texts, cuts)


def band_keys(signatures: np.ndarray) -> np.ndarray:
    """uint64 [texts, BANDS]: one key for the rows of each band; keys of different bands never meet by chance."""
    rows = signatures.reshape(len(signatures), BANDS, ROWS).astype(np.uint64)
    keys = np.zeros(rows.shape[:2], np.uint64)
    for row in range(ROWS):
        keys = mix(keys + rows[:, :, row] + np.uint64(row + 1))
    return mix(keys ^ splitmix64(13, BANDS))


def agreement(signature: np.ndarray, others: np.ndarray) -> np.ndarray:
    """float64 [others]: the estimated Jaccard similarity of one text with several."""
    return (others == signature).mean(axis=1)


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """The true similarity of two sorted sets of shingles; 0 when either is empty."""
    if not len(first) or not len(second):
        return 0.0
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)

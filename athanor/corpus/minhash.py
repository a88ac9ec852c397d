"""MinHash signatures of word shingles and the banding that finds candidate pairs.

The signature of a text is, for each of 128 permutations of the 32-bit numbers,
the smallest image of its shingles; two signatures agree in a share of places
that estimates the Jaccard similarity of the shingle sets (Broder 1997). A
permutation is h -> a * h + b modulo 2^32 with odd a, computed in uint32, whose
arithmetic is modulo 2^32 by definition: no product can overflow into a wrong
value. The 16 bands of 8 rows make two texts candidates with probability
1 - (1 - J^8)^16: 0.947 at J = 0.8, 0.9999 at 0.9.
"""

from __future__ import annotations

import numpy as np

from athanor.corpus.words import Words, mix, stream

SHINGLE_WORDS = 5
PERMUTATIONS, BANDS = 128, 16
ROWS = PERMUTATIONS // BANDS

_A = (stream(11, PERMUTATIONS) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
_B = (stream(12, PERMUTATIONS) >> np.uint64(32)).astype(np.uint32)


def signatures(shingles: Words) -> np.ndarray:
    """uint32 [texts, 128]; a text without shingles gets the largest value everywhere."""
    result = np.full((len(shingles), PERMUTATIONS), 0xFFFFFFFF, np.uint32)
    filled = np.flatnonzero(shingles.counts)
    if not len(filled):
        return result
    starts = shingles.offsets[filled]
    values = (shingles.hashes >> np.uint64(32)).astype(np.uint32)
    image = np.empty_like(values)
    columns = np.empty((PERMUTATIONS, len(filled)), np.uint32)
    for number in range(PERMUTATIONS):
        np.multiply(values, _A[number], out=image)
        image += _B[number]
        np.minimum.reduceat(image, starts, out=columns[number])
    result[filled] = columns.T
    return result


def band_keys(signatures: np.ndarray) -> np.ndarray:
    """uint64 [texts, 16]: one key for the eight rows of each band; keys of different bands never meet by chance."""
    rows = signatures.reshape(len(signatures), BANDS, ROWS).astype(np.uint64)
    keys = np.zeros(rows.shape[:2], np.uint64)
    for row in range(ROWS):
        keys = mix(keys + rows[:, :, row] + np.uint64(row + 1))
    return mix(keys ^ stream(13, BANDS))


def agreement(signature: np.ndarray, others: np.ndarray) -> np.ndarray:
    """float64 [others]: the estimated Jaccard similarity of one text with several."""
    return (others == signature).mean(axis=1)


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """The true similarity of two sorted sets of shingles; 0 when either is empty."""
    if not len(first) or not len(second):
        return 0.0
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)

"""How much a text repeats itself, in consecutive runs and all over."""

from __future__ import annotations

import numpy as np

from athanor.corpus.words import Words, mix, ngrams, stream

PERIODS = range(1, 14)


def consecutive_repeats(words: Words) -> np.ndarray:
    """int64 [texts]: the most times that any n-gram, n = 1 .. 13, occurs in immediate succession.

    An n-gram repeated r times is a stretch in which every word equals the one n
    words later, (r - 1) * n words long.
    """
    texts = len(words)
    # A value that occurs nowhere else parts the texts, so that no stretch crosses from one into the next.
    parted = np.insert(words.hashes, words.offsets[1:], stream(21, texts))
    ends = words.offsets[1:] + np.arange(texts)  # place of each parting value
    most = np.minimum(words.counts, 1)
    for period in PERIODS:
        if len(parted) <= period:
            break
        breaks = np.flatnonzero(parted[period:] != parted[:-period])
        stretch = np.diff(breaks) - 1
        long = np.flatnonzero(stretch >= period)
        owner = np.searchsorted(ends, breaks[long] + 1)
        np.maximum.at(most, owner, stretch[long] // period + 1)
        if len(breaks) and breaks[0] >= period:  # a stretch at the very beginning has no break before it
            most[0] = max(most[0], breaks[0] // period + 1)
    return most


def _keys(grams: Words) -> np.ndarray:
    """uint64 [n-grams]: one key for each n-gram of each text."""
    return mix(grams.hashes + np.repeat(stream(22, len(grams)), grams.counts))


def duplicate_share(words: Words, size: int) -> np.ndarray:
    """float64 [texts]: the share of words that lie in a `size`-gram which occurred before in the same text."""
    grams = ngrams(words, size)
    keys = _keys(grams)
    order = np.argsort(keys, kind="stable")  # stable: the first occurrence is the one that counts as new
    again = order[1:][keys[order[1:]] == keys[order[:-1]]]
    starts = again + np.repeat(words.offsets[:-1] - grams.offsets[:-1], grams.counts)[again]
    cover = np.zeros(len(words.hashes) + 1, np.int64)
    np.add.at(cover, starts, 1)
    np.add.at(cover, starts + size, -1)
    covered = np.concatenate([[0], np.cumsum(np.cumsum(cover[:-1]) > 0)])
    return np.diff(covered[words.offsets]) / np.maximum(words.counts, 1)


def top_share(words: Words, size: int) -> np.ndarray:
    """float64 [texts]: the share of words taken by the most frequent `size`-gram; 0 if it occurs less than thrice."""
    grams = ngrams(words, size)
    keys, first, counts = np.unique(_keys(grams), return_index=True, return_counts=True)
    owner = np.searchsorted(grams.offsets, first, "right") - 1
    top = np.zeros(len(words), np.int64)
    np.maximum.at(top, owner, np.where(counts >= 3, counts, 0))
    return np.minimum(top * size / np.maximum(words.counts, 1), 1.0)

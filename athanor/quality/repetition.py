"""How much a text repeats itself, in consecutive runs and all over."""

from __future__ import annotations

import numpy as np

from athanor.words.words import Words, mix, prefix_sums, splitmix64

PERIODS = range(1, 14)


def consecutive_repeats(words: Words) -> np.ndarray:
    """int64 [texts]: the most times that any n-gram, n = 1 .. 13, occurs in immediate succession.

    An n-gram repeated r times is a stretch in which every word equals the one n
    words later, (r - 1) * n words long.
    """
    texts = len(words)
    # A value that occurs nowhere else separates the texts, so that no stretch crosses from one into the next.
    separated = np.insert(words.hashes, words.offsets[1:], splitmix64(21, texts))
    ends = words.offsets[1:] + np.arange(texts)  # place of each parting value
    max_repeats = np.minimum(words.counts, 1)
    for period in PERIODS:
        if len(separated) <= period:
            break
        breaks = np.flatnonzero(separated[period:] != separated[:-period])
        stretch = np.diff(breaks) - 1
        long = np.flatnonzero(stretch >= period)
        owner = np.searchsorted(ends, breaks[long] + 1)
        np.maximum.at(max_repeats, owner, stretch[long] // period + 1)
        if len(breaks) and breaks[0] >= period:  # a stretch at the very beginning has no break before it
            max_repeats[0] = max(max_repeats[0], breaks[0] // period + 1)
    return max_repeats


class Repeats:
    """The n-grams of each text that occur in it more than once, for growing n.

    An (n + k)-gram can only be repeated where its first n and its last n words
    are, so after 2-grams have been sorted the rest is a sort of the few that
    are left. `grow` takes sizes in ascending order, at most doubled at a time.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._size = 1
        self._starts = np.arange(len(words.hashes))  # of the n-grams that are repeated (n = 1: of all)
        # One key for equal n-grams of one text; texts have different keys for the same words.
        self._keys = mix(words.hashes + np.repeat(splitmix64(22, len(words)), words.counts))
        self._repeat_starts = self._starts  # of the occurrences that are not the first of their n-gram
        self._counts = np.zeros(0, np.int64)  # occurrences of each repeated n-gram
        self._owners = np.zeros(0, np.int64)  # its text

    def grow(self, size: int) -> None:
        """Proceed to n-grams of `size` words."""
        if not self._size < size <= 2 * self._size:
            raise ValueError(f"cannot go from {self._size}-grams to {size}-grams")
        step = size - self._size
        index_of_start = np.full(len(self._words.hashes) + step, -1)
        index_of_start[self._starts] = np.arange(len(self._starts))
        # The n-gram that ends where the longer one does. Two of different texts may touch at the border, but keys
        # belong to a text, so that pair of keys occurs once and counts for nothing.
        later = index_of_start[self._starts + step]
        starts = np.flatnonzero(later >= 0)
        later = later[starts]
        keys = mix(self._keys[starts] * np.uint64(0xD1342543DE82EF95) + self._keys[later])
        starts = self._starts[starts]
        order = _grouped(keys)
        equal = np.zeros(len(order) + 1, bool)  # to the one before; never so for the first and for the end
        equal[1:-1] = keys[order[1:]] == keys[order[:-1]]
        is_repeated = equal[:-1] | equal[1:]
        first = np.flatnonzero(is_repeated & ~equal[:-1])
        self._size = size
        self._repeat_starts = starts[order[equal[:-1]]]
        self._counts = np.diff(np.append(np.searchsorted(np.flatnonzero(is_repeated), first), is_repeated.sum()))
        self._owners = np.searchsorted(self._words.offsets, starts[order[first]], "right") - 1
        # In the order of the text again: a gather in the order of the sort would be slow.
        surviving = np.sort(order[is_repeated])
        self._starts, self._keys = starts[surviving], keys[surviving]

    def duplicate_share(self) -> np.ndarray:
        """float64 [texts]: the share of words that lie in an n-gram which occurred before in the same text."""
        words = self._words
        cover = np.zeros(len(words.hashes) + 1, np.int64)
        cover[self._repeat_starts] += 1  # a start occurs once, so no element is named twice
        cover[self._repeat_starts + self._size] -= 1
        covered = prefix_sums(np.cumsum(cover[:-1]) > 0)
        return np.diff(covered[words.offsets]) / np.maximum(words.counts, 1)

    def top_share(self) -> np.ndarray:
        """float64 [texts]: the share of words taken by the most frequent n-gram; 0 if it occurs less than thrice."""
        top = np.zeros(len(self._words), np.int64)
        is_frequent = self._counts >= 3
        np.maximum.at(top, self._owners[is_frequent], self._counts[is_frequent])
        return np.minimum(top * self._size / np.maximum(self._words.counts, 1), 1.0)


def _grouped(keys: np.ndarray) -> np.ndarray:
    """int64 [keys]: an order in which equal keys are neighbours, those of a key in ascending order.

    The index of a key is put into its low bits and the result is sorted, which
    is several times faster than a stable argsort. Different keys that agree in
    the high bits may then be mixed up; that is detected, and sorted properly.
    """
    bits = np.uint64(max(len(keys) - 1, 1).bit_length())
    index_mask = (np.uint64(1) << bits) - np.uint64(1)
    packed = (keys & ~index_mask) | np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    order = (packed & index_mask).astype(np.int64)
    ordered = keys[order]
    collided = ((packed[1:] ^ packed[:-1]) <= index_mask) & (ordered[1:] != ordered[:-1])
    return np.argsort(keys, kind="stable") if collided.any() else order

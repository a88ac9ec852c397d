"""Sets of word shingles, and an exhaustive search for sets that are nearly the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from athanor.cleaning import minhash
from athanor.text.documents import in_batches
from athanor.words.words import concatenated, shingles, tokenise

_FILTER_BITS = 22
_FILTER_SHIFT = np.uint64(64 - _FILTER_BITS)
_ARRAYS = ("numbers", "sizes", "values", "owners")
_MODES = ((_ARRAYS[:2], None), (_ARRAYS[2:], "r"))  # what grows with the shingles is mapped


class Index:
    """An inverted index of shingle sets, for an exact and exhaustive search: no signature, no band, no chance.

    It makes sure that training holds no near copy of a validation document,
    and it measures what the search by signature left behind. It takes 12 bytes
    for each shingle of the sets in it, mapped when it is loaded; what is
    compared is streamed.
    """

    def __init__(self, numbers: Sequence[int] | np.ndarray, sets: Sequence[np.ndarray]) -> None:
        sizes = np.array([len(item) for item in sets], np.int64)
        values = concatenated(sets, np.uint64)
        owners = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        order = np.argsort(values, kind="stable")
        self._use(np.asarray(numbers, np.int64), sizes, values[order], owners[order])

    def _use(self, numbers: np.ndarray, sizes: np.ndarray, values: np.ndarray, owners: np.ndarray) -> None:
        self.numbers, self._sizes, self._values, self._owners = numbers, sizes, values, owners
        # Most shingles are not in the index. A table over their leading bits, small enough for the cache, shows it fast.
        self._filter = np.zeros(1 << _FILTER_BITS, bool)
        for start in range(0, len(values), 1 << 20):
            self._filter[values[start : start + (1 << 20)] >> _FILTER_SHIFT] = True

    def save(self, folder: Path) -> None:
        for name, values in zip(_ARRAYS, (self.numbers, self._sizes, self._values, self._owners), strict=True):
            np.save(folder / f"{name}.npy", values)

    @classmethod
    def load(cls, folder: Path) -> Index:
        index = cls.__new__(cls)
        small, large = ((np.load(folder / f"{name}.npy", mmap_mode=mode) for name in names) for names, mode in _MODES)
        index._use(*small, *large)
        return index

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

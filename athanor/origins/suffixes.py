"""Suffix arrays over token ids: the places of a text in the order of what begins there, and search in them.

Built by prefix doubling (Manber and Myers 1993), where only places whose order is still open are sorted again (Larsson
and Sadakane 2007). Training data is searched like this in infini-gram (Liu et al. 2024, arXiv:2401.17377).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

END, BEYOND = -2, -1  # the end of a query, and what stands after a text: both below every id, the end lowest
ABOVE = np.iinfo(np.int64).max  # as a query's end: above every id
_CHUNK = 16  # tokens compared at once


def suffix_array(ids: np.ndarray) -> np.ndarray:
    """uint32 [n]: the places of `ids`, each a token, in the order of the texts that begin there; n from 1 to 2^31.

    Memory: about 50 bytes for each token.
    """
    n = len(ids)
    width = int(int(ids.max()) + 1).bit_length()
    depth = 63 // width  # tokens that fit one key
    padded = np.zeros(n + depth, np.int64)
    padded[:n] = ids
    padded[:n] += 1
    key = padded[:n].copy()
    for k in range(1, depth):
        key <<= width
        key |= padded[k : k + n]
    del padded
    order = np.argsort(key)
    rank = np.empty(n, np.int64)  # of each place: the number of the first place in `order` whose key is equal
    open_places = _settle(order, np.arange(n), key[order], rank)
    del key
    while len(open_places):
        starts = order[open_places]
        # The rank of what begins `depth` tokens later orders those that are equal so far.
        later = starts + depth
        second = np.where(later < n, rank[np.minimum(later, n - 1)] + 1, 0)
        key = rank[starts] * (n + 1) + second
        again = np.argsort(key)
        order[open_places] = starts[again]
        open_places = _settle(order, open_places, key[again], rank)
        depth *= 2
    return order.astype(np.uint32)


def _settle(order: np.ndarray, places: np.ndarray, keys: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Give the suffixes at these places of `order` the rank of the first with an equal key; returns the places still shared."""
    first = np.empty(len(keys), bool)
    first[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    rank[order[places]] = places[np.maximum.accumulate(np.where(first, np.arange(len(keys)), 0))]
    alone = first.copy()
    alone[:-1] &= first[1:]
    return places[~alone]


class Block(NamedTuple):
    """Token ids and their suffix array, memory-mapped."""

    ids: np.ndarray
    order: np.ndarray

    def longest(self, query: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """For each start in the query, how many tokens from there on stand somewhere in the text; int64 like `starts`.

        `query` is int64 and ends with END.
        """
        place = self._lower(query, starts)
        neighbours = (np.maximum(place - 1, 0), np.minimum(place, len(self.ids) - 1))
        return np.maximum(*(self._common(self.order[n].astype(np.int64), query, starts) for n in neighbours))

    def ranges(self, patterns: list[np.ndarray]) -> np.ndarray:
        """int64 [patterns, 2]: where in `order` the places begin and end at which each pattern stands."""
        parts = [np.append(pattern, end) for pattern in patterns for end in (END, ABOVE)]
        starts = np.cumsum([0, *[len(part) for part in parts[:-1]]])
        return self._lower(np.concatenate(parts).astype(np.int64), starts).reshape(-1, 2)

    def _lower(self, query: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """For each start, how many suffixes of the text are below the query from there on."""
        low, high = np.zeros(len(starts), np.int64), np.full(len(starts), len(self.ids), np.int64)
        while (low < high).any():
            middle = np.minimum((low + high) // 2, len(self.ids) - 1)
            place = self.order[middle].astype(np.int64)
            equal = self._common(place, query, starts)
            below = self._at(place + equal) < query[starts + equal]
            low, high = np.where(below & (low < high), middle + 1, low), np.where(below, high, np.minimum(high, middle))
        return low

    def _common(self, places: np.ndarray, query: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """How many tokens from each place of the text on equal those of the query from the start on."""
        length, rows, steps = np.zeros(len(places), np.int64), np.arange(len(places)), np.arange(_CHUNK)
        while len(rows):
            here = length[rows, None] + steps
            asked = query[np.minimum(starts[rows, None] + here, len(query) - 1)]
            differs = self._at(places[rows, None] + here) != asked
            found = differs.any(axis=1)
            length[rows] += np.where(found, differs.argmax(axis=1), _CHUNK)
            rows = rows[~found]
        return length

    def _at(self, places: np.ndarray) -> np.ndarray:
        inside = self.ids[np.minimum(places, len(self.ids) - 1)].astype(np.int64)
        return np.where(places < len(self.ids), inside, BEYOND)

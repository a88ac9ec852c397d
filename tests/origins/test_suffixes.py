"""Suffix arrays and search in them, beside what plain Python says."""

from __future__ import annotations

import numpy as np
import pytest

from athanor.origins.suffixes import END, Block, suffix_array

TEXTS = {
    "random": np.random.Generator(np.random.PCG64(1)).integers(0, 5, 400),
    "one id": np.zeros(70, np.int64),  # every suffix is the beginning of another
    "periodic": np.tile([3, 1, 2], 50),
    "copied": np.tile(np.random.Generator(np.random.PCG64(2)).integers(0, 60_000, 90), 3),
    "large ids": np.random.Generator(np.random.PCG64(3)).integers(2**31 - 4, 2**31 - 1, 60),
    "one token": np.array([7]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_places_are_in_the_order_of_what_begins_there(name: str) -> None:
    ids = TEXTS[name]
    assert suffix_array(ids).tolist() == sorted(range(len(ids)), key=lambda place: ids[place:].tolist())


def occurrences(ids: list[int], pattern: list[int]) -> list[int]:
    return [at for at in range(len(ids) - len(pattern) + 1) if ids[at : at + len(pattern)] == pattern]


@pytest.mark.parametrize("name", TEXTS)
def test_search_finds_the_longest_match_of_each_start_and_every_place_of_a_pattern(name: str) -> None:
    ids = TEXTS[name].astype(np.uint32)
    block, known = Block(ids, suffix_array(ids)), ids.tolist()
    query = [*known[:20], 999, *known[-25:], *known[2:30]]
    longest = block.longest(np.array([*query, END]), np.arange(len(query))).tolist()
    for start, length in enumerate(longest):
        ahead = query[start : start + length + 1]
        assert length == 0 or occurrences(known, ahead[:length]), start
        assert len(ahead) == length or not occurrences(known, ahead), start  # the text ends, or it is no longer one
    patterns = [known[:3], known[-2:], [999], known, [*known, 0]]
    for pattern, (low, high) in zip(
        patterns, block.ranges([np.array(each) for each in patterns]).tolist(), strict=True
    ):
        assert sorted(block.order[low:high].tolist()) == occurrences(known, pattern)

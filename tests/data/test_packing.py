from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from athanor.data.packing import fit_turns, pack


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_every_piece_is_in_one_row_and_no_row_overflows(lengths):
    rows = pack(lengths, 64, seed=1)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in row) <= 64 for row in rows)


def test_best_fit_leaves_little_room():
    lengths = [1 + (i * 37) % 100 for i in range(2000)]
    rows = pack(lengths, 257, seed=1)
    assert 1 - sum(lengths) / (len(rows) * 257) < 0.01


def test_fullest_row_that_fits_is_taken():
    rows = pack([60, 50, 40, 50], 100, seed=1)
    assert sorted(sorted(row) for row in rows) == [[0, 2], [1, 3]]


def test_order_of_equals_depends_on_the_seed_only():
    lengths = [10] * 100
    assert pack(lengths, 50, 1) == pack(lengths, 50, 1) != pack(lengths, 50, 2)


def test_a_piece_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="piece 1 has 11 tokens"):
        pack([3, 11], 10, seed=1)


def test_truncation_falls_after_an_assistant_turn():
    mask = [0, 0, 1, 1, 0, 0, 1, 0, 1, 1]
    assert [fit_turns(mask, capacity) for capacity in (10, 9, 7, 6, 4, 3, 0)] == [10, 7, 7, 4, 4, 0, 0]
    assert fit_turns([0, 0, 1, 1, 0, 0], 5) == 4

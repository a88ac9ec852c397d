from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from athanor.data.rows import fit_turns, pack


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


CAPACITY = 257


def padding(lengths: list[int], rows: list[list[int]], capacity: int = CAPACITY) -> float:
    return 1 - sum(lengths) / (len(rows) * capacity)


@st.composite
def length_lists(draw):
    """Lengths of long and short tails, of one value, of two, and of anything."""
    count = draw(st.integers(1, 300))
    rng = random.Random(draw(st.integers(0, 10**6)))
    shape = draw(st.sampled_from(("any", "tail", "equal", "two")))
    if shape == "any":
        return [rng.randint(1, CAPACITY) for _ in range(count)]
    if shape == "tail":
        return [min(CAPACITY, 1 + int(rng.paretovariate(1.1) * 8)) for _ in range(count)]
    values = [rng.randint(1, CAPACITY) for _ in range(1 if shape == "equal" else 2)]
    return [rng.choice(values) for _ in range(count)]


@settings(max_examples=150, deadline=None)
@given(length_lists(), st.integers(0, 1000))
def test_packing_of_any_lengths(lengths, seed):
    rows = pack(lengths, CAPACITY, seed)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    sums = sorted(sum(lengths[number] for number in row) for row in rows)
    assert 0 < sums[0] and sums[-1] <= CAPACITY
    # No two rows fit into one, whatever the lengths: padding never passes a half, one last row apart.
    assert len(rows) == 1 or sums[0] + sums[1] > CAPACITY
    # `fewest` is a bound below; best fit decreasing stays within 3/2 of it where every length is the worst one.
    fewest = max(-(-sum(lengths) // CAPACITY), sum(length > CAPACITY / 2 for length in lengths))
    assert len(rows) <= max(fewest, 1) * 3 / 2 + 1
    assert pack(lengths, CAPACITY, seed) == rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: 10 + int(rng.lognormvariate(3.6, 0.7)),  # short answers
        lambda rng: 8 + int(rng.paretovariate(1.2) * 12),  # a long tail, cut at the row
        lambda rng: rng.choice((30, 34, 41, 250)),  # few templates, some that fill a row
        lambda rng: rng.randint(9, CAPACITY),
        lambda rng: CAPACITY if rng.random() < 0.7 else rng.randint(9, 60),  # most are truncated
    ],
    ids=["lognormal", "tail", "templates", "uniform", "full"],
)
def test_padding_stays_under_the_gate_for_lengths_as_they_come(draw, seed):
    rng = random.Random(seed)
    lengths = [min(CAPACITY, draw(rng)) for _ in range(3000)]
    assert padding(lengths, pack(lengths, CAPACITY, seed)) < 0.05


def test_a_million_pieces_take_seconds():
    """Time grows as n log n: no search through the rows. Ratios, so that a slow machine passes too."""
    rng = random.Random(1)
    lengths = [min(2049, 10 + int(rng.lognormvariate(5, 1))) for _ in range(1_000_000)]
    times = {}
    for count in (100_000, 1_000_000):
        start = time.process_time()
        rows = pack(lengths[:count], 2049, 1)
        times[count] = time.process_time() - start
    assert padding(lengths, rows, 2049) < 0.01
    assert times[1_000_000] < 40 * times[100_000]

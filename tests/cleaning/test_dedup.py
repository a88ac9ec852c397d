"""Duplicates are decided by rank and without chains; test_dedup_quality.py measures how many are found."""

from __future__ import annotations

import random

import numpy as np

from athanor.cleaning import dedup, minhash
from athanor.words.words import Words, shingles, splitmix64, tokenise


def words_at_random(rng: random.Random, count: int) -> list[str]:
    return [f"w{rng.randrange(20000)}" for _ in range(count)]


def edited(words: list[str], share: float, rng: random.Random) -> list[str]:
    words = list(words)
    for place in range(len(words)):
        if rng.random() < share:
            words[place] = f"new{rng.randrange(10**9)}"
    return words


def prepare(texts: list[str]):
    sketch = minhash.signatures(shingles(tokenise(texts).words, minhash.SHINGLE_WORDS))
    return sketch, [chosen for _, chosen in dedup.shingle_sets(enumerate(texts))]


def test_no_chains():
    """A resembles B and B resembles C, but A and C differ: C stays, since B is gone."""
    rng = random.Random(4)
    a = words_at_random(rng, 300)
    b = a[:14] + words_at_random(rng, 14) + a[28:]
    c = b[:-20] + words_at_random(rng, 20)
    sketch, sets = prepare([" ".join(words) for words in (a, b, c)])
    assert minhash.jaccard(sets[0], sets[1]) > 0.8 < minhash.jaccard(sets[1], sets[2])
    assert minhash.jaccard(sets[0], sets[2]) < 0.8
    assert dedup.near_duplicates(sketch, [0, 1, 2], sets.__getitem__, 0.8) == {1: 0}
    assert set(dedup.near_duplicates(sketch, [1, 0, 2], sets.__getitem__, 0.8)) == {0, 2}


def test_short_and_empty_texts():
    texts = ["", "", "one two", "One, two.", "two one", "???", "!!!", "a b c d", "a b c e"]
    sketch, sets = prepare(texts)
    assert dedup.near_duplicates(sketch, range(len(texts)), sets.__getitem__, 0.8) == {3: 2}


def test_exact_duplicates_keep_the_first_in_rank():
    ids = np.array([(1, 7), (1, 8), (1, 7), (1, 7), (2, 7)], np.uint64)
    repeats, kept = dedup.exact_duplicates(ids, np.array([2, 0, 1, 3, 4]))
    assert dict(zip(repeats.tolist(), kept.tolist(), strict=True)) == {0: 2, 3: 2}
    assert [len(part) for part in dedup.exact_duplicates(ids, np.zeros(0, np.int64))] == [0, 0]


def test_the_exhaustive_search_agrees_with_plain_comparison():
    rng = random.Random(6)
    base = [words_at_random(rng, 60) for _ in range(15)]
    texts = [" ".join(edited(rng.choice(base), rng.choice([0.0, 0.01, 0.03, 0.08]), rng)) for _ in range(80)]
    texts += ["", "a b"]
    _, sets = prepare(texts)
    queries, others = list(range(0, 40)), list(range(20, len(texts)))
    expected = {}
    for other in others:
        close = [q for q in queries if q != other and minhash.jaccard(sets[q], sets[other]) >= 0.8]
        if close:
            expected[other] = close[0]
    assert len(expected) > 10
    assert dedup.Index(queries, [sets[q] for q in queries]).find(((o, sets[o]) for o in others), 0.8) == expected


def test_many_documents_of_one_template_are_settled_quickly():
    """A bucket full of documents that are alike but below the threshold must not mean a comparison of all pairs."""
    rng = random.Random(7)
    frame = words_at_random(rng, 100)
    texts = [" ".join(frame + words_at_random(rng, 60)) for _ in range(400)]
    sketch, sets = prepare(texts)
    compared = []

    def shingles_of(number: int) -> np.ndarray:
        compared.append(number)
        return sets[number]

    assert dedup.near_duplicates(sketch, range(len(texts)), shingles_of, 0.8) == {}
    assert len(compared) < 400 * 20


def test_blocks_change_nothing(monkeypatch):
    rng = np.random.default_rng(1)
    sizes = [0, 1, 5, 0, 300, 2000, 3, 0, *rng.integers(0, 400, 60).tolist(), 0]
    texts = Words(splitmix64(5, sum(sizes)), np.concatenate([[0], np.cumsum(sizes)]))
    whole = minhash.signatures(texts)
    for block in (1, 64, 1000):
        monkeypatch.setattr(minhash, "_BLOCK_SHINGLES", block)
        assert np.array_equal(minhash.signatures(texts), whole)
    assert (minhash._A % 2 == 1).all()  # odd factors modulo 2^32 are one to one
    values = (texts.hashes >> np.uint64(32)).astype(np.uint32)
    for number in (4, 20):
        mine = values[texts.offsets[number] : texts.offsets[number + 1]]
        rows = zip(minhash._A[:5].tolist(), minhash._B[:5].tolist(), strict=True)
        expected = [min((a * v + b) % 2**32 for v in mine.tolist()) for a, b in rows]
        assert whole[number, :5].tolist() == expected


def test_no_text_and_empty_texts():
    assert minhash.signatures(shingles(tokenise([]).words, 5)).shape == (0, minhash.PERMUTATIONS)
    empty = minhash.signatures(shingles(tokenise(["", " ", "..."]).words, 5))
    assert empty.shape == (3, minhash.PERMUTATIONS) and (empty == 0xFFFFFFFF).all()


def test_the_definition_does_not_drift():
    # Any change here changes which documents count as duplicates.
    found = minhash.signatures(shingles(tokenise(["one two three four five six seven"]).words, 5))[0]
    assert found[:3].tolist() == SIGNATURE and found.shape == (minhash.BANDS * minhash.ROWS,)
    assert hex(minhash.band_keys(found[None])[0, 0]) == KEY


def test_bands_differ_although_their_rows_agree():
    keys = minhash.band_keys(np.full((1, minhash.PERMUTATIONS), 5, np.uint32))
    assert len(np.unique(keys)) == minhash.BANDS


SIGNATURE = [2737468536, 1999123661, 376912590]
KEY = "0xe34e7e5f91eed3e4"

"""Duplicates are decided by rank and without chains; test_dedup_quality.py measures how many are found."""

from __future__ import annotations

import random

import numpy as np
import pytest

from athanor.cleaning import dedup, minhash, near
from athanor.words.words import Words, shingles, splitmix64, tokenise


def words_at_random(rng: random.Random, count: int) -> list[str]:
    return [f"w{rng.randrange(20000)}" for _ in range(count)]


def edited(words: list[str], share: float, rng: random.Random) -> list[str]:
    words = list(words)
    for place in range(len(words)):
        if rng.random() < share:
            words[place] = f"new{rng.randrange(10**9)}"
    return words


def set_of(text: str) -> np.ndarray:
    return next(dedup.shingle_sets([(0, text)]))[1]


def plainly(texts: list[str], threshold: float) -> dict[int, int]:
    """In the order of rank each text that nearly repeats a kept one with which it shares a band, and the first such."""
    sketch = minhash.signatures(shingles(tokenise(texts).words, minhash.SHINGLE_WORDS))
    keys, sets = minhash.band_keys(sketch), list(map(set_of, texts))
    kept, repeats = [], {}
    for number in range(len(texts)):
        if not len(sets[number]):
            continue
        rivals = [r for r in kept if (keys[r] == keys[number]).any()]
        twin = next((r for r in rivals if minhash.jaccard(sets[r], sets[number]) >= threshold), None)
        if twin is None:
            kept.append(number)
        else:
            repeats[number] = twin
    return repeats


def test_no_chains():
    """A resembles B and B resembles C, but A and C differ: C stays, since B is gone."""
    rng = random.Random(4)
    a = words_at_random(rng, 300)
    b = a[:14] + words_at_random(rng, 14) + a[28:]
    c = b[:-20] + words_at_random(rng, 20)
    first, second, third = (" ".join(words) for words in (a, b, c))
    assert minhash.jaccard(set_of(first), set_of(second)) > 0.8 < minhash.jaccard(set_of(second), set_of(third))
    assert minhash.jaccard(set_of(first), set_of(third)) < 0.8
    assert near.repeating([first, second, third], 0.8) == {1: 0}
    assert near.repeating([second, first, third], 0.8) == {1: 0, 2: 0}


def test_short_and_empty_texts():
    assert near.repeating([], 0.8) == {}
    texts = ["", "", "one two", "One, two.", "two one", "???", "!!!", "a b c d", "a b c e"]
    assert near.repeating(texts, 0.8) == {3: 2}


@pytest.mark.parametrize("block", [1, 2, near.BLOCK])
@pytest.mark.parametrize("part", [10, near.PART_KEYS])
def test_the_search_in_parts_decides_as_one_pass_in_order_of_rank(block, part, monkeypatch):
    """Large clusters, and chains in which each text resembles the one before: some wait for others, in several rounds."""
    rng = random.Random(block + part)
    texts = [" ".join(words_at_random(rng, 60)) for _ in range(20)]
    for _ in range(6):
        words = words_at_random(rng, 80)
        for _ in range(25):
            words = edited(words, 0.02, rng)
            texts.append(" ".join(words))
    rng.shuffle(texts)
    expected = plainly(texts, 0.8)
    assert len(expected) > 60
    monkeypatch.setattr(near, "BLOCK", block)
    monkeypatch.setattr(near, "LATER_BLOCK", 3 * block)
    monkeypatch.setattr(near, "PART_KEYS", part)
    monkeypatch.setattr(near, "CHUNK_SHINGLES", 500)
    assert near.repeating(texts, 0.8).keys() == expected.keys()


def test_the_exhaustive_search_agrees_with_plain_comparison(tmp_path):
    rng = random.Random(6)
    base = [words_at_random(rng, 60) for _ in range(15)]
    texts = [" ".join(edited(rng.choice(base), rng.choice([0.0, 0.01, 0.03, 0.08]), rng)) for _ in range(80)]
    texts += ["", "a b"]
    sets = list(map(set_of, texts))
    queries, others = list(range(0, 40)), list(range(20, len(texts)))
    expected = {}
    for other in others:
        close = [q for q in queries if q != other and minhash.jaccard(sets[q], sets[other]) >= 0.8]
        if close:
            expected[other] = close[0]
    assert len(expected) > 10
    dedup.Index(queries, [sets[q] for q in queries]).save(tmp_path)
    assert dedup.Index.load(tmp_path).find(((o, sets[o]) for o in others), 0.8) == expected


def test_many_documents_of_one_template_are_settled_quickly(monkeypatch):
    """A bucket full of documents that are alike but below the threshold must not mean a comparison of all pairs."""
    rng = random.Random(7)
    frame = words_at_random(rng, 100)
    texts = [" ".join(frame + words_at_random(rng, 60)) for _ in range(400)]
    compared, whole = [], minhash.jaccard
    monkeypatch.setattr(minhash, "jaccard", lambda *sets: compared.append(1) or whole(*sets))
    assert near.repeating(texts, 0.8) == {}
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

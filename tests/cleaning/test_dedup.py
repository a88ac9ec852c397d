"""MinHash estimates are right, planted duplicates are found, and order does not matter."""

from __future__ import annotations

import random

import numpy as np

from athanor.cleaning import dedup, minhash
from athanor.words.words import Words, shingles, stream, tokenise


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


def test_the_permutations_are_permutations():
    """Odd factors modulo 2^32 are one to one, and uint32 arithmetic is exactly that modulus."""
    values = np.array([0, 1, 2**31, 2**32 - 1, 123456789], np.uint32)
    for a, b in zip(minhash._A[:20], minhash._B[:20], strict=True):
        exact = [(int(a) * int(value) + int(b)) % 2**32 for value in values]
        assert (values * a + b).tolist() == exact and int(a) % 2 == 1
    assert len(set(minhash._A.tolist())) == len(set(minhash._B.tolist())) == minhash.PERMUTATIONS


def test_the_estimate_is_unbiased():
    """Sets of known similarity: the mean error over 200 pairs stays within three standard errors."""
    for similarity in (0.3, 0.5, 0.8, 0.9):
        size = 400
        shared = round(2 * size * similarity / (1 + similarity))
        errors = []
        for pair in range(200):
            fresh = stream(1000 * pair + int(similarity * 100), 2 * size - shared)
            first, second = fresh[:size], np.concatenate([fresh[:shared], fresh[size:]])
            both = minhash.signatures(Words(np.concatenate([first, second]), np.array([0, size, 2 * size])))
            exact = minhash.jaccard(np.unique(first), np.unique(second))
            errors.append(minhash.agreement(both[0], both[1:])[0] - exact)
        spread = (similarity * (1 - similarity) / minhash.PERMUTATIONS / len(errors)) ** 0.5
        assert abs(np.mean(errors)) < 3 * spread
        assert 0.7 < np.std(errors) / (similarity * (1 - similarity) / minhash.PERMUTATIONS) ** 0.5 < 1.3


def test_planted_near_duplicates_are_found_and_nothing_else():
    rng = random.Random(3)
    texts, planted = [], []
    for _ in range(300):
        base = words_at_random(rng, rng.randrange(30, 400))
        texts.append(" ".join(base))
        copy = edited(base, rng.choice([0.0, 0.005, 0.01, 0.02, 0.05, 0.1]), rng)
        texts.append(" ".join(copy))
    sketch, sets = prepare(texts)
    for number in range(0, len(texts), 2):
        planted.append(minhash.jaccard(sets[number], sets[number + 1]))
    found = dedup.near_duplicates(sketch, range(len(texts)), sets.__getitem__, 0.8)
    assert all(number - 1 == other and number % 2 for number, other in found.items())
    for pair, similarity in enumerate(planted):
        assert (pair * 2 + 1 in found) <= (similarity >= 0.8)
    high = [pair for pair, similarity in enumerate(planted) if similarity >= 0.9]
    low = [pair for pair, similarity in enumerate(planted) if similarity >= 0.8]
    assert len(high) > 50 and sum(pair * 2 + 1 in found for pair in high) / len(high) >= 0.99
    assert len(low) > len(high) and sum(pair * 2 + 1 in found for pair in low) / len(low) >= 0.95


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

"""Repetition measures agree with a plain count, in and between texts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from athanor.quality import repetition
from athanor.words.words import tokenise

SIZES = (2, 3, 4, 5, 10)


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("times", [2, 31, 32])
def test_consecutive_repeats_are_counted(size, times):
    gram = [f"w{n}" for n in range(size)]
    texts = ["x y z", " ".join(gram * times), "", " ".join(["a", "b", *gram * times, *gram[: size - 1], "c"]), "w0"]
    assert repetition.consecutive_repeats(tokenise(texts).words).tolist() == [1, times, 0, times, 1]


def test_repeats_do_not_run_from_one_text_into_the_next():
    assert repetition.consecutive_repeats(tokenise(["a a a", "a a a a", "a"]).words).tolist() == [3, 4, 1]


def counted(words: list[str], size: int) -> tuple[float, float]:
    """(share of words in a repeated n-gram, share of words of the most frequent one) by a plain count."""
    seen: dict[tuple[str, ...], int] = {}
    covered: set[int] = set()
    for start in range(len(words) - size + 1):
        gram = tuple(words[start : start + size])
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] > 1:
            covered.update(range(start, start + size))
    most = max(seen.values(), default=0)
    total = max(len(words), 1)
    return len(covered) / total, min((most if most >= 3 else 0) * size / total, 1.0)


@pytest.mark.parametrize("seed", range(30))
def test_shares_agree_with_a_plain_count(seed):
    """Few different words and many short texts: repeats of every size, also across the borders of texts."""
    rng = random.Random(seed)
    alphabet = "abcdef"[: rng.randint(1, 6)]
    texts = [" ".join(rng.choices(alphabet, k=rng.randrange(0, 60))) for _ in range(rng.randint(1, 20))]
    repeats = repetition.Repeats(tokenise(texts).words)
    for size in SIZES:
        repeats.grow(size)
        expected = [counted(text.split(), size) for text in texts]
        assert np.allclose(repeats.duplicate_share(), [share for share, _ in expected])
        assert np.allclose(repeats.top_share(), [share for _, share in expected])


def test_an_ngram_grows_to_at_most_its_double():
    repeats = repetition.Repeats(tokenise(["a b a b"]).words)
    with pytest.raises(ValueError, match="3-grams"):
        repeats.grow(3)


def test_keys_that_agree_in_their_high_bits_are_still_grouped():
    """The fast sort cannot tell them apart, so the exact one takes over."""
    keys = np.array([5, 6, 5, 7, 6, 5], np.uint64) + np.uint64(1 << 60)
    order = repetition._grouped(keys)
    assert keys[order].tolist() == sorted(keys.tolist()) and order.tolist() == [0, 2, 5, 1, 4, 3]
    many = np.random.default_rng(1).integers(0, 300, 1000).astype(np.uint64) << np.uint64(40)
    assert np.array_equal(repetition._grouped(many), np.argsort(many, kind="stable"))

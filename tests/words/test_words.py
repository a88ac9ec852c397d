"""The vectorised tokeniser finds the words the pattern defines, whatever the batch."""

from __future__ import annotations

import operator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from athanor.words import words
from athanor.words.words import ngrams, shingles, tokenise, word_hashes, words_of

ODDITIES = list(" \t\n_-.,'AZaz09éÉß×−„“”’…\u00a0\u3000\u2028·中文")
TRICKY = st.sampled_from([*ODDITIES, "", "don't", "x" * 5000])
TEXTS = st.lists(st.one_of(TRICKY, st.characters(exclude_categories=["Cs"])), max_size=30).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=5))
def test_hashes_are_those_of_the_words_of_the_pattern(texts):
    found = tokenise(texts).words
    assert len(found) == len(texts)
    for number, text in enumerate(texts):
        expected = words_of(text)
        assert found.of(number).tolist() == (word_hashes(expected).tolist() if expected else [])


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_a_text_has_the_same_hashes_in_any_batch(texts):
    batch = tokenise(texts)
    for number, text in enumerate(texts):
        alone = tokenise([text])
        assert np.array_equal(batch.words.of(number), alone.words.of(0))
        assert np.array_equal(batch.units.of(number), alone.units.of(0))
        assert batch.mean_word_bytes[number] == alone.mean_word_bytes[0]


def test_the_definition_does_not_drift():
    # Any change here changes which documents count as duplicates: bump the artifact version.
    assert [hex(value) for value in word_hashes(["a", "athanor", "naïve"])] == DEFINITION


DEFINITION = ["0xc6e5a397ce9b81f4", "0x9e751d02013bd928", "0xd39b608b324035ca"]


def test_different_words_have_different_hashes():
    made = [f"{a}{b}{c}" for a in "abcdefghij" for b in "0123456789" for c in "klmnopqrst"]
    made += [word * 2 for word in made] + ["x" * n for n in range(1, 300)]
    assert len(set(word_hashes(made).tolist())) == len(set(made))


def test_ngrams_stay_inside_their_text():
    found = tokenise(["one two three", "", "four", "one two three four"]).words
    grams = ngrams(found, 3)
    assert grams.counts.tolist() == [1, 0, 0, 2]
    assert grams.of(0)[0] == grams.of(3)[0] != grams.of(3)[1]
    assert len(set(ngrams(tokenise(["a b c d", "b a c d", "a b d c"]).words, 4).hashes.tolist())) == 3


def test_short_texts_have_one_shingle():
    found = shingles(tokenise(["", "one", "one two", "two one", "a b c d e", "a b c d e f", "ONE, two!"]).words, 5)
    assert found.counts.tolist() == [0, 1, 1, 1, 1, 2, 1]
    assert found.of(2)[0] == found.of(6)[0] != found.of(3)[0]


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXTS, max_size=8), st.integers(1, 60))
def test_blocks_change_nothing(texts, block_bytes):
    whole = tokenise(texts)
    size, words.BLOCK_BYTES = words.BLOCK_BYTES, block_bytes
    try:
        parts = tokenise(texts)
    finally:
        words.BLOCK_BYTES = size
    for name in ("words.hashes", "words.offsets", "units.hashes", "units.offsets", "numeric", "mean_word_bytes"):
        assert np.array_equal(*map(operator.attrgetter(name), (parts, whole))), name


def test_a_text_longer_than_any_block():
    lead = "é " * words.BLOCK_BYTES
    long = tokenise([lead + "athanor 7 end", "athanor"])
    assert long.words.of(0)[-3] == long.words.of(1)[0] == word_hashes(["athanor"])[0]
    assert long.numeric[-4:].tolist() == [False, True, False, False]


def test_numbers_are_words_that_begin_with_a_digit():
    assert tokenise(["12 a1 1a é9 x ٣"]).numeric.tolist() == [True, False, True, False, False, False]


def test_unmix_is_the_inverse_of_mix():
    values = np.concatenate([words.splitmix64(9, 2000), np.array([0, 1, 2**63, 2**64 - 1], np.uint64)])
    assert np.array_equal(words.unmix(words.mix(values)), values)
    assert np.array_equal(words.unfinalised(words.finalised(values, 13), 13), values)


def test_rolling_sums_at_chosen_places():
    hashes = words.splitmix64(3, 50)
    places = np.array([0, 7, 37])
    assert np.array_equal(words.rolling_sums_at(hashes, places, 13), words.rolling_sums(hashes, 13)[places])
    assert len(words.rolling_sums(hashes, 51)) == 0 and len(words.rolling_sums(hashes, 50)) == 1

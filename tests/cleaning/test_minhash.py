"""Signatures do not depend on the blocks they are computed in, nor on the batch (under 1 s)."""

from __future__ import annotations

import numpy as np

from athanor.cleaning import minhash
from athanor.words.words import Words, shingles, stream, tokenise


def test_blocks_change_nothing(monkeypatch):
    rng = np.random.default_rng(1)
    sizes = [0, 1, 5, 0, 300, 2000, 3, 0, *rng.integers(0, 400, 60).tolist(), 0]
    texts = Words(stream(5, sum(sizes)), np.concatenate([[0], np.cumsum(sizes)]))
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

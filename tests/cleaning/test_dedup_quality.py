"""Recall, precision and bias of the near-duplicate search on pairs planted in real text (about 8 s)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from athanor.cleaning import minhash
from athanor.sources import python_documents, stdlib
from tools.bench_data import planted

PAIRS = 160  # for each similarity


@pytest.fixture(scope="module")
def sample():
    texts = []
    for module in stdlib.scan(stdlib.root()):
        texts += python_documents.prose_texts(module, 2500, 1000)
        texts += itertools.islice(python_documents.code_texts(module, 6000, 3000), 1)
    found = planted.plant(texts, PAIRS, seed=5)
    assert len(found[1]) == PAIRS * len(planted.TARGETS + planted.DECOYS)
    return found


def passes(report) -> bool:
    return (
        min(report["recall"]["0.95"], report["recall"]["0.9"], report["recall_from_0.9"]) >= 0.99
        and min(report["recall"].values()) >= 0.95
        and report["precision"] >= 0.95
        and abs(report["bias_sigmas"]) < 3
    )


def test_planted_duplicates_are_what_they_claim(sample):
    texts, pairs = sample
    for pair in pairs:
        assert 0 <= pair.jaccard - pair.target <= planted.TOLERANCE
    assert len({pair.base for pair in pairs} | {pair.copy for pair in pairs}) == len(texts) == 2 * len(pairs)


def test_recall_precision_and_bias(sample):
    report = planted.measure(*sample)
    assert report["pairs_due"] == {f"{target:g}": PAIRS for target in sorted(planted.TARGETS)}
    assert passes(report), report


def test_too_few_bands_are_noticed(sample, monkeypatch):
    whole = minhash.band_keys
    monkeypatch.setattr(minhash, "band_keys", lambda signatures: whole(signatures)[:, :8])
    report = planted.measure(*sample)
    assert report["recall"]["0.8"] < 0.95 and not passes(report)


def test_a_biased_estimate_is_noticed(sample, monkeypatch):
    whole = minhash.signatures

    def biased(shingles):
        found = whole(shingles)
        found[:, :12] = 7
        return found

    monkeypatch.setattr(minhash, "signatures", biased)
    report = planted.measure(*sample)
    assert report["bias_sigmas"] > 3 and not passes(report)


def test_unverified_pairs_are_noticed(sample, monkeypatch):
    monkeypatch.setattr(minhash, "jaccard", lambda first, second: 1.0)
    report = planted.measure(*sample)
    assert report["precision"] < 0.95 and not passes(report)


def test_the_probability_of_a_candidate_is_that_of_the_formula():
    """Signatures that agree in each place with a chance of J: how many share a band."""
    rng = np.random.default_rng(2)
    for similarity in (0.5, 0.7, 0.8):
        first = rng.integers(0, 2**32, (4000, minhash.PERMUTATIONS), dtype=np.uint32)
        same = rng.random(first.shape) < similarity
        second = np.where(same, first, rng.integers(0, 2**32, first.shape, dtype=np.uint32))
        shared = (minhash.band_keys(first) == minhash.band_keys(second)).any(axis=1).mean()
        chance = 1 - (1 - similarity**minhash.ROWS) ** minhash.BANDS
        assert abs(shared - chance) < 4 * (chance * (1 - chance) / len(first)) ** 0.5

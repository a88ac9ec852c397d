"""The two classifiers on disk and in use: weights as .npy, the rest as JSON; nothing is pickled.

    scorer = Scorer.load("models/classifiers")
    scores = scorer.scores(texts, words.tokenise(texts))

A weight is a whole number (stored as float32, which holds it exactly), so the
sum over a text is exact and its score the same in any batch.

What a classifier sees are hashed words and word pairs. The hashes are those of
`words.tokenise`, so that a text which was tokenised for the rules and the
near-duplicate search is not tokenised again.

A text is described by the shares of its features (counts over their number,
L1), and its margin is the mean weight of its features. So length cannot be
the signal: a text written twice has the margin of the text written once
(but for the pair at the seam). On 3,121 documents of the standard library and
of installed packages (10.7 MB, weak labels) L1 and the more common L2 norm
gave, with weights for all features and for the best C: AUROC 0.981 and 0.977, and a correlation of the
margin with the logarithm of the length of -0.08 and 0.28 (toxicity: 0.997 and
0.997, 0.00 and -0.13). Dividing by the L2 norm lets the margin grow with the
square root of the length.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.artifacts import manifest_digest, read_json, read_manifest, write_bytes, write_json
from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.quality import heuristics
from athanor.words.words import Columns, Tokens, Words, ngrams, prefix_sums

KIND, VERSION = "classifiers", 1
FILE = "classifiers.json"
NAMES = ("quality", "toxicity")
CLASSIFIER_SHARE, HEURISTICS_SHARE = 0.6, 0.4
BITS = 18
BUCKETS = 1 << BITS
SCHEME = "words.tokenise-1/uni+bigram/2^18"  # another scheme's weights mean nothing here
# Shares are about 1/1000 each; in this unit the regularisation has the size one is used to.
UNIT = 100.0
MAX_WEIGHT = 32767  # of a weight, in steps
CERTAIN = 500.0  # log odds


# The words of several texts and, apart, their pairs, with the buckets (int64) in the place of the hashes.
Features = tuple[Words, Words]


def features(tokens: Tokens) -> Features:
    words, pairs = (
        Words((source_words.hashes >> np.uint64(64 - BITS)).view(np.int64), source_words.offsets)
        for source_words in (tokens.words, ngrams(tokens.words, 2))
    )
    return words, pairs


def feature_counts(text_features: Features) -> np.ndarray:
    """int64 [texts]: how many features a text has."""
    return text_features[0].counts + text_features[1].counts


def matrix(text_features: Features) -> Any:
    """scipy CSR float64 [texts, BUCKETS]: shares in `UNIT`; a row of zeros for a text without words."""
    from scipy.sparse import csr_matrix

    counts = feature_counts(text_features)
    offsets = prefix_sums(counts)
    indices = np.empty(offsets[-1], np.int64)
    for group, shift in zip(text_features, (np.zeros_like(counts), text_features[0].counts), strict=True):
        targets = np.repeat(offsets[:-1] + shift - group.offsets[:-1], group.counts) + np.arange(len(group.hashes))
        indices[targets] = group.hashes
    values = np.repeat(UNIT / np.maximum(counts, 1), counts)
    rows = csr_matrix((values, indices, offsets), shape=(len(counts), BUCKETS))
    rows.sum_duplicates()
    return rows


@dataclass(frozen=True)
class Linear:
    """P(positive) = 1 / (1 + exp(-(scale * mean weight + bias))), calibrated on documents apart."""

    weights: np.ndarray  # int64 [BUCKETS], each of at most LARGEST
    scale: float
    bias: float

    def sums(self, text_features: Features) -> np.ndarray:
        """int64 [texts]: the sum of the weights of each text's features."""
        total = np.zeros(len(text_features[0]), np.int64)
        for group in text_features:
            total += np.diff(prefix_sums(self.weights[group.hashes])[group.offsets])
        return total

    def margins(self, text_features: Features) -> np.ndarray:
        """float64 [texts]: the log odds; the bias alone for a text without words."""
        return self.scale * (self.sums(text_features) / np.maximum(feature_counts(text_features), 1)) + self.bias

    def probabilities(self, text_features: Features) -> np.ndarray:
        return sigmoid(self.margins(text_features))

    @staticmethod
    def certain(positive: bool) -> Linear:
        """The same answer for every text, with a chance of 1: for where nothing could be learned."""
        return Linear(np.zeros(BUCKETS, np.int64), 1.0, CERTAIN if positive else -CERTAIN)

    @staticmethod
    def quantised(weights: np.ndarray, scale: float, bias: float) -> Linear:
        """From real weights [BUCKETS]; the loss of digits is below 2^-16 of the largest weight."""
        step = max(float(np.abs(weights).max()), 1e-12) / MAX_WEIGHT
        return Linear(np.rint(weights / step).astype(np.int64), scale * step, bias)


def sigmoid(margins: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(margins, -CERTAIN, CERTAIN)))


@dataclass(frozen=True)
class Scorer:
    """Scores documents; `digest` stands for everything in the folder it was loaded from."""

    quality: Linear
    toxicity: Linear
    digest: str

    @staticmethod
    def load(folder: str | Path) -> Scorer:
        folder = Path(folder)
        read_manifest(folder, KIND, VERSION)
        facts = read_json(folder / FILE)
        if facts["scheme"] != SCHEME:
            what = f"made for the features '{facts['scheme']}', this code computes '{SCHEME}'"
            raise InputError(what, where=folder / FILE, fix="run dvc repro train-classifiers")
        loaded = {name: load_linear(folder, name, facts[name]) for name in NAMES}
        return Scorer(**loaded, digest=manifest_digest(folder))

    def scores(self, texts: Sequence[str], tokens: Tokens, columns: Columns | None = None) -> dict[str, np.ndarray]:
        """float32 [texts] each, 0 to 1. `tokens` is words.tokenise(texts); `columns` are rules.measure's, if at hand.

        quality = 0.6 quality_classifier + 0.4 quality_heuristics.
        """
        text_features = features(tokens)
        classifier = self.quality.probabilities(text_features)
        heuristic_scores = heuristics.score(texts, tokens, columns)
        scores = {
            "quality": CLASSIFIER_SHARE * classifier + HEURISTICS_SHARE * heuristic_scores,
            "quality_classifier": classifier,
            "quality_heuristics": heuristic_scores,
            "toxicity": self.toxicity.probabilities(text_features),
        }
        return {name: values.astype(np.float32) for name, values in scores.items()}


def load_linear(folder: Path, name: str, facts: Mapping[str, Any]) -> Linear:
    path = folder / f"{name}.npy"
    try:
        weights = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"not readable ({error})", where=path, fix="run dvc repro train-classifiers") from None
    if weights.shape != (BUCKETS,) or weights.dtype != np.float32:
        what = f"{weights.dtype} {weights.shape}, expected float32 ({BUCKETS},)"
        raise InputError(what, where=path, fix="run dvc repro train-classifiers")
    return Linear(weights.astype(np.int64), facts["scale"], facts["bias"])


def save(folder: Path, models: Mapping[str, Linear], facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `<name>.npy` for each model and classifiers.json, with further `facts` by name of the model."""
    content: Facts = {"scheme": SCHEME, "buckets": BUCKETS}
    for name, model in models.items():
        out = io.BytesIO()
        np.save(out, model.weights.astype(np.float32), allow_pickle=False)
        write_bytes(folder / f"{name}.npy", out.getvalue())
        content[name] = {"scale": model.scale, "bias": model.bias, **facts[name]}
    content["quality_score"] = {"quality_classifier": CLASSIFIER_SHARE, "quality_heuristics": HEURISTICS_SHARE}
    content["heuristics"] = heuristics.WEIGHTS
    write_json(folder / FILE, content)

"""Fit a linear classifier: logistic regression on the shares of hashed words and pairs, calibrated apart."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from athanor.base.errors import InputError
from athanor.classifiers import weak
from athanor.classifiers.sample import CALIBRATION, TEST, TRAIN, Sample, Sampled
from athanor.quality import heuristics
from athanor.quality.model import UNIT, Linear, features, matrix, sigmoid
from athanor.text.documents import in_batches
from athanor.words.words import tokenise

BATCH_CHARS = 2_000_000
WEAK, LABELLED = "weak", "labelled"
UNSEEN, LOOPED = "unseen", "looped_phrase"  # repetition: the heuristics see it, the classifier cannot and is not fitted
# A feature of fewer examples gets no weight.
MIN_EXAMPLES = 3
# For weak labels of quality. The classifier memorises the words of its training documents as good, and then scores
# these documents above others. With 4 % of the examples as the minimum instead of 3 examples, the first percentile of
# the scores went from 0.75 to 0.47 on training documents and from 0.45 to 0.43 on held-out ones (code), and from 0.83
# to 0.67 and from 0.29 to 0.36 (prose).
WEAK_EXAMPLES_SHARE = 0.04
MIN_WORDS = 20  # less text says too little to be trained on
MIN_TESTED = 10  # fewer examples of a class to test weak labels on say nothing of what was learned
Tag = tuple[str, str, str, bool, str]  # side, source, kind, positive, what was done to it


class TooFew(InputError):
    """There are too few texts to fit, calibrate and test a classifier."""


@dataclass(frozen=True)
class Examples:
    """Feature rows with their labels, and where each comes from."""

    rows: Any  # scipy CSR [examples, BUCKETS]
    positive: np.ndarray  # bool [examples]
    side: np.ndarray  # str [examples]
    source: np.ndarray  # str [examples]
    treatment: np.ndarray  # str [examples]: "natural", "labelled" or what was done to it
    rules: np.ndarray  # float64 [examples]: the score of the heuristics
    origins: dict[str, str]  # kind -> WEAK or LABELLED
    min_share: float = 0.0  # of the examples fitted to, for a feature to get a weight

    def at(self, side: str) -> np.ndarray:
        return self.side == side

    @property
    def origin(self) -> str:
        """Where the labels are from: WEAK, LABELLED, or both."""
        return "_and_".join(sorted(set(self.origins.values())))


def taught(natural: Sequence[Sampled]) -> list[Sampled]:
    """The documents that weak labels can be made of: words of a language, or code."""
    return [item for item in natural if item.kind != "tokens"]


def quality_examples(sample: Sample, seed: int) -> Examples:
    """Labelled documents; and for every kind of text that has no labels, documents with their corruptions."""
    kinds = {item.kind for item in sample.labelled}
    natural = taught(sample.natural)
    origins = {item.kind: LABELLED if item.kind in kinds else WEAK for item in (*natural, *sample.labelled)}

    def pairs() -> Iterator[tuple[str, Tag]]:
        for item in sample.labelled:
            text = weak.window(item.text, _rng(seed, "quality", item))
            yield text, (item.side, item.source, item.kind, bool(item.positive), LABELLED)
        for item in natural:
            if item.kind not in kinds:
                rng = _rng(seed, "quality", item)
                text = weak.window(item.text, rng)
                treatment, good, bad = weak.corrupt(text, item.kind, rng)
                yield good, (item.side, item.source, item.kind, True, "natural")
                yield bad, (item.side, item.source, item.kind, False, treatment)
                if item.side == TEST:
                    yield weak.loop(text, rng), (UNSEEN, item.source, item.kind, False, LOOPED)

    examples = _examples(pairs(), origins, "quality", MIN_WORDS)
    return examples if kinds else replace(examples, min_share=WEAK_EXAMPLES_SHARE)


def toxicity_examples(natural: Sequence[Sampled], labelled: Sequence[Sampled], seed: int) -> Examples:
    """Rows of labelled files if there are any, else documents with sentences put between their lines."""

    def labelled_pairs() -> Iterator[tuple[str, Tag]]:
        for item in labelled:
            yield item.text[: weak.WINDOW_CHARS], (item.side, item.source, item.kind, bool(item.positive), LABELLED)

    def generated_pairs() -> Iterator[tuple[str, Tag]]:
        for item in taught(natural):
            rng = _rng(seed, "toxicity", item)
            text, test = weak.window(item.text, rng), item.side == TEST
            tag = (item.side, item.source, item.kind)
            yield weak.with_inserted_sentences(text, True, test, rng), (*tag, True, "abuse_inserted")
            yield weak.with_inserted_sentences(text, False, test, rng), (*tag, False, "friendly_inserted")
            yield text, (*tag, False, "natural")

    origin = LABELLED if labelled else WEAK
    kinds = {item.kind for item in (labelled or taught(natural))}
    min_words = 1 if labelled else MIN_WORDS
    return _examples(
        labelled_pairs() if labelled else generated_pairs(), dict.fromkeys(kinds, origin), "toxicity", min_words
    )


def _rng(seed: int, name: str, item: Sampled) -> random.Random:
    return random.Random(f"{name} {seed} {item.id}")


def _examples(pairs: Iterable[tuple[str, Tag]], origins: dict[str, str], name: str, min_words: int) -> Examples:
    from scipy.sparse import vstack

    blocks: list[Any] = []
    rules: list[np.ndarray] = []
    tags: list[Tag] = []
    for batch in in_batches(pairs, lambda pair: len(pair[0]), BATCH_CHARS):
        texts = [text for text, _ in batch]
        tokens = tokenise(texts)
        keep = np.flatnonzero(tokens.words.counts >= min_words)
        blocks.append(matrix(features(tokens))[keep])
        rules.append(heuristics.score(texts, tokens)[keep])
        tags += [batch[number][1] for number in keep]
    if not tags:
        what = f"no document of {min_words} words or more to train the {name} classifier on"
        raise TooFew(what, where="data/raw", fix="bring about fifty documents, or put very short ones together")
    side, source, _, positive, treatment = (np.array(column) for column in zip(*tags, strict=True))
    return Examples(vstack(blocks, format="csr"), positive, side, source, treatment, np.concatenate(rules), origins)


def fit(rows: Any, positive: np.ndarray, inverse_l2: float, min_share: float = 0.0) -> tuple[np.ndarray, float]:
    """Weights float64 [BUCKETS] and bias, by L-BFGS.

    Features of few examples get none: they tell nothing about other documents,
    and without them the fit is three times as fast.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    min_examples = max(MIN_EXAMPLES, min_share * rows.shape[0])
    feature_columns = np.flatnonzero(np.bincount(rows.indices, minlength=rows.shape[1]) >= min_examples)
    # A handful of documents that share no words: nothing is known, and the gate on AUROC says so.
    if not len(feature_columns):
        return np.zeros(rows.shape[1]), 0.0
    # Classes count alike however many examples each has.
    model = LogisticRegression(C=inverse_l2, class_weight="balanced", tol=1e-4, max_iter=200)
    # One thread: the order in which several add up depends on their number.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # after 200 steps the ranking changes no more
        model.fit(rows[:, feature_columns], positive)
    weights = np.zeros(rows.shape[1])
    weights[feature_columns] = model.coef_[0]
    return weights, float(model.intercept_[0])


def calibrate(margins: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """Slope and offset that make the margins log odds (Platt 1999, with his softened targets), by Newton's method."""
    positives, negatives = int(positive.sum()), int((~positive).sum())
    target = np.where(positive, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    weight = np.where(positive, 0.5 / max(positives, 1), 0.5 / max(negatives, 1)) * len(positive)
    slope, offset = 1.0, 0.0

    def loss(slope: float, offset: float) -> float:
        z = slope * margins + offset
        return float(np.sum(weight * (np.logaddexp(0, z) - target * z)))

    for _ in range(50):
        p = sigmoid(slope * margins + offset)
        residual, curvature = weight * (p - target), np.maximum(weight * p * (1 - p), 1e-12)
        gradient = np.array([np.sum(residual * margins), np.sum(residual)])
        cross_term = np.sum(curvature * margins)
        hessian = np.array([[np.sum(curvature * margins**2), cross_term], [cross_term, np.sum(curvature)]])
        step = np.linalg.solve(hessian + 1e-9 * np.eye(2), gradient)
        size, current_loss = 1.0, loss(slope, offset)
        while size > 1e-6 and loss(slope - size * step[0], offset - size * step[1]) > current_loss:
            size /= 2
        slope, offset = slope - size * step[0], offset - size * step[1]
        if size * np.abs(step).max() < 1e-9:
            break
    return slope, offset


def train(examples: Examples, inverse_l2: float) -> Linear:
    """Fit on one side of the examples and calibrate on another; the third is for the card."""
    fitted, calibration, test = (examples.at(side) for side in (TRAIN, CALIBRATION, TEST))
    for mask in (fitted, calibration, test):
        least = MIN_TESTED if mask is test and examples.origin == WEAK else 1
        if min(examples.positive[mask].sum(), (~examples.positive[mask]).sum()) < least:
            what = (
                f"{len(examples.side)} examples (of equal texts one counts) are too few: they are divided into three parts,"
                " to fit, to calibrate and to test, and one part has too few of one class"
            )
            fix = "bring about fifty documents or widen the labels' limits"
            raise TooFew(what, where="classifiers", fix=fix)
    weights, bias = fit(examples.rows[fitted], examples.positive[fitted], inverse_l2, examples.min_share)
    slope, offset = calibrate(examples.rows[calibration] @ weights + bias, examples.positive[calibration])
    return Linear.quantised(weights, UNIT * slope, slope * bias + offset)


def margins(model: Linear, rows: Any) -> np.ndarray:
    """float64 [examples]: the margins that the finished model gives to feature rows."""
    return model.scale * (rows @ model.weights.astype(np.float64)) / UNIT + model.bias


def other_source(examples: Examples, inverse_l2: float) -> dict[str, np.ndarray]:
    """For each source, margins on its test examples from a model that saw the other sources only."""
    margins_by_source: dict[str, np.ndarray] = {}
    for name in sorted(set(examples.source)):
        in_source = examples.source == name
        train_mask, test_mask = examples.at(TRAIN) & ~in_source, examples.at(TEST) & in_source
        if len(set(examples.positive[train_mask])) == 2 and len(set(examples.positive[test_mask])) == 2:
            weights, bias = fit(
                examples.rows[train_mask], examples.positive[train_mask], inverse_l2, examples.min_share
            )
            margins_by_source[name] = examples.rows[test_mask] @ weights + bias
    return margins_by_source

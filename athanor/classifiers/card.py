"""The card of each classifier: how well it ranks, how to read its scores, and what they correlate with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from athanor.base import templates
from athanor.base.errors import GateError
from athanor.base.work import Facts
from athanor.classifiers.sample import CALIBRATION, TEST, TRAIN, Sampled
from athanor.classifiers.train import UNSEEN, WEAK, Examples, margins
from athanor.quality.model import CLASSIFIER_SHARE, HEURISTICS_SHARE, Linear, Scorer, sigmoid
from athanor.words.words import Columns, tokenise

BINS = 10
CERTAIN_DOCUMENTS = 100  # from so many documents on a correlation is taken as it is measured
MIN_DOCUMENTS = 30  # fewer documents say too little of a correlation (standard error 0.18)
MIN_KIND_DOCUMENTS = 100
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
SCORES = {"quality": ("quality_classifier", "quality", "quality_heuristics"), "toxicity": ("toxicity",)}
GATED = ("quality_classifier", "quality", "toxicity")


ASIDE = "stepped_aside"
NO_LABELS = "no"


def stepped_aside(reason: str) -> Facts:
    """The card of a classifier that has learned nothing."""
    return {"labels": NO_LABELS, ASIDE: reason, "examples": {}}


def origin_words(origin: str) -> str:
    """The origin of labels as words that stand before "labels"."""
    return origin.replace("labelled", "given").replace("_", " ")


def auroc(margin: np.ndarray, positive: np.ndarray) -> float | None:
    """The chance that a positive ranks above a negative, ties half; None without both."""
    positives, negative_margins = np.sort(margin[positive]), np.sort(margin[~positive])
    if not len(positives) or not len(negative_margins):
        return None
    pairs_won = np.searchsorted(negative_margins, positives, "left") + np.searchsorted(
        negative_margins, positives, "right"
    )
    return float(pairs_won.sum() / (2 * len(positives) * len(negative_margins)))


def reliability(score: np.ndarray, positive: np.ndarray) -> Facts:
    """Ten bins of the score with the share of positives in each, and the mean distance of the two (ECE).

    Both classes weigh the same, as they did when the score was calibrated.
    """
    weight = np.where(positive, 0.5 / max(positive.sum(), 1), 0.5 / max((~positive).sum(), 1))
    bin_of = np.minimum((score * BINS).astype(int), BINS - 1)
    bins, error = [], 0.0
    for number in range(BINS):
        in_bin = bin_of == number
        if in_bin.any():
            mean, share = (float(np.average(values[in_bin], weights=weight[in_bin])) for values in (score, positive))
            error += float(weight[in_bin].sum()) * abs(mean - share)
            edge = number / BINS
            bins.append({"from": edge, "documents": int(in_bin.sum()), "mean_score": mean, "share_positive": share})
    return {"expected_calibration_error": error, "bins": bins}


def correlation(score: np.ndarray, chars: np.ndarray) -> float | None:
    """Pearson's r of a score with the logarithm of the length; 0 for a score that never varies, None for few texts."""
    if len(score) < MIN_DOCUMENTS:
        return None
    score, logs = score.astype(np.float64), np.log(np.maximum(chars, 1))
    if score.std() < 1e-9 or logs.std() < 1e-9:
        return 0.0
    return float(np.corrcoef(score, logs)[0, 1])


def correlation_lower_bound(correlation: float, documents: int) -> float:
    """The absolute correlation, less two standard errors for fewer than CERTAIN documents (Fisher's transformation).

    With so few, 0.53 may be chance: of 45 documents it may be 0.28 of many.
    """
    if documents >= CERTAIN_DOCUMENTS:
        return abs(correlation)
    return float(np.tanh(max(np.arctanh(min(abs(correlation), 1 - 1e-9)) - 2 / np.sqrt(documents - 3), 0.0)))


def natural_scores(scorer: Scorer, natural: Sequence[Sampled]) -> dict[str, np.ndarray]:
    """Scores of documents as they come, float32 [documents] each."""
    batches: dict[str, list[np.ndarray]] = {}
    for start in range(0, len(natural), 64):
        texts = [item.text for item in natural[start : start + 64]]
        for name, values in scorer.scores(texts, tokenise(texts)).items():
            batches.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in batches.items()}


def describe(
    name: str,
    model: Linear,
    examples: Examples,
    cross_source_margins: Columns,
    held_out: Sequence[Sampled],
    scores: Columns,
) -> Facts:
    """The card of one classifier. `held_out` are natural documents of the test side, `scores` their scores."""
    margin, test = margins(model, examples.rows), examples.at(TEST)
    positive = examples.positive
    in_source = {str(source): test & (examples.source == source) for source in sorted(set(examples.source[test]))}
    ranking: Facts = {
        "held_out": auroc(margin[test], positive[test]),
        "by_source": {source: auroc(margin[mask], positive[mask]) for source, mask in in_source.items()},
        "other_source": {
            source: auroc(values, positive[in_source[source]]) for source, values in cross_source_margins.items()
        },
    }
    combined = CLASSIFIER_SHARE * sigmoid(margin) + HEURISTICS_SHARE * examples.rules
    tested = test | examples.at(UNSEEN)
    ranking["by_negative"] = {
        negative: auroc(*with_negatives(margin, examples, negative, tested)) for negative in negatives(examples, tested)
    }
    if name == "quality":
        ranking["with_heuristics"] = auroc(combined[test], positive[test])
        ranking["with_heuristics_by_negative"] = {
            negative: auroc(*with_negatives(combined, examples, negative, tested))
            for negative in negatives(examples, tested)
        }
    chars = np.array([len(item.text) for item in held_out])
    kinds, sources = (np.array([getattr(item, attribute) for item in held_out]) for attribute in ("kind", "source"))
    length: Facts = {}
    for score in SCORES[name]:
        length[score] = {"all": correlation(scores[score], chars)}
        for kind in sorted(set(kinds)):
            if (kinds == kind).sum() >= MIN_KIND_DOCUMENTS:
                length[score][str(kind)] = correlation(scores[score][kinds == kind], chars[kinds == kind])
    counts = {side: positive[examples.at(side)] for side in (TRAIN, CALIBRATION, TEST)}
    return {
        "labels": examples.origin,
        "labels_by_kind": examples.origins,
        "examples": {
            side: {"positive": int(labels.sum()), "negative": int((~labels).sum())} for side, labels in counts.items()
        },
        "auroc": ranking,
        "calibration": reliability(sigmoid(margin[test]), positive[test]),
        "natural_documents": len(held_out),
        "length_correlation": length,
        "length_documents": {
            group: len(held_out) if group == "all" else int((kinds == group).sum()) for group in length[SCORES[name][0]]
        },
        "quantiles": {
            score: {
                str(s): {f"{q:g}": float(np.quantile(scores[score][sources == s], q)) for q in QUANTILES}
                for s in sorted(set(sources))
            }
            for score in SCORES[name]
        },
    }


def negatives(examples: Examples, tested: np.ndarray) -> list[str]:
    return sorted({str(treatment) for treatment in examples.treatment[tested & ~examples.positive]})


def with_negatives(
    margin: np.ndarray, examples: Examples, treatment: str, tested: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Margins and labels of all tested positives and of the negatives made in one way."""
    chosen = tested & (examples.positive | (examples.treatment == treatment))
    return margin[chosen], examples.positive[chosen]


def histogram(name: str, origin: str, held_out: Sequence[Sampled], scores: Columns) -> list[Facts]:
    """Shares of natural documents by tenth of the score, for each source: rows of a plot."""
    sources = np.array([item.source for item in held_out])
    rows = []
    for source in sorted(set(sources)):
        values = scores[name][sources == source]
        counts = np.bincount(np.minimum((values * BINS).astype(int), BINS - 1), minlength=BINS)
        for number, count in enumerate(counts):
            span = f"{number / BINS:.1f}-{(number + 1) / BINS:.1f}"
            label = f"{source} {span} ({origin_words(origin)} labels)"
            rows.append({"share": float(count / len(values)), "score": label})
    return rows


def check(name: str, card: Facts, min_auroc: float, max_correlation: float) -> None:
    """GateError when the classifier ranks badly, or when its score follows the length of the text."""
    held_out_auroc = card["auroc"]["held_out"]
    where = f"classifier {name} ({origin_words(card['labels'])} labels)"
    if held_out_auroc < min_auroc:
        fix = "raise classifiers.sample_bytes, give better labels, or lower classifiers.min_auroc"
        what = f"{held_out_auroc:.3f} on held-out documents, less than {min_auroc}"
        raise GateError("classifier-auroc", what, where=where, fix=fix)
    for score in (score for score in SCORES[name] if score in GATED):
        for group, value in card["length_correlation"][score].items():
            if value is not None and correlation_lower_bound(value, card["length_documents"][group]) > max_correlation:
                what = f"'{score}' of {group} documents correlates {value:.2f} with the logarithm of their length"
                fix = "take labels whose classes have documents of the same lengths, or set them to null for weak ones"
                if card["labels"] == WEAK:
                    fix = "if short texts are the worse ones in this corpus, raise classifiers.max_length_correlation"
                raise GateError("classifier-length", f"{what}, the limit is {max_correlation}", where=where, fix=fix)


def summary(facts: Facts) -> Facts:
    """The card without its tables."""
    if ASIDE in facts:
        return {ASIDE: 1, "examples": facts["examples"]}
    auroc = {name: value for name, value in facts["auroc"].items() if name != "with_heuristics_by_negative"}
    return {
        "examples": facts["examples"],
        "auroc": auroc,
        "expected_calibration_error": facts["calibration"]["expected_calibration_error"],
        "length_correlation": facts["length_correlation"],
    }


def markdown(cards: Mapping[str, Facts]) -> str:
    """The cards as a Markdown page."""
    template = templates.markdown("athanor.classifiers", "card.md.j2", said=origin_words, figure=_figure)
    return template.render(cards=cards, quantiles=QUANTILES)


def _figure(value: float | None) -> str:
    return "too few documents" if value is None else f"{value:.3f}"

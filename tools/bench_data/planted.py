"""Near duplicates of known similarity, made from real texts by word edits, and how well the search finds them.

The true similarity of a pair is the Jaccard similarity of its sets of word
5-grams, computed here from strings: neither hashes nor signatures have a part
in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from athanor.cleaning import minhash, near
from athanor.words.words import shingles, tokenise, words_of

TARGETS = (0.95, 0.9, 0.85, 0.8)
DECOYS = (0.75, 0.7)  # alike, but below the threshold: they must not be reported
TOLERANCE = 0.01  # above the target: a pair planted at the threshold has to be found
MIN_SHINGLES = 150  # below that one edit moves the similarity past the tolerance
TRIES = 60
DISTINCT = 0.4  # originals are less alike

Grams = frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class Pair:
    """Numbers of two texts, what similarity was aimed at and what it is."""

    base: int
    copy: int
    target: float
    jaccard: float


def grams_of(words: Sequence[str]) -> Grams:
    size = minhash.SHINGLE_WORDS
    return frozenset(tuple(words[place : place + size]) for place in range(len(words) - size + 1))


def jaccard_of(first: Grams, second: Grams) -> float:
    return len(first & second) / len(first | second)


def plant(texts: Iterable[str], pairs_per_target: int, seed: int) -> tuple[list[str], list[Pair]]:
    """Originals and, after them, edited copies; the targets take turns over the originals.

    Texts that are too short or resemble an earlier one are passed over.
    """
    rng, targets = random.Random(seed), TARGETS + DECOYS
    bases = distinct([text for text in texts if len(words_of(text)) >= 1.2 * MIN_SHINGLES])
    rng.shuffle(bases)
    originals, copies, pairs = [], [], []
    for text in bases:
        if len(pairs) == pairs_per_target * len(targets):
            break
        target = targets[len(pairs) % len(targets)]
        made = edited(words_of(text), target, rng)
        if made is not None:
            pairs.append((target, made[1]))
            originals.append(text)
            copies.append(made[0])
    found = [Pair(n, len(originals) + n, target, similarity) for n, (target, similarity) in enumerate(pairs)]
    return originals + copies, found


def near_duplicates(texts: Sequence[str], threshold: float) -> tuple[np.ndarray, dict[int, int]]:
    """Signatures of texts, and which text repeats which."""
    sketch = minhash.signatures(shingles(tokenise(texts).words, minhash.SHINGLE_WORDS))
    return sketch, near.repeating(texts, threshold)


def distinct(texts: list[str]) -> list[str]:
    """The texts without those that resemble an earlier one, so that planted pairs are the only pairs."""
    _, repeats = near_duplicates(texts, DISTINCT)
    return [text for number, text in enumerate(texts) if number not in repeats]


def edited(words: list[str], target: float, rng: random.Random) -> tuple[str, float] | None:
    """The words with some replaced, left out and added so that the similarity is the target's, and that similarity."""
    before = grams_of(words)
    if len(before) < MIN_SHINGLES:
        return None
    lost = len(before) * (1 - target) / (1 + target)  # 5-grams to lose, as many come anew
    for _ in range(TRIES):
        changed = list(words)
        for _ in range(max(1, round(rng.uniform(0.8, 1.3) * lost / minhash.SHINGLE_WORDS))):
            place = rng.randrange(len(changed))
            kind = rng.choice(("replace", "replace", "delete", "insert"))
            if kind == "delete":
                del changed[place]
            else:
                changed[place : place + (kind == "replace")] = [rng.choice(words)]
        similarity = jaccard_of(before, grams_of(changed))
        if 0 <= similarity - target <= TOLERANCE:
            return " ".join(changed), similarity
    return None


def measure(texts: Sequence[str], pairs: Sequence[Pair], threshold: float = 0.8) -> dict[str, Any]:
    """Recall, precision and bias of the search as the clean stage uses it.

    recall: share of the pairs at or above the threshold that are reported,
    by target and over all pairs of at least 0.9 (`recall_from_0.9`).
    precision: share of reported pairs truly at or above the threshold.
    bias: mean of estimate minus truth over all planted pairs; `bias_sigmas`
    the same in standard errors of a fair estimator.
    """
    sketch, repeats = near_duplicates(texts, threshold)
    true = [
        jaccard_of(grams_of(words_of(texts[number])), grams_of(words_of(texts[other]))) >= threshold
        for number, other in repeats.items()
    ]
    similarity = np.array([pair.jaccard for pair in pairs])
    target = np.array([pair.target for pair in pairs])
    found = np.array([repeats.get(pair.copy) == pair.base for pair in pairs])
    estimate = np.array([minhash.agreement(sketch[pair.base], sketch[[pair.copy]])[0] for pair in pairs])
    due = similarity >= threshold
    error = estimate - similarity
    variance = similarity * (1 - similarity) / minhash.PERMUTATIONS
    high = similarity >= 0.9
    return {
        "pairs": len(pairs),
        "pairs_due": {f"{t:g}": int((due & (target == t)).sum()) for t in np.unique(target[due])},
        "recall": {f"{t:g}": float(found[due & (target == t)].mean()) for t in np.unique(target[due])},
        "recall_from_0.9": float(found[high].mean()),
        "reported": len(repeats),
        "precision": float(np.mean(true)) if true else 1.0,
        "bias": float(error.mean()),
        "bias_sigmas": float(error.sum() / np.sqrt(variance.sum())),
    }

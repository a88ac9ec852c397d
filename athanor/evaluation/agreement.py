"""Our own scorer beside lm-evaluation-harness, on the same items of the local tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.evaluation.likelihood import bits_per_byte, choice_scores, rolling_logprob
from athanor.evaluation.local_tasks import DELIMITER, NEXT, TEXT
from athanor.evaluation.scoring import choose
from athanor.evaluation.standard import samples
from athanor.model.transformer import Transformer
from athanor.tokenizer.tokenizer import Tokenizer

TOLERANCE = 1e-4  # nats per choice; relative for whole texts; of every metric
FP32_SUM = 1e-6  # relative: it adds up a choice's log-probabilities in fp32


@dataclass(frozen=True)
class Agreement:
    """What both say of a task, by metric: (ours, theirs). `worst`: largest difference of an item's log-likelihood,
    in nats for choices and relative for texts; `apart`: items whose log-likelihoods differ by more than rounding;
    `verdicts`: items on whose right or wrong they differ."""

    task: str
    items: int
    metrics: dict[str, tuple[float, float]]
    worst: float
    apart: int
    verdicts: int

    @property
    def good(self) -> bool:
        close = all(abs(ours - theirs) <= TOLERANCE for ours, theirs in self.metrics.values())
        return close and self.apart == self.verdicts == 0


def compare(
    model: Transformer, tokenizer: Tokenizer, out: Path, task: str, results: dict[str, Any], threads: int = 1
) -> Agreement:
    """Score the items that lm_eval scored, from their text on."""
    rows = samples(out, task)
    theirs = {key.partition(",")[0]: value for key, value in results[task].items()}
    if task == TEXT:
        ours = [rolling_logprob(model, tokenizer, row["doc"]["text"], threads=threads) for row in rows]
        logged = [float(row["filtered_resps"][0]) for row in rows]
        differences = [abs(a - b) / abs(b) for (a, _), b in zip(ours, logged, strict=True)]
        metrics = {"bits_per_byte": (bits_per_byte(ours), theirs["bits_per_byte"])}
        return Agreement(task, len(rows), metrics, max(differences), sum(d > TOLERANCE for d in differences), 0)
    if task != NEXT:
        raise ValueError(task)
    worst, apart, verdicts, right = 0.0, 0, 0, {"acc": 0, "acc_norm": 0}
    for row in rows:
        document = row["doc"]
        scores = choice_scores(
            model, tokenizer, document["context"], document["choices"], DELIMITER, threads=threads
        )
        logged = [float(value) for value, _ in row["filtered_resps"]]
        differences = [abs(score - value) for score, value in zip(scores, logged, strict=True)]
        allowed = [TOLERANCE + FP32_SUM * abs(value) for value in logged]
        worst = max(worst, *differences)
        apart += any(found > limit for found, limit in zip(differences, allowed, strict=True))
        for metric in right:
            taken = choose(scores, document["choices"], normalised=metric == "acc_norm")  # the battery's own rule
            correct = taken == document["label"]
            verdicts += correct != bool(row[metric])
            right[metric] += correct
    metrics = {name: (count / len(rows), theirs[name]) for name, count in right.items()}
    return Agreement(task, len(rows), metrics, worst, apart, verdicts)

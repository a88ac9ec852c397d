"""Other ways to decode than greedy: the same questions, so that a loss is the decoding's fault and not the model's.

The items are of the development split: how to decode is something one chooses
by such a table, and what one chooses by is not what one reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from athanor.artifacts import digest
from athanor.corpus.conversations import Item
from athanor.evaluation.report import ALL, Answer, comparison, health, score_table

CLEAR_STDERRS = 2.0
GREEDY_NAME = "greedy"


def chosen(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """At most `count` items for development that a model answers in words, drawn by seed."""
    able = [item for item in items if item.split == "development" and item.kind != "likelihood"]
    ranked = sorted(able, key=lambda item: digest([seed, item.id]))[:count]
    return sorted(ranked, key=lambda item: (item.category, item.id))


def condition_rows(
    items: Sequence[Item], answers: Mapping[str, Sequence[Answer]], seed: int
) -> dict[str, dict[str, Any]]:
    """Per condition its score, health and the paired difference to "greedy", which must be among `answers`."""
    rows = {}
    for name, said in answers.items():
        row = score_table(items, said, seed)[ALL]
        pair = comparison(answers[GREEDY_NAME], said, seed)[ALL]
        rates = health(said)
        rows[name] = {
            **{key: row[key] for key in ("n", "correct", "score", "stderr", "low", "high")},
            "minus_greedy": {key: pair[key] for key in ("difference", "stderr", "low", "high", "wins", "losses", "p")},
            **{key: rates[key] for key in ("stop", "repetition", "fake_turn", "truncated")},
        }
    return rows


def findings(rows: Mapping[str, Mapping[str, Any]], penalties: Mapping[str, float]) -> list[str]:
    """What a penalty costs, in words, where it is clear."""
    told = []
    for name, penalty in penalties.items():
        pair = rows[name]["minus_greedy"]
        if penalty != 1 and pair["difference"] < -CLEAR_STDERRS * pair["stderr"]:
            told.append(
                f"condition {name}: a repetition penalty of {penalty:g} costs {-100 * pair['difference']:.1f} points "
                f"(± {100 * pair['stderr']:.1f}) against greedy on the same {rows[name]['n']} items"
            )
    return told

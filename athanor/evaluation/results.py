"""All figures of the battery, as they stand in the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from athanor.corpus.conversations import Item
from athanor.errors import InputError
from athanor.evaluation.report import (
    ALL, Answer, by_difficulty, comparison, contamination, gold_table, health, score_table, truncation, verbosity,
)


def battery_facts(
    items: Sequence[Item],
    answers: Mapping[str, Sequence[Answer]],
    seed: int,
    documents: Mapping[str, int],
    conversations: Mapping[str, int] | None,
    left_out: Mapping[str, int],
) -> dict[str, Any]:
    """Blocks of the metrics. Scores, comparison and bits per byte are of the test split, rates of all answers.

    `answers` holds the models in order; the comparison is of the last with the first. `left_out`: items by category
    that this machine could not score; where there are none, nothing is said, so that all other machines write the same bytes.
    """
    tables, gold, difficulty, development = {}, {}, {}, {}
    kept: dict[str, list[Answer]] = {}
    test = [item for item in items if item.split == "test"]
    if not test:
        raise InputError("no item for testing", where="data/battery", fix="lower battery.development_fraction")
    other = [item for item in items if item.split != "test"]
    for name, said in answers.items():
        ids = {item.id for item in test}
        kept[name] = [answer for answer in said if answer.item in ids]
        tables[name] = score_table(test, kept[name], seed)
        gold[name] = gold_table(kept[name])
        difficulty[name] = by_difficulty(test, kept[name], seed)
        if other:
            row = score_table(other, [answer for answer in said if answer.item not in ids], seed)[ALL]
            development[name] = {key: row[key] for key in ("n", "correct", "score", "stderr", "low", "high", "floor")}
    first, *_, last = answers
    return {
        "battery": tables,
        "development": development,
        "difficulty": difficulty,
        "gold": gold,
        "paired": {f"{last}_minus_{first}": comparison(kept[first], kept[last], seed)},
        "health": {name: health(said) for name, said in answers.items()},
        "verbosity": {name: verbosity(said) for name, said in answers.items()},
        "truncation": {name: truncation(said) for name, said in answers.items()},
        "contamination": contamination(items, documents, conversations),
        **({"left_out": dict(left_out)} if left_out else {}),
    }

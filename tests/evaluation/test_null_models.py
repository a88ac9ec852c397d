"""Models without thought through the real scoring path: what they score is what the floors say."""

from __future__ import annotations

import pytest

from athanor.corpus.conversations import Item
from athanor.corpus.exercises.build import CATEGORIES, ONLY_ASKED, battery_items
from athanor.evaluation.battery import Output, judge
from athanor.evaluation.report import score_table
from athanor.evaluation.scoring import null_answers
from athanor.params.battery import BatteryParams


@pytest.fixture(scope="module")
def items() -> list[Item]:
    counts = {name: 1 if name == "python_functions" else 12 for name in {**CATEGORIES, **ONLY_ASKED}}
    return battery_items(BatteryParams(2, 0.1, 0.25, "battery/written.jsonl", counts))


def likelihoods(strategy: str, choices: tuple[str, ...]) -> tuple[float, ...]:
    """What a model of that one idea would say of the choices."""
    return {
        "the first choice": tuple(-1.0 for _ in choices),
        "the last choice": tuple(float(place - len(choices)) for place, _ in enumerate(choices)),
        "the shortest choice": tuple(-float(len(choice)) for choice in choices),  # every character costs the same
        "the longest choice": tuple(-1.0 / len(choice) for choice in choices),
    }[strategy]


def answers(items: list[Item], strategy: str) -> dict[str, float]:
    """Category to score of a model that follows one strategy, where the strategy has something to say."""
    able = [item for item in items if strategy in null_answers(item)]
    outputs = [
        Output(log_likelihoods=likelihoods(strategy, item.choices)) if item.choices
        else Output(text=null_answers(item)[strategy])
        for item in able
    ]
    table = score_table(able, judge("null", able, outputs, workers=2), 1)
    return {category: row["score"] for category, row in table.items() if category != "all"}


def test_null_models_score_what_the_floors_say(items: list[Item]) -> None:
    strategies = sorted({name for item in items for name in null_answers(item)})
    assert len(strategies) > 15
    scores = {strategy: answers(items, strategy) for strategy in strategies}
    outputs = [Output(log_likelihoods=tuple(-1.0 for _ in item.choices)) for item in items]
    table = score_table(items, judge("silent", items, outputs, workers=2), 1)
    for category in sorted({item.category for item in items}):
        found = {strategy: by.get(category, 0.0) for strategy, by in scores.items()}
        row = table[category]
        assert max(found.values()) == row["floor"], (category, found)
        assert row["floor_answer"] == "none" or found[row["floor_answer"]] == row["floor"]
    assert table["yes_no"]["floor"] >= 0.5 > table["copying"]["floor"]


def test_an_always_equal_likelihood_takes_the_first_choice_both_ways(items: list[Item]) -> None:
    asked = [item for item in items if item.kind == "likelihood"]
    flat = judge("flat", asked, [Output(log_likelihoods=tuple(-2.0 for _ in item.choices)) for item in asked], 1)
    assert [answer.text for answer in flat] == [item.choices[0] for item in asked]
    even = [Output(log_likelihoods=tuple(-2.0 * len(choice) for choice in item.choices)) for item in asked]
    marks = [answer.correct_norm for answer in judge("even", asked, even, 1)]
    assert marks == [item.choices[0] == item.answer for item in asked]


def test_the_echo_of_the_question_passes_little(items: list[Item]) -> None:
    scores = answers(items, "the question")
    assert {category for category, score in scores.items() if score} <= {"instructions", "lookup"}  # short forms, and a table whose last number is asked for

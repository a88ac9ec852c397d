"""Models without thought through the real scoring path: what they score is what the floors say."""

from __future__ import annotations

import ast

import pytest

from athanor.corpus.conversations import Item
from athanor.corpus.exercises.build import CATEGORIES, ONLY_ASKED, battery_items
from athanor.evaluation.battery import Output, judge
from athanor.evaluation.report import score_table
from athanor.evaluation.scoring import null_answers, null_floors, score_many
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


def output(item: Item, strategy: str) -> Output:
    if item.choices:
        return Output(log_likelihoods=likelihoods(strategy, item.choices))
    if strategy.startswith("constant "):
        return Output(text=ast.literal_eval(strategy.removeprefix("constant ")))
    return Output(text=null_answers(item)[strategy])


def answers(items: list[Item], strategy: str) -> dict[str, float]:
    """Category to score of a model that follows one strategy, where the strategy has something to say."""
    able = [item for item in items if strategy in null_answers(item)]
    table = score_table(able, judge("null", able, [output(item, strategy) for item in able], workers=2), 1)
    return {category: row["score"] for category, row in table.items() if category != "all"}


def repeated(group: list[Item]) -> dict[str, float]:
    """The share right of each answer that one of the items accepts, said to all of them and scored one by one."""
    texts = dict.fromkeys(text for item in group for text in item.accepted)
    return {f"constant {text!r}": sum(score_many(group, [text] * len(group))) / len(group) for text in texts}


def test_null_models_score_what_the_floors_say(items: list[Item]) -> None:
    strategies = sorted({name for item in items for name in null_answers(item)})
    assert len(strategies) > 15
    scores = {strategy: answers(items, strategy) for strategy in strategies}
    outputs = [Output(log_likelihoods=tuple(-1.0 for _ in item.choices)) for item in items]
    table = score_table(items, judge("silent", items, outputs, workers=2), 1)
    for category in sorted({item.category for item in items}):
        found = {strategy: by.get(category, 0.0) for strategy, by in scores.items()}
        found |= repeated([item for item in items if item.category == category])
        row = table[category]
        assert max(found.values()) == row["floor"], (category, found)
        assert row["floor_answer"] == "none" or found[row["floor_answer"]] == row["floor"]
    assert table["yes_no"]["floor"] >= 0.5 > table["copying"]["floor"]


def test_the_floor_is_at_least_any_accepted_answer_repeated(items: list[Item]) -> None:
    """Also one that no fixed list holds: the name passes every question for it."""
    floors = null_floors(items)
    for category, row in floors.items():
        found = repeated([item for item in items if item.category == category])
        assert max(found.values()) <= row["floor"], category
        assert found.get(row["strategy"], row["floor"]) == row["floor"]
    assert floors["identity"]["floor"] == 1.0
    assert floors["next_number"]["floor"] > 0 and floors["memory"]["floor"] > 0


def test_one_model_that_speaks_and_compares_scores_the_floor_of_all(items: list[Item]) -> None:
    def score(strategies: list[str]) -> dict:
        outputs = [output(item, strategies[bool(item.choices)]) for item in items]
        return score_table(items, judge("null", items, outputs, workers=2), 1)["all"]

    first = score(["the last word", "the first choice"])
    assert first["floor"] >= first["score"]
    best = first["floor_answer"].split("; ")  # how it speaks, and what it takes
    assert len(best) == 2 and best[1].endswith("choice") and score(best)["score"] == first["floor"]


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

"""No cheat is paid as a right answer is: planted for every reward, kind and category. Programs run in the sandbox."""

from __future__ import annotations

from dataclasses import replace

import pytest

from athanor.base.errors import ParamsError
from athanor.evaluation.scoring import score_many
from athanor.rewards.params import GrpoDataParams, check_weights
from athanor.rewards.questions import draw_questions, with_more_tests
from athanor.rewards.rewards import Reward, Rollout, brevity_reward, format_reward, total
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises.build import CATEGORIES
from athanor.sources.exercises.exercise import TEXTS, Draw
from athanor.text.conversations import Item, Message
from tests.rewards.cheats import cheats, tables

BATTERY = BatteryParams(2, 0.1, 0.25, None, {"addition": 1})
WEIGHTS = {"correct": 1.0, "format": 0.1, "brevity": 0.2}
PLANTED = {category: 1 if category == "python_functions" else 6 for category in sorted(CATEGORIES)}
MATES = 12
each_category = pytest.mark.parametrize("category", sorted(CATEGORIES))


@pytest.fixture(scope="module")
def items() -> dict[str, list[Item]]:
    params = GrpoDataParams(1, dict.fromkeys(CATEGORIES, MATES), 0)
    drawn: dict[str, list[Item]] = {category: [] for category in CATEGORIES}
    for exercise in draw_questions(params, BATTERY)["train"]:
        drawn[exercise.item.category].append(exercise.item)
    return drawn


def honest(item: Item, text: str) -> Rollout:
    return Rollout(item, text, ended=True, fake_turn=False)


@each_category
def test_accepted_answers_are_paid_in_full_and_rejected_ones_are_not(
    items: dict[str, list[Item]], category: str
) -> None:
    accepted = [honest(item, text) for item in items[category] for text in item.accepted]
    assert {reward[:3] for reward in total(accepted, WEIGHTS)} == {(1.0, 1.0, 1.0)}
    rejected = [honest(item, text) for item in items[category] for text in item.rejected]
    assert {(reward.correct, reward.brevity) for reward in total(rejected, WEIGHTS)} == {(0.0, 0.0)}


@each_category
def test_no_cheat_is_paid(items: dict[str, list[Item]], category: str) -> None:
    planted = [
        (item, cheat) for item in items[category][: PLANTED[category]] for cheat in cheats(item, items[category])
    ]
    rewards = total([cheat.rollout(item) for item, cheat in planted], WEIGHTS)
    paid = {
        (cheat.name, cheat.text)
        for (_, cheat), reward in zip(planted, rewards, strict=True)
        if reward.correct or reward.brevity or reward.total > WEIGHTS["format"]
    }
    assert not paid and len(planted) > 100
    assert {reward.format for (_, cheat), reward in zip(planted, rewards, strict=True) if not cheat.ended} == {0.0}


@each_category
def test_the_form_alone_is_not_paid_to_long_texts_nor_to_nothing(items: dict[str, list[Item]], category: str) -> None:
    names = ("nothing: ' '", "nothing: ''", "hidden", "with '", "behind '<", "the question and")
    planted = [
        cheat.rollout(item)
        for item in items[category][: PLANTED[category]]
        for cheat in cheats(item, items[category])
        if cheat.name.startswith(names)
    ]
    assert len(planted) > 10 and not [rollout.text for rollout in planted if format_reward(rollout)]


def functions() -> list[Item]:
    """An item of each family of functions, with the tests that the family shares."""
    rng, found = Draw(1), dict[str, Item]()
    while len(found) < len(TEXTS["functions"]):
        exercise = CATEGORIES["python_functions"](rng)
        found.setdefault(exercise.key.split(":")[1], exercise.item)
    return list(found.values())


def test_a_table_of_the_shared_tests_passes_them_and_is_not_paid() -> None:
    shared = functions()
    planted = [(with_more_tests(item), cheat) for item in shared for cheat in tables(item)]
    plain = score_many(
        [replace(item, tests=item.tests[:3]) for item, _ in planted], [cheat.text for _, cheat in planted]
    )
    assert all(plain)  # they are programs, and right ones as far as they know
    assert not any(score_many([item for item, _ in planted], [cheat.text for _, cheat in planted]))
    assert not any(reward.correct for reward in total([cheat.rollout(item) for item, cheat in planted], WEIGHTS))
    assert all(reward.correct for reward in total([honest(item, item.accepted[0]) for item, _ in planted], WEIGHTS))


NUMERIC = Item(
    "sum", (Message("user", "What is 38 + 4?"),), "numeric", "42", ("8 + 4 = 12\n3 + 1 = 4\nAnswer: 42", "42"), ("43",)
)


@pytest.mark.parametrize(
    ("text", "form", "right"),
    [
        ("42", 1, 1), ("42.", 1, 1), ("Answer: 42", 1, 1), ("38 + 4 = 42", 1, 1), ("8 + 4 = 12\nAnswer: 42", 1, 1),
        ("43", 1, 0), ("8 + 4 = 13\n3 + 1 = 4\nAnswer: 43", 1, 0), ("42\n42", 0, 0), ("41 42", 0, 0), ("41\n43\n42", 0, 0),
        ("41, 42", 0, 0), ("42 of them", 0, 0), ("8 + 4 = 12\n" * 3 + "Answer: 42", 0, 0), ("Answer: 42\nAnswer: 42", 0, 0),
        ("4 2", 0, 0), ("٤٢", 0, 0), ("1 + 2 + 3 + 4 + 5 = 42", 0, 0),
    ],
)  # fmt: skip
def test_the_number_that_counts_stands_alone_or_behind_steps(text: str, form: float, right: float) -> None:
    (reward,) = total([honest(NUMERIC, text)], WEIGHTS)
    assert (reward.format, reward.correct) == (form, right)


def test_brevity_falls_from_one_to_three_times_the_longest_answer() -> None:
    item = replace(NUMERIC, accepted=("42", "1234567890"))
    lengths = {1: 1.0, 10: 1.0, 20: 0.5, 25: 0.25, 30: 0.0, 99: 0.0}
    assert {n: brevity_reward(honest(item, "x" * n), 1.0) for n in lengths} == lengths
    assert not brevity_reward(honest(item, "42"), 0.0)


def test_the_sum_is_weighted_and_in_order() -> None:
    made = [honest(NUMERIC, text) for text in ("42", "43", "")]
    assert total(made, {"correct": 2.0, "format": 0.5}) == [
        Reward(1.0, 1.0, 1.0, 2.5), Reward(0.0, 1.0, 0.0, 0.5), Reward(0.0, 0.0, 0.0, 0.0),
    ]  # fmt: skip
    assert total([], WEIGHTS) == []


@pytest.mark.parametrize(
    ("weights", "where", "fix"),
    [
        ({"correct": 1.0, "formatt": 0.1}, "rewards.formatt", "did you mean 'format'?"),
        ({"correct": 1.0, "brevity": -0.1}, "rewards.brevity", "use a value ≥ 0"),
        ({"correct": 0.0, "format": 1.0}, "rewards.correct", "use a value > 0"),
        ({"format": 1.0}, "rewards.correct", "use a value > 0"),
    ],
)
def test_weights_that_pay_the_wrong_thing_are_refused(weights: dict[str, float], where: str, fix: str) -> None:
    check_weights(WEIGHTS)
    with pytest.raises(ParamsError) as caught:
        check_weights(weights)
    assert (caught.value.where, caught.value.fix) == (where, fix)

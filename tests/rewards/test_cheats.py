"""No cheat is paid as a right answer is: planted for every shipped reward and category of exercises."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from athanor.base.errors import ParamsError
from athanor.rewards.gate import check_reward
from athanor.rewards.params import check_weights
from athanor.rewards.rewards import Reward, functions
from athanor.rewards.shipped import SHIPPED
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises.build import CATEGORIES, draw_exercises
from athanor.text.conversations import Item, Message
from tests.rewards.cheats import Cheat, cheats

BATTERY = BatteryParams(2, 0.1, 0.25, None, {"addition": 1})
PLANTED, MATES, STOP = 6, 12, 7
TRAINED = sorted(CATEGORIES.keys() - {"python_functions"})
each_category = pytest.mark.parametrize("category", TRAINED)


def drawn(category: str) -> list[Item]:
    exercises = draw_exercises(category, MATES, "1", False, BATTERY)
    return list({each.item.question: replace(each.item, category=category) for each in exercises}.values())


def paid(name: str, asked: Sequence[tuple[Item, Cheat]]) -> list[float]:
    (function,), _ = functions({name: 1.0}, stop_ids=[STOP])
    return function(
        prompts=[[asdict(message) for message in item.prompt] for item, _ in asked],
        completions=[[{"role": "assistant", "content": cheat.text}] for _, cheat in asked],
        completion_ids=[[5, STOP] if cheat.ended else [5] for _, cheat in asked],
        item=[json.dumps(asdict(item)) for item, _ in asked],
        trainer_state=None,
    )


def given(item: Item, *texts: str) -> list[tuple[Item, Cheat]]:
    return [(item, Cheat("", text)) for text in texts]


@each_category
def test_accepted_answers_are_paid_in_full_and_rejected_ones_are_not(category: str) -> None:
    accepted = [each for item in drawn(category) for each in given(item, *item.accepted)]
    rejected = [each for item in drawn(category) for each in given(item, *item.rejected)]
    for name in ("correct", "format", "brevity"):
        assert set(paid(name, accepted)) == {1.0}
    assert set(paid("correct", rejected)) == set(paid("brevity", rejected)) == {0.0}


@each_category
def test_no_cheat_is_paid(category: str) -> None:
    items = drawn(category)
    planted = [(item, cheat) for item in items[:PLANTED] for cheat in cheats(item, items)]
    assert len(planted) > 100
    for name in ("correct", "brevity"):
        assert not [cheat for (_, cheat), value in zip(planted, paid(name, planted), strict=True) if value]
    # The form is paid to wrong answers, but not to nothing, to long texts, nor to what did not end.
    formless = ("not ended", "nothing: ' '", "nothing: ''", "hidden", "with '", "behind '<", "the question and")
    without = [(item, cheat) for item, cheat in planted if cheat.name.startswith(formless)]
    assert len(without) > 10
    assert not [cheat for (_, cheat), value in zip(without, paid("format", without), strict=True) if value]


@each_category
@pytest.mark.parametrize("name", ["correct", "brevity"])
def test_rewards_of_exercises_pass_the_gate_of_rewards(category: str, name: str) -> None:
    examples = [
        (
            {"prompt": item.prompt[-1].content, "item": json.dumps(asdict(item))},
            min(item.accepted, key=len),
            item.rejected[0],
        )
        for item in drawn(category)
    ]
    check_reward(Reward(name, SHIPPED[name], examples=examples))


def test_the_exact_answer_passes_the_gate_of_rewards() -> None:
    examples = [({"prompt": f"Capital of {n}?", "answer": f"City {n}"}, f" City  {n}\n", "city") for n in range(10)]
    check_reward(Reward("exact", SHIPPED["exact"], examples=examples))


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
def test_the_number_that_counts_is_alone_or_behind_steps(text: str, form: float, right: float) -> None:
    assert (paid("format", given(NUMERIC, text)), paid("correct", given(NUMERIC, text))) == ([form], [right])


def test_brevity_falls_from_one_to_three_times_the_longest_answer() -> None:
    item = replace(NUMERIC, kind="format", checks=("min_words 1",), accepted=("42", "1234567890"))
    lengths = {1: 1.0, 10: 1.0, 20: 0.5, 25: 0.25, 30: 0.0}
    assert dict(zip(lengths, paid("brevity", given(item, *("x" * n for n in lengths))), strict=True)) == lengths


@pytest.mark.parametrize("weights", [{"correct": 1.0, "brevity": -0.1}, {"correct": 0.0, "format": 1.0}, {}])
def test_weights_that_pay_the_wrong_thing_are_refused(weights: dict[str, float]) -> None:
    check_weights({"correct": 1.0, "format": 0.1})
    check_weights({"mine": 0.1})
    with pytest.raises(ParamsError) as caught:
        check_weights(weights)
    assert caught.value.where == "rewards" and "use weights ≥ 0" in caught.value.fix

"""Models without thought through the real scoring path: what they score is what the floors say, and no more."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from athanor.base.errors import GateError
from athanor.base.strict import load_section
from athanor.evaluation import scoring
from athanor.evaluation.battery import Output, score_outputs
from athanor.evaluation.floors import FLOOR_LIMIT, check_floors, null_answers, null_floors
from athanor.evaluation.report import score_table
from athanor.evaluation.scoring import score_many
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises.build import battery_items
from athanor.text.conversations import Item, Message


@pytest.fixture(scope="module")
def items() -> list[Item]:
    """The test items of the default preset."""
    battery = load_section("presets/default.yaml", "battery", BatteryParams)
    return [item for item in battery_items(battery) if item.split == "test"]


def of(items: list[Item], category: str) -> list[Item]:
    return [item for item in items if item.category == category]


def behind(text: str, marks: str) -> str:
    return [part for part in re.split(f"[{marks}]", text) if part.strip()][-1].strip()


def numbered(text: str) -> str:
    return "\n".join(f"{place}. {word}" for place, word in enumerate(re.split(r",\s*|\s+and\s+|\s+", text), 1))


# A constant, and it defines most functions that any question asks for.
ALL_NAMES = """
for n in range(100):
    for name, f in {
        "add": lambda x, n: x + n, "subtract": lambda x, n: x - n, "times": lambda x, n: x * n,
        "modulo": lambda x, n: x % n, "divide_by": lambda x, n: x // n, "is_multiple_of": lambda x, n: x % n == 0,
        "more_than": lambda x, n: x > n, "less_than": lambda x, n: x < n, "at_most": min, "at_least": max,
        "first": lambda x, n: x[:n], "last": lambda x, n: x[-n:], "skip": lambda x, n: x[n:],
        "every": lambda x, n: x[::n], "repeat": lambda x, n: x * n, "longer_than": lambda x, n: len(x) > n,
    }.items():
        globals()[f"{name}_{n}"] = lambda x, f=f, n=n: f(x, n) if n else None
"""
Null = Callable[[str, list[Item]], str]
THOUGHTLESS: dict[str, tuple[str, Null]] = {
    "the text behind the last colon": ("copying", lambda asked, group: asked.rpartition(":")[2].strip()),
    "all accepted answers, one below the other": (
        "python_functions",
        lambda asked, group: "\n".join(item.accepted[0] for item in group),
    ),
    "a program that puts every name into globals()": ("python_functions", lambda asked, group: ALL_NAMES),
    "the list behind the colon, always numbered": (
        "list_format",
        lambda asked, group: numbered(asked.rpartition(":")[2].strip()),
    ),
    "the list, always numbered, and no count": ("counting", lambda asked, group: numbered(behind(asked, ":?"))),
    "the smallest number of the question": (
        "comparison",
        lambda asked, group: min(re.findall(r"\d+", asked), key=int),
    ),
}


@pytest.mark.parametrize("null", THOUGHTLESS)
def test_an_answer_without_thought_scores_no_more_than_the_printed_floor(items: list[Item], null: str) -> None:
    category, answer = THOUGHTLESS[null]
    group = of(items, category)
    outputs = [Output(text=answer(item.prompt[-1].content, group)) for item in group]
    row = score_table(group, score_outputs("null", group, outputs, workers=2), 1)[category]
    assert row["score"] <= row["floor"] <= FLOOR_LIMIT, row


def test_no_category_of_the_default_battery_has_a_floor_above_one_half(items: list[Item]) -> None:
    check_floors(items)
    for category, row in null_floors(items).items():
        assert row["floor"] <= FLOOR_LIMIT and bool(row["strategy"]) == (row["floor"] > 0), (category, row)


def likelihoods(choices: tuple[str, ...], text: str) -> tuple[float, ...]:
    return tuple(0.0 if choice == text else -1000.0 for choice in choices)


def test_models_that_follow_the_winners_score_the_floors(items: list[Item]) -> None:
    """Also that of all: such a model has one idea for each category."""
    outputs: dict[str, Output] = {}
    floors = null_floors(items)
    for category in sorted({item.category for item in items}):
        group = of(items, category)
        for item, text in zip(group, null_answers(group)[str(floors[category]["strategy"])], strict=True):
            outputs[item.id] = Output(text=text, log_likelihoods=likelihoods(item.choices, text))
    table = score_table(items, score_outputs("null", items, [outputs[item.id] for item in items], workers=2), 1)
    assert {category: row["score"] for category, row in table.items()} == {c: row["floor"] for c, row in floors.items()}
    assert all(row["floor_answer"] not in ("", "none") and row["margin_stderrs"] == 0 for row in table.values())


def test_any_accepted_answer_said_to_all_stays_below_the_floor(items: list[Item]) -> None:
    floors = null_floors(items)
    for category in ("first_words", "http_status", "identity", "list_pick", "unknown"):
        group = of(items, category)
        for text in {text for item in group for text in item.accepted}:
            assert sum(score_many(group, [text] * len(group))) / len(group) <= floors[category]["floor"], (
                category,
                text,
            )


def test_an_always_equal_likelihood_takes_the_first_choice_both_ways(items: list[Item]) -> None:
    asked = [item for item in items if item.kind == "likelihood"]
    flat = score_outputs(
        "flat", asked, [Output(log_likelihoods=tuple(-2.0 for _ in item.choices)) for item in asked], 1
    )
    assert [answer.text for answer in flat] == [item.choices[0] for item in asked]
    even = [Output(log_likelihoods=tuple(-2.0 * len(choice) for choice in item.choices)) for item in asked]
    marks = [answer.correct_norm for answer in score_outputs("even", asked, even, 1)]
    assert marks == [item.choices[0] == item.answer for item in asked]


WORDS = [
    a + b + c
    for a in ("ba", "do", "fi", "gu", "ke", "lo")
    for b in ("mi", "nu", "po", "ra", "se")
    for c in ("ck", "dle", "nt", "rm", "st")
]


# name -> (prompts, kind, answer, checks) for given words and two numbers.
Planted = tuple[tuple[str, ...], str, str, tuple[str, ...]]
PLANTED: dict[str, Callable[[list[str], int], Planted]] = {
    "a copy behind a colon": lambda w, low: (("Repeat: {w}",), "exact", " ".join(w), ()),
    "a copy at places that differ": lambda w, low: (
        ("Say {w} again", "Now the words {w}, please"), "exact", " ".join(w), ()
    ),
    "a count that takes any list": lambda w, low: (
        ("Count {l}", "How many? {l}", "The length of {l}?"), "numeric", str(len(w)), ()
    ),
    "one form of a list": lambda w, low: (
        ("Bullets, please: {l}", "Make bullets of {l}."), "list", "- " + "\n- ".join(w), ()
    ),
    "the smaller number": lambda w, low: (
        ("Which is less, {h} or {n}?", "The minimum of {n} and {h}?"), "numeric", str(low), ()
    ),
    "one sentence": lambda w, low: (
        ("Who wrote {w}?", "The author of {w}?"), "format", "I am Athanor.", ("contains Athanor",)
    ),
    "a name in a sentence": lambda w, low: (
        ("I like {w}. What?", "My taste is {w}! Which?"), "exact", f"You like {w[0]}.", ()
    ),
    "an object": lambda w, low: (
        ("As JSON: {p}", "Turn {p} into JSON."), "format", f'{{"{w[0]}": "{w[1]}"}}', (f'json {{"{w[0]}": "{w[1]}"}}',)
    ),
    "in quotes": lambda w, low: (("Quote {o}", "Put {o} into quotes."), "exact", f'"{w[0]}"', ()),
    "three lines": lambda w, low: (("Thrice {o}", "Write {o} thrice."), "exact", "\n".join([w[0]] * 3), ()),
    "one function": lambda w, low: (
        ("Write f{n}.", "Define f{n}, please."), "code", f"def f{low}(x):\n    return x", ()
    ),
}  # fmt: skip


def planted(name: str) -> list[Item]:
    """Twenty items of a category that one answer without thought passes."""
    rng, made = random.Random(name), []
    for number in range(20):
        words = rng.sample(WORDS, 3 + number % 3)
        low, high = sorted(rng.sample(range(10, 99), 2))
        prompts, kind, answer, checks = PLANTED[name](words, low)
        said = {"w": " ".join(words), "l": ", ".join(words), "n": low, "h": high}
        said |= {"o": words[0], "p": " ".join(words[:2])}
        ask = (Message("user", prompts[number % len(prompts)].format(**said)),)
        tests = (f"assert f{low}(1) == 1",) if kind == "code" else ()
        made.append(Item("planted", ask, kind, answer, (answer,), ("x", "y"), tests, checks))
    return made


@pytest.mark.parametrize("name", PLANTED)
def test_the_search_finds_what_passes_without_thought(name: str) -> None:
    """And the gate refuses such a category before anything is trained."""
    made = planted(name)
    assert null_floors(made)["planted"]["floor"] == 1.0, null_floors(made)
    with pytest.raises(GateError, match="without thought.*right for 100%"):
        check_floors(made)


def test_a_few_items_may_agree_by_chance() -> None:
    check_floors(planted("one sentence")[:9])
    check_floors([])


def test_a_joined_program_would_be_found_if_it_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "defines_only", lambda code, tests: True)
    made = [
        Item(
            "code",
            (Message("user", f"{a}?"),),
            "code",
            "",
            (f"def {a}(x):\n    return {n}",),
            ("x", "y"),
            (f"assert {a}(1) == {n}",),
        )
        for n, a in enumerate(("ab", "cd", "ef"))
    ]
    assert null_floors(made)["code"] == {"floor": 1.0, "strategy": "all accepted answers, joined by '\\n'"}

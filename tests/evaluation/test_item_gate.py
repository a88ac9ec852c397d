"""Planted faults of the scorer: the battery's own gate finds each of them on the battery's own items, for every kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal

import pytest

from athanor.base.errors import GateError
from athanor.evaluation import item_gate, sandbox, scoring
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises.build import BATTERY_ONLY, CATEGORIES, battery_items
from athanor.text.conversations import ITEM_KINDS, Item

TEXT = ("exact", "numeric", "list", "format", "likelihood")


@pytest.fixture(scope="module")
def items() -> dict[str, list[Item]]:
    """Items of each kind: a few of each generated category, and all that are written."""
    counts = {name: 2 if name == "python_functions" else 4 for name in {**CATEGORIES, **BATTERY_ONLY}}
    made = battery_items(BatteryParams(2, 0.1, 0.25, "battery/written.jsonl", counts))
    return {kind: [item for item in made if item.kind == kind] for kind in ITEM_KINDS}


def test_the_gate_passes_every_kind(items: dict[str, list[Item]]) -> None:
    assert all(items.values())
    item_gate.check_items([item for group in items.values() for item in group])


def lines(text: str) -> list[str]:
    return text.strip().split("\n") if text.strip() else [""]


def numbers(text: str) -> list[Decimal]:
    return [Decimal(number) for number in scoring.NUMBER.findall(text)]


Right = Callable[[Item, str], bool]
EVERY: dict[str, Callable[[Item, str, Right], bool]] = {
    "the answer anywhere in the text": lambda item, text, right: item.answer in text,
    "the text anywhere in the answer": lambda item, text, right: bool(text.strip()) and text.strip() in item.answer,
    "empty passes": lambda item, text, right: not text.strip() or right(item, text),
    "all pass": lambda item, text, right: True,
    "none passes": lambda item, text, right: False,
    "Yes passes": lambda item, text, right: text.strip() == "Yes" or right(item, text),
    "No passes": lambda item, text, right: text.strip() == "No" or right(item, text),
    "no answer passes": lambda item, text, right: text == "I don't know." or right(item, text),
    "only the first line": lambda item, text, right: right(item, lines(text)[0]),
    "only the last line": lambda item, text, right: right(item, lines(text)[-1]),
}
CASES = {
    "exact": {
        "any case": lambda item, text, right: text.strip().lower() == item.answer.lower(),
        "any order of words": lambda item, text, right: sorted(text.split()) == sorted(item.answer.split()),
        "the start of the answer": lambda item, text, right: bool(text) and item.answer.startswith(text.strip()),
    },
    "numeric": {
        "the first number": lambda item, text, right: numbers(text)[:1] == [Decimal(item.answer)],
        "any number": lambda item, text, right: Decimal(item.answer) in numbers(text),
        "without the sign": lambda item, text, right: [abs(n) for n in numbers(text)[-1:]] == [Decimal(item.answer)],
        "the last digits": lambda item, text, right: "".join(re.findall(r"\d", text)).endswith(item.answer),
    },
    "list": {
        "any format": lambda item, text, right: scoring.read_list(text)[1] == scoring.read_list(item.answer)[1],
        "any order": lambda item, text, right: (
            sorted(scoring.read_list(text)[1]) == sorted(scoring.read_list(item.answer)[1])
        ),
        "some of the items": lambda item, text, right: (
            scoring.read_list(text)[0] == scoring.read_list(item.answer)[0]
            and set(scoring.read_list(text)[1]) <= set(scoring.read_list(item.answer)[1])
        ),
        "more than the items": lambda item, text, right: (
            scoring.read_list(text)[0] == scoring.read_list(item.answer)[0]
            and set(scoring.read_list(text)[1]) >= set(scoring.read_list(item.answer)[1])
        ),
        "any case": lambda item, text, right: scoring.read_list(text.lower()) == scoring.read_list(item.answer.lower()),
    },
    "format": {
        "any check": lambda item, text, right: any(scoring.passes_check(check, text.strip()) for check in item.checks),
        "the first check": lambda item, text, right: scoring.passes_check(item.checks[0], text.strip()),
        "the last check": lambda item, text, right: scoring.passes_check(item.checks[-1], text.strip()),
    },
}
# No fault: the last number of a text is that of its last line, and answers that end in a line without one are wrong.
HARMLESS = {("numeric", "only the last line")}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind in TEXT for fault in (*EVERY, *CASES.get(kind, ())) if (kind, fault) not in HARMLESS],
)
def test_a_fault_of_the_text_scorer_is_found(
    items: dict[str, list[Item]], monkeypatch: pytest.MonkeyPatch, kind: str, fault: str
) -> None:
    right, broken = scoring._score_text, (EVERY | CASES.get(kind, {}))[fault]
    monkeypatch.setattr(
        scoring, "_score_text", lambda item, text: broken(item, text, right) if item.kind == kind else right(item, text)
    )
    with pytest.raises(GateError, match="takes a rejected|refuses its accepted"):
        item_gate.check_items(items[kind])


@pytest.mark.parametrize("name", sorted(scoring.CHECKS))
def test_a_check_that_says_yes_to_all_is_found(
    items: dict[str, list[Item]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By an item of the battery where one uses the check, so the written ones have to use nearly all of them."""
    using = [item for item in items["format"] if any(check.partition(" ")[0] == name for check in item.checks)]
    assert using, f"no item uses the check {name}"
    monkeypatch.setitem(scoring.CHECKS, name, lambda text, argument: True)
    with pytest.raises(GateError, match="alone|takes a rejected"):
        item_gate.check_items(using)


def test_a_check_without_a_rejected_answer_of_its_own_is_found(items: dict[str, list[Item]]) -> None:
    (item,) = [item for item in items["format"] if item.checks == ("words 5", "contains snow")]
    with pytest.raises(GateError, match="'contains snow' alone"):
        item_gate.check_items([replace(item, rejected=("White snow covers all the fields", "White frost"))])


CODE_FAULTS = {
    "any test": lambda code, tests: any(sandbox.passes(code, [test]) for test in tests[-3:]),
    "the first test": lambda code, tests: sandbox.passes(code, tests[:1]),
    "it runs": lambda code, tests: _parses(code),
    "it looks like code": lambda code, tests: "def " in code,
    "all pass": lambda code, tests: True,
    "none passes": lambda code, tests: False,
}


def _parses(code: str) -> bool:
    try:
        compile(code, "answer", "exec")
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize("fault", CODE_FAULTS)
def test_a_fault_of_the_code_scorer_is_found(
    items: dict[str, list[Item]], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    broken = CODE_FAULTS[fault]
    monkeypatch.setattr(scoring, "passes_many", lambda tasks, workers=2: [broken(code, tests) for code, tests in tasks])
    with pytest.raises(GateError, match="takes a rejected|refuses its accepted"):
        item_gate.check_items(items["code"][:1])


def test_a_scorer_that_lets_other_functions_stand_beside_the_asked_one_is_found(
    items: dict[str, list[Item]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "defines_only", lambda code, tests: bool(code.strip()))
    with pytest.raises(GateError, match="takes a rejected"):
        item_gate.check_items(items["code"][:1])


def test_an_empty_code_answer_that_passes_is_found(
    items: dict[str, list[Item]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = scoring.score_many
    monkeypatch.setattr(
        item_gate,
        "score_many",
        lambda asked, texts, workers=2: [
            mark or not text.strip() for mark, text in zip(right(asked, texts, workers), texts, strict=True)
        ],
    )
    with pytest.raises(GateError, match="takes a rejected"):
        item_gate.check_items(items["code"][:1])


def best(values: list[float]) -> int:
    return values.index(max(values))


def per(values: list[float], sizes: list[int]) -> list[float]:
    return [value / size for value, size in zip(values, sizes, strict=True)]


def lengths(choices: tuple[str, ...]) -> list[int]:
    return [len(choice) for choice in choices]


CHOICE_FAULTS = {
    "the first": lambda values, choices, normalised: 0,
    "the last": lambda values, choices, normalised: len(values) - 1,
    "the least likely": lambda values, choices, normalised: values.index(min(values)),
    "the shortest": lambda values, choices, normalised: best([-size for size in lengths(choices)]),
    "the last of equals": lambda values, choices, normalised: (
        len(values) - 1 - best((per(values, lengths(choices)) if normalised else values)[::-1])
    ),
    "never per character": lambda values, choices, normalised: best(values),
    "always per character": lambda values, choices, normalised: best(per(values, lengths(choices))),
    "per word": lambda values, choices, normalised: best(
        per(values, [len(choice.split()) for choice in choices]) if normalised else values
    ),
}


@pytest.mark.parametrize("fault", CHOICE_FAULTS)
def test_a_fault_in_taking_a_choice_is_found(
    items: dict[str, list[Item]], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    broken = CHOICE_FAULTS[fault]
    monkeypatch.setattr(
        item_gate, "choose", lambda values, choices, normalised: broken(list(values), choices, normalised)
    )
    with pytest.raises(GateError, match="is the likeliest"):
        item_gate.check_items(items["likelihood"])

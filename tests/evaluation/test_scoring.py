"""Scoring: each kind takes what is right, refuses what is near, and the item gate goes red for a bad item."""

from __future__ import annotations

import dataclasses
import math

import pytest

from athanor.base.errors import GateError
from athanor.evaluation import floors, item_gate, scoring, statistics
from athanor.evaluation.scoring import passes_check
from athanor.text.conversations import Item, Message


def item(kind: str, answer: str, accepted=(), rejected=("x", "y"), question="What?", tests=()) -> Item:
    prompt, accepted = (Message("user", question),), tuple(accepted or (answer,))
    return Item("c", prompt, kind, answer, accepted, tuple(rejected), tuple(tests))


@pytest.mark.parametrize("kind,answer", [("exact", "a b"), ("numeric", "7"), ("list", "a, b"), ("code", "x")])
def test_an_empty_answer_is_wrong(kind: str, answer: str) -> None:
    made = item(kind, answer, tests=("assert f() == 1",) if kind == "code" else ())
    assert not scoring.score(made, "") and not scoring.score(made, " \n\t ")


@pytest.mark.parametrize(
    "answer,right",
    [
        ("132", True),
        ("7 + 5 = 12\nAnswer: 132", True),
        ("The answer is 132.", True),
        ("132.0", True),
        ("1320", False),
        ("32", False),
        ("132 or 133", False),
        ("-132", False),
        ("one hundred", False),
        ("x132", False),
        ("0132", True),
        ("+132", True),
        ("$132", True),
        ("132%.", True),
        ("1.32e2", True),
        ("264/2", True),
        ("\u2212132", False),
        ("1/132", False),
        ("132/0", False),
        ("5.5/2", False),
        ("5,132", False),
        ("132,000", False),
        ("132" + "0" * 5000, False),
    ],
)
def test_numeric_takes_the_last_number_as_a_whole(answer: str, right: bool) -> None:
    assert scoring.score(item("numeric", "132"), answer) is right


@pytest.mark.parametrize(
    "text", ["042", "+42", "42.", "$42", "\u221242", "1/42", "84/2", "4,200", "4.2e1", "42", "-42"]
)
def test_a_number_alone_is_judged_alike_by_each_reader_of_numbers(text: str) -> None:
    for right in ("42", "-42", "4200"):
        assert passes_check(f"one_number {right}", text) is scoring.score(item("numeric", right), text)


def test_exact_compares_the_whole_text() -> None:
    made = item("exact", "404 Not Found")
    assert scoring.score(made, " 404 Not Found\n")
    for wrong in ("404 not found", "404", "404 Not Found. And more", "The answer is 404 Not Found"):
        assert not scoring.score(made, wrong)


@pytest.mark.parametrize(
    "answer,right",
    [
        ("- a\n- b", True),
        ("* a\n* b  ", True),
        ("- a\n- b\n- c", False),
        ("- b\n- a", False),
        ("- a\n-b", False),
        ("1. a\n2. b", False),
        ("a, b", False),
        ("a\nb", False),
        ("Here:\n- a\n- b", False),
    ],
)
def test_a_list_needs_its_format_items_and_order(answer: str, right: bool) -> None:
    assert scoring.score(item("list", "- a\n- b"), answer) is right


def test_a_numbered_list_must_count() -> None:
    made = item("list", "1. a\n2. b")
    assert scoring.score(made, "1) a\n2) b")
    assert not scoring.score(made, "1. a\n3. b") and not scoring.score(made, "2. a\n1. b")


def test_true_is_not_one() -> None:
    for value, other in (('{"a": 1}', '{"a": true}'), ("[0]", "[false]"), ("1", '["number", 1]')):
        assert not passes_check(f"json {value}", other) and not passes_check(f"json {other}", value)
    assert passes_check('json {"a": 1, "b": [true]}', '{"b": [true], "a": 1.0}')  # in any order, and one number


def test_code_is_executed() -> None:
    made = item("code", "", ("def f(x):\n    return x + 1",), tests=("assert f(1) == 2",))
    assert scoring.score(made, "```python\ndef f(x):\n    return 1 + x\n```")
    assert not scoring.score(made, "def f(x):\n    return x")
    answers = ["def f(x): return x + 1", "", "def f(x): return 2 * x", "def f(x): return 3"]
    assert scoring.score_many([made] * 4, answers) == [True, False, True, False]


@pytest.mark.parametrize(
    ("code", "right"),
    [
        ("import math\n\nSTEP = 1\n\ndef f(x):\n    return x + STEP\n\nprint(f(3))", True),
        ("f = lambda x: x + 1", True),
        ("def f(x):\n    def g(y):\n        return y + 1\n    return g(x)", True),
        ("def f(x):\n    return x + 1\n\ndef g(x):\n    return x + 2", False),
        ("def f(x):\n    return x + 1\n\ng = lambda x: x + 2", False),
        ("def f(x):\n    return x + 1\n\ndef f(x):\n    return x + 1", False),
        ("f = g = lambda x: x + 1", False),
        ("globals()['f'] = lambda x: x + 1", False),
        ("exec('def f(x):\\n    return x + 1')", False),
        ("if True:\n    def f(x):\n        return x + 1", False),
        ("class f:\n    pass", False),
    ],
)
def test_a_program_answers_with_the_asked_function_alone(code: str, right: bool) -> None:
    made = item("code", "", ("def f(x):\n    return x + 1",), tests=("assert f(1) == 2",))
    assert scoring.score(made, code) is right and scoring.score_many([made], [code]) == [right]


def test_a_word_of_several_and_no_name_but_the_asked_ones() -> None:
    for text, right in (("Goodbye!", True), ("See you soon.", True), ("Good.", False), ("Goodbyes", False)):
        assert passes_check("mentions goodbye|see you", text) is right
    for text in ("I do not know who Ada Lovelace is.", "Nobody I know. Who?", "No, I am Athanor.", "who ada is"):
        assert passes_check("names_in Ada Lovelace", text)
    for text in ("I do not know who Alan is.", "Ada and Bob", "I do not know who Ada Byron is."):
        assert not passes_check("names_in Ada Lovelace", text)
    assert passes_check("names_in Gulliver's Travels", "I know nothing of Gulliver's Travels.")


def test_one_number_is_said_alone() -> None:
    for text in ("4", "4.0", "There are 4 words."):
        assert passes_check("one_number 4", text)
    for text in ("3 or 4", "1. a\n2. b\n3. c\n4. d", "four", "44", "-4"):
        assert not passes_check("one_number 4", text)


def test_score_many_counts_every_item_and_keeps_order() -> None:
    made = [item("exact", "a"), item("code", "", ("x",), tests=("assert f() == 1",)), item("numeric", "3")]
    assert scoring.score_many(made, ["a", "def f(): return 1", "3"]) == [True, True, True]
    assert scoring.score_many(made, ["", "", ""]) == [False, False, False]
    with pytest.raises(ValueError):
        scoring.score_many(made, ["a"])


def test_summary_has_n_error_and_floor() -> None:
    made = [item("exact", str(number), question=f"Number {number} of what?") for number in range(200, 250)]
    table = floors.summarise(made, [True] * 45 + [False] * 5)["c"]
    assert (table["n"], table["right"], table["accuracy"]) == (50, 45, 0.9)
    assert 0.03 < table["stderr"] < 0.06 and table["above_floor"] < 0.9 / table["stderr"]
    assert math.isfinite(statistics.standard_error(50, 50)) and statistics.standard_error(50, 50) > 0.01


GOOD = item("exact", "a", rejected=("b", "c"))


@pytest.mark.parametrize(
    "bad,words",
    [
        ([dataclasses.replace(GOOD, accepted=("a", "A"))], "refuses its accepted"),
        ([dataclasses.replace(GOOD, rejected=("b", " a "))], "takes a rejected"),
        ([dataclasses.replace(GOOD, rejected=("b",))], "two rejected"),
        ([dataclasses.replace(GOOD, rejected=("b", "b"))], "two rejected"),
        ([dataclasses.replace(GOOD, accepted=())], "one accepted"),
        ([dataclasses.replace(GOOD, answer="")], "refuses its accepted"),
        ([item("code", "", ("def f(x): return x",), tests=("assert f(1) == 3",))], "refuses its accepted"),
        ([GOOD, dataclasses.replace(GOOD, category="d")], "same question"),
        ([dataclasses.replace(GOOD, kind="contains")], "unknown item kind"),
    ],
)
def test_the_item_gate_goes_red(bad: list[Item], words: str) -> None:
    item_gate.check_items([GOOD], {"c": 1})
    with pytest.raises(GateError, match=words):
        item_gate.check_items(bad)


def test_the_item_gate_counts() -> None:
    with pytest.raises(GateError, match="1 items instead of 2"):
        item_gate.check_items([GOOD], {"c": 2})

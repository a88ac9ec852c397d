"""The embedded exercises: deterministic, right, divided by key, and no item or twin of one in training."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys

import pytest

from athanor.artifacts import digest
from athanor.corpus.conversations import Conversation, Item, check_messages, write_rows
from athanor.corpus.exercises import arithmetic, build, facts, functions, lists
from athanor.errors import InputError, ParamsError
from athanor.evaluation import scoring
from athanor.params import strict
from athanor.params.battery import BatteryParams
from athanor.params.instruct import ExercisesSource, InstructParams

ROWS, ITEMS, SEED = 300, 20, 3
FACTS = {"docstring_recall", "error_meaning", "http_status", "module_recall"}


def battery(**changes) -> BatteryParams:
    facts = {"seed": 5, "held_out_fraction": 0.1, "categories": dict.fromkeys(build.CATEGORIES, ITEMS)}
    return BatteryParams(**{**facts, **changes})


def source(**changes) -> ExercisesSource:
    facts = {"categories": dict.fromkeys(build.CATEGORIES, ROWS), "multi_turn_rows": 400, "system_fraction": 0.1}
    return ExercisesSource(**{"type": "exercises", "name": "exercises", **facts, **changes})


@pytest.fixture(scope="module")
def rows() -> list[Conversation]:
    return build.training_conversations(source(), SEED, 0.1, battery())


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return build.battery_items(battery())


def grams(text: str, n: int = 13) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[i:] for i in range(n)), strict=False))


def test_every_item_proves_itself(items: list[Item]) -> None:
    scoring.check_items(items, battery().categories)


def test_rows_are_well_formed_and_their_answers_are_right(rows: list[Conversation]) -> None:
    assert len(rows) == ROWS * len(build.CATEGORIES) + 400
    for row in rows:
        check_messages(row.messages, row.key)
        assert sum(len(m.content) for m in row.messages) < 900
    assert {m.role for row in rows for m in row.messages} == {"system", "user", "assistant"}
    assert sum(len(row.messages) > 3 for row in rows) > 400  # several turns


@pytest.mark.parametrize("category", sorted(build.CATEGORIES))
def test_training_replies_pass_their_own_scorer(category: str) -> None:
    made = build.draw_exercises(category, 40, "s", False, battery())
    as_items = [Item(category, e.prompt, e.kind, e.answer, e.accepted, e.rejected, e.tests) for e in made]
    assert all(scoring.score_many(as_items, [e.reply for e in made]))


def test_no_item_and_no_twin_is_in_training(rows: list[Conversation], items: list[Item]) -> None:
    asked = {m.content for row in rows for m in row.messages if m.role == "user"}
    openings = {tuple(row.messages[:n]) for row in rows for n in range(1, len(row.messages))}
    trained = {key for row in rows for key in row.key.split(" | ")}
    for category in build.CATEGORIES:
        for exercise in build.draw_exercises(category, ITEMS, str(battery().seed), True, battery()):
            assert exercise.key not in trained, exercise
    for item in items:
        assert item.prompt not in openings
        assert len(item.prompt) > 1 or item.prompt[0].content not in asked


def test_no_13_gram_of_an_item_is_in_training(rows: list[Conversation], items: list[Item]) -> None:
    trained = set().union(*(grams(" ".join(m.content for m in row.messages)) for row in rows))
    texts = {item: " ".join(m.content for m in item.prompt) + " " + item.accepted[0] for item in items}
    long = [item for item, text in texts.items() if grams(text)]
    assert long  # the check below looks at something
    assert not [texts[item] for item in long if grams(texts[item]) & trained]


def test_a_planted_leak_is_seen(items: list[Item], rows: list[Conversation]) -> None:
    """The split is what keeps items out: with another battery seed the same rows do contain items."""
    other = build.training_conversations(source(), SEED, 0.1, battery(seed=6))
    trained = {key for row in other for key in row.key.split(" | ")}
    held = [e.key for e in build.draw_exercises("python_functions", ITEMS, "5", True, battery())]
    assert set(held) & trained


def test_sums_share_one_key_across_categories_and_order() -> None:
    assert arithmetic._sum_key(47, 85) == arithmetic._sum_key(85, 47)
    keys = {}
    for category in ("addition", "worked_addition", "word_problems"):
        keys[category] = {e.key.partition(":")[0] for e in build.draw_exercises(category, 30, "s", False, battery())}
    assert keys == {"addition": {"sum"}, "worked_addition": {"sum"}, "word_problems": {"sum", "difference"}}
    assert lists._key(["b", "a"]) == lists._key(["a", "b"])


def test_facts_are_trained_and_only_their_wording_is_held_out(rows: list[Conversation], items: list[Item]) -> None:
    names = {key.rsplit(":", 1)[0] for row in rows for key in row.key.split(" | ")}
    for category, known in (("status", facts.status_facts()), ("error", facts.error_facts())):
        assert all(f"{category}:{name}" in names for name, _ in known)
    for wordings in (facts.STATUS, facts.ERROR, facts.MODULE, facts.DOCSTRING):
        held = [re.escape(w).replace(r"\{name\}", ".+") for w in wordings[-facts.HELD_OUT_WORDINGS :]]
        for row, pattern in itertools.product(rows, held):
            assert not any(re.fullmatch(pattern, m.content) for m in row.messages if m.role == "user")
    asked = [item for item in items if item.category in FACTS]
    assert len(asked) == ITEMS * len(FACTS) and all(len(item.answer.split()) <= 13 for item in asked)


def test_train_and_validation_share_no_exercise(rows: list[Conversation]) -> None:
    sides = {"train": set(), "val": set()}
    for row in rows:
        sides[row.split].update(row.key.split(" | "))
    assert sides["val"] and not sides["train"] & sides["val"]
    share = sum(row.split == "val" for row in rows) / len(rows)
    assert 0.05 < share < 0.2


def test_the_two_splits_are_independent() -> None:
    """With equal seeds the validation split must not fall inside the held-out keys."""
    made = build.training_conversations(source(), 5, 0.1, battery(seed=5))
    assert sum(row.split == "val" for row in made) / len(made) > 0.05


def test_floors_are_low_and_choices_balanced() -> None:
    floors = scoring.null_floors(build.battery_items(battery(categories=dict.fromkeys(build.CATEGORIES, 100))))
    high = {"comparison": 0.65, "counting": 0.35, "list_pick": 0.5}
    for category, floor in floors.items():
        assert floor["floor"] <= high.get(category, 0.1), (category, floor)


def test_column_steps_are_right() -> None:
    assert arithmetic.sum_steps(47, 85) == "7 + 5 = 12\n4 + 8 + 1 = 13"
    assert arithmetic.difference_steps(62, 38) == "12 - 8 = 4\n5 - 3 = 2"
    assert arithmetic.difference_steps(50, 48) == "10 - 8 = 2\n4 - 4 = 0"
    rng = random.Random(0)
    for _ in range(300):
        a, b = arithmetic._falling(rng)
        ones, tens = (int(line.rpartition(" ")[2]) for line in arithmetic.difference_steps(a, b).splitlines())
        assert a > b and 10 * tens + ones == a - b
        ones, tens = (int(line.rpartition(" ")[2]) for line in arithmetic.sum_steps(a, b).splitlines())
        assert 10 * tens + ones % 10 == a + b


def test_every_function_family_is_tested_where_neighbours_differ() -> None:
    """A wrong parameter must fail: the rejected answer with the next parameter is refused for each family."""
    rng = random.Random(1)
    seen = {}
    while len(seen) < len(functions.FAMILIES):
        exercise = functions.python_functions(rng, 0, False)
        seen.setdefault(exercise.key.split(":")[1], exercise)
    made = [Item("f", e.prompt, e.kind, e.answer, e.accepted, e.rejected, e.tests) for e in seen.values()]
    scoring.check_items(made)


@pytest.mark.parametrize(
    "docstring,expected",
    [
        ("Return the length. More text.", "Return the length."),
        ("csv.py - read/write CSV files\n\nLong story.", "Read/write CSV files."),
        ("find the   first\nmatch", "Find the first match."),
        ("execl(file, *args)", None),
        ("len(x) -> int", None),
        ("one " * 12, None),
        ("Lone", None),
        ("", None),
        (None, None),
    ],
)
def test_summaries_are_single_short_sentences(docstring: str | None, expected: str | None) -> None:
    assert facts.summary(docstring) == expected


def test_an_interpreter_without_docstrings_is_an_error() -> None:
    with pytest.raises(InputError, match="usable modules"):
        facts._usable({"abc": None, "ast": "Text of a module."}, "modules")


def test_same_bytes_in_another_process(rows: list[Conversation]) -> None:
    program = f"""
from athanor.artifacts import digest
from athanor.corpus.exercises import build
from athanor.params.battery import BatteryParams
from athanor.params.instruct import ExercisesSource
b = BatteryParams(5, 0.1, dict.fromkeys(reversed(list(build.CATEGORIES)), {ITEMS}))
s = ExercisesSource("exercises", "exercises", dict.fromkeys(reversed(list(build.CATEGORIES)), {ROWS}), 400, 0.1)
print(digest([c.id for c in build.training_conversations(s, {SEED}, 0.1, b)]))
print(digest([i.id for i in build.battery_items(b)]))
"""
    run = [sys.executable, "-c", program]
    env = {"PYTHONHASHSEED": "77", "PYTHONPATH": str(build.__file__).partition("/athanor/corpus")[0]}
    found = subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout.split()
    assert found == [digest([row.id for row in rows]), digest([item.id for item in build.battery_items(battery())])]


def test_rows_are_written_in_order(tmp_path, items: list[Item]) -> None:
    assert items == sorted(items, key=lambda item: (item.category, item.id))
    assert write_rows(tmp_path / "items.jsonl", items) == len(items)


def test_impossible_wishes_are_told() -> None:
    with pytest.raises(ParamsError, match="did you mean 'counting'"):
        build.battery_items(battery(categories={"countin": 3}))
    with pytest.raises(ParamsError, match="only .* different exercises"):
        build.battery_items(battery(categories={"http_status": 5000}))


def test_params_refuse_bad_sections() -> None:
    good = {"seed": 1, "held_out_fraction": 0.1, "categories": {"counting": 3}}
    assert strict.build(BatteryParams, good, "battery").categories == {"counting": 3}
    for change in ({"categories": {}}, {"categories": {"counting": 0}}, {"held_out_fraction": 0.9}):
        with pytest.raises(ParamsError):
            strict.build(BatteryParams, {**good, **change}, "battery")
    hub = {"type": "messages", "name": "chat", "files": None, "hub_id": "a/b", "hub_config": None, "revision": "a" * 40}
    hub |= {"shape": "messages", "columns": ["messages"], "select": None, "max_malformed_fraction": 0.0}
    hub |= {"hub_split": "train", "max_rows": 5, "min_rows": 1, "license": "MIT"}
    me = {"type": "identity", "name": "me", "repeats": 2, "min_rows": 1}
    made = {"seed": 1, "val_fraction": 0.02, "sources": [hub, me]}
    assert len(strict.build(InstructParams, made, "instruct").sources) == 2
    for bad in ({**hub, "revision": "main"}, {**hub, "files": "x"}, {**hub, "name": "a/b"}, {**hub, "type": "chats"}):
        with pytest.raises(ParamsError):
            strict.build(InstructParams, {**made, "sources": [bad]}, "instruct")
    with pytest.raises(ParamsError, match="two sources"):
        strict.build(InstructParams, {**made, "sources": [hub, hub]}, "instruct")

"""The embedded exercises: deterministic, right, divided by key, and no item or twin of one in training."""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from athanor.base import strict
from athanor.base.artifacts import digest
from athanor.base.errors import InputError, ParamsError
from athanor.evaluation import floors, item_gate, scoring
from athanor.sources import docstrings
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises import build, code, facts, lists, numbers
from athanor.sources.exercises.exercise import TEXTS, Draw
from athanor.sources.exercises.written import read_written
from athanor.sources.instruct_params import ExercisesSource, InstructParams
from athanor.text.conversations import Conversation, Item, check_messages

FACT_LISTS = {
    "status": facts.status_facts,
    "error": facts.error_facts,
    "module": facts.module_facts,
    "docstring": facts.docstring_facts,
}
ROWS, ITEMS, SEED = 300, 20, 3
ALL = {**build.CATEGORIES, **build.BATTERY_ONLY}
FACTS = {"docstring_recall", "error_meaning", "http_status", "module_recall"}


def battery(**changes) -> BatteryParams:
    facts = {"seed": 5, "held_out_fraction": 0.1, "development_fraction": 0.25, "written": None}
    return BatteryParams(**{**facts, "categories": dict.fromkeys(ALL, ITEMS), **changes})


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


def test_every_item_proves_itself_and_they_are_in_order(items: list[Item]) -> None:
    assert items == sorted(items, key=lambda item: (item.category, item.id))
    item_gate.check_items(items, battery().categories)


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
    assert all(scoring.score_many([e.item for e in made], [e.reply for e in made]))


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
    keys = {}
    for category in ("addition", "worked_addition", "word_problems"):
        keys[category] = {e.key.partition(":")[0] for e in build.draw_exercises(category, 30, "s", False, battery())}
    assert keys == {"addition": {"sum"}, "worked_addition": {"sum"}, "word_problems": {"sum", "difference"}}
    assert lists.list_key(["b", "a"]) == lists.list_key(["a", "b"])


def test_facts_are_trained_and_only_their_wording_is_held_out(rows: list[Conversation], items: list[Item]) -> None:
    names = {key.rsplit(":", 1)[0] for row in rows for key in row.key.split(" | ")}
    for category, known in (("status", facts.status_facts()), ("error", facts.error_facts())):
        assert all(f"{category}:{name}" in names for name, _ in known)
    asked = {m.content for row in rows for m in row.messages if m.role == "user"}
    for kind, known in FACT_LISTS.items():
        wordings, held = facts.WORDINGS[kind], facts.held_out_wordings(kind, battery().seed)
        assert len(held) == facts.HELD_OUT_WORDINGS
        assert not asked & {wording.format(name=name) for wording in held for name, _ in known()}
        assert asked & {wording.format(name=name) for wording in set(wordings) - set(held) for name, _ in known()}
    of_facts = [item for item in items if item.category in FACTS]
    assert len(of_facts) == ITEMS * len(FACTS) and all(len(item.answer.split()) <= 13 for item in of_facts)


def test_a_fresh_seed_holds_out_other_wordings() -> None:
    chosen = {facts.held_out_wordings("status", seed) for seed in range(30)}
    assert len(chosen) > 15 and len({wording for pair in chosen for wording in pair}) == len(facts.WORDINGS["status"])


def test_no_wording_of_another_source_is_held_out() -> None:
    """Found when a fresh seed held out "What does {name} do?", which the docstrings source asks of the same names."""
    others = {wording for name in ("summary", "class", "module", "topic") for wording in docstrings.WORDINGS[name]}
    elsewhere = set(facts.WORDINGS["asked_elsewhere"])
    for kind in FACT_LISTS:
        wordings = set(facts.WORDINGS[kind])
        assert others & wordings <= elsewhere
        held = {wording for seed in range(40) for wording in facts.held_out_wordings(kind, seed)}
        assert held == wordings - elsewhere and not held & others


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
    found = floors.null_floors(build.battery_items(battery(categories=dict.fromkeys(ALL, 60))))
    high = {"comparison": 0.45, "counting": 0.3, "list_pick": 0.45}
    high |= {"agreement": 0.4, "determiners": 0.4, "python_syntax": 0.4}  # of four choices
    high |= {"copying": 0.35, "list_format": 0.45, "line_count": 0.45, "json_object": 0.35, "memory": 0.45}
    high |= {"sorting": 0.35, "list_reverse": 0.1}
    high |= {"identity": 0.25, "first_words": 0.3}  # its name with what it is; a greeting or an offer answers several
    for category, floor in found.items():
        assert floor["floor"] <= high.get(category, 0.15 if category != "all" else 0.3), (category, floor)


def test_only_the_battery_asks_for_likelihoods() -> None:
    with pytest.raises(ParamsError, match="only the battery"):
        build.draw_exercises("agreement", 3, "s", False, battery())
    for whole in (e.reply for e in build.draw_exercises("python_syntax", 60, "s", True, battery())):
        ast.parse(whole)
        broken = code.broken_forms(whole)
        assert len(broken) >= code.BROKEN_CHOICES and {len(text) for text in broken} == {len(whole)}


def test_every_category_gives_its_share_to_development() -> None:
    made = build.battery_items(battery(written="battery/written.jsonl"))
    counts = Counter((item.category, item.split) for item in made)
    for category in set(ALL) - {"identity"}:  # some of which are written
        assert counts[category, "development"] == ITEMS / 4 and counts[category, "test"] == ITEMS * 3 / 4
    assert made == build.battery_items(battery(written="battery/written.jsonl"))
    other = build.battery_items(battery(written="battery/written.jsonl", seed=6))
    written = [{item.question: item.split for item in items if item.origin == "written"} for items in (made, other)]
    assert written[0].keys() == written[1].keys() and written[0] != written[1]
    assert Counter(item.split for item in build.battery_items(battery(development_fraction=0.0))) == {
        "test": len(ALL) * ITEMS
    }
    one = build.battery_items(battery(categories={"counting": 1}, development_fraction=0.9))
    assert [item.split for item in one] == ["test"]


def test_difficulty_follows_its_rule() -> None:
    assert [numbers.carries(*pair) for pair in ((12, 13), (17, 5), (67, 58), (99, 1))] == [0, 1, 2, 2]
    assert [numbers.borrows(*pair) for pair in ((58, 13), (52, 17))] == [0, 1]
    made = build.battery_items(battery(categories=dict.fromkeys(ALL, 60)))
    levels = {category: {item.difficulty for item in made if item.category == category} for category in ALL}
    assert all(len(found) > 1 for found in levels.values()), levels


def test_the_written_items_prove_themselves_and_stand_alone() -> None:
    made = read_written("battery/written.jsonl", 1)
    item_gate.check_items(made)
    assert len(made) >= 80 and len({item.category for item in made}) >= 6
    assert {item.origin for item in made} == {"written"} and {item.kind for item in made} == {"format", "likelihood"}
    # Choices: the right one is at every place, and neither the shortest nor the longest for the most part.
    for category, floor in floors.null_floors(made).items():
        assert floor["floor"] <= 0.5, (category, floor)


WRITTEN = {"category": "c", "kind": "exact", "prompt": "Yes?", "accepted": ["Yes"], "rejected": ["No", "x"]}
WRITTEN |= {"difficulty": "easy"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "code"}, "kind 'code'"),
        ({"difficulty": "huge"}, "difficulty 'huge'"),
        ({"accepted": []}, "0 accepted"),
        ({"accepted": "Yes"}, "list of texts"),
        ({"checks": []}, "checks belong"),
        ({"kind": "numeric", "accepted": ["about 7"]}, "not a number"),
        ({"kind": "exact"}, "checks belong"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [{"role": "user"}]}, "neither a text"),
        ({"kind": "likelihood", "checks": [], "prompt": [{"role": "user", "content": "a"}]}, "continue a text"),
        ({"extra": 1}, "keys are"),
        (None, "not valid JSON"),
    ],
)
def test_a_bad_written_item_names_its_line(tmp_path: Path, change: dict | None, words: str) -> None:
    good = WRITTEN | {"kind": "format", "checks": ["yes_no Yes"]}
    lines = [json.dumps(good), "", json.dumps({**good, **change}) if change is not None else "{"]
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=words) as error:
        read_written(tmp_path / "items.jsonl", 1)
    assert error.value.where.endswith("items.jsonl:3")
    with pytest.raises(InputError, match="not readable"):
        read_written(tmp_path / "nowhere.jsonl", 1)


def test_line_separators_inside_a_text_are_text(tmp_path: Path) -> None:
    row = WRITTEN | {"prompt": "a\u2028b\u0085c"}
    lines = [json.dumps(row, ensure_ascii=False), "", json.dumps({**row, "prompt": "d"})]
    (tmp_path / "items.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert [item.prompt[0].content for item in read_written(tmp_path / "items.jsonl", 1)] == [row["prompt"], "d"]


def test_column_steps_are_right() -> None:
    assert numbers.sum_steps(47, 85) == "7 + 5 = 12\n4 + 8 + 1 = 13"
    assert numbers.difference_steps(62, 38) == "12 - 8 = 4\n5 - 3 = 2"
    assert numbers.difference_steps(50, 48) == "10 - 8 = 2\n4 - 4 = 0"
    rng = random.Random(0)
    for _ in range(300):
        a, b = numbers.falling_numbers(rng)
        ones, tens = (int(line.rpartition(" ")[2]) for line in numbers.difference_steps(a, b).splitlines())
        assert a > b and 10 * tens + ones == a - b
        ones, tens = (int(line.rpartition(" ")[2]) for line in numbers.sum_steps(a, b).splitlines())
        assert 10 * tens + ones % 10 == a + b


def test_every_function_family_is_tested_where_neighbours_differ() -> None:
    """A wrong parameter must fail: the rejected answer with the next parameter is refused for each family."""
    rng = Draw(1)
    seen = {}
    while len(seen) < len(TEXTS["functions"]):
        exercise = code.python_functions(rng)
        seen.setdefault(exercise.key.split(":")[1], exercise)
    item_gate.check_items([exercise.item for exercise in seen.values()])


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


def test_what_site_adds_is_no_fact() -> None:
    """Found when a model that was asked for "help" said "Define the builtin 'help'."."""
    assert callable(help)
    assert not {"help", "exit", "quit", "copyright"} & {name for name, _ in facts.docstring_facts()}


def test_an_interpreter_without_docstrings_is_an_error() -> None:
    with pytest.raises(InputError, match="usable modules"):
        facts._usable({"abc": None, "ast": "Text of a module."}, "modules")


def test_same_bytes_in_another_process(rows: list[Conversation]) -> None:
    program = f"""
from athanor.base.artifacts import digest
from athanor.sources.exercises import build
from athanor.sources.battery_params import BatteryParams
from athanor.sources.instruct_params import ExercisesSource
b = BatteryParams(5, 0.1, 0.25, None, dict.fromkeys(reversed([*build.CATEGORIES, *build.BATTERY_ONLY]), {ITEMS}))
s = ExercisesSource("exercises", "exercises", dict.fromkeys(reversed(list(build.CATEGORIES)), {ROWS}), 400, 0.1)
print(digest([c.id for c in build.training_conversations(s, {SEED}, 0.1, b)]))
print(digest([i.id for i in build.battery_items(b)]))
"""
    run = [sys.executable, "-c", program]
    env = {"PYTHONHASHSEED": "77", "PYTHONPATH": str(build.__file__).partition("/athanor/sources")[0]}
    found = subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout.split()
    assert found == [digest([row.id for row in rows]), digest([item.id for item in build.battery_items(battery())])]


def test_impossible_wishes_are_told() -> None:
    with pytest.raises(ParamsError, match="did you mean 'counting'"):
        build.battery_items(battery(categories={"countin": 3}))
    with pytest.raises(ParamsError, match="only .* different exercises"):
        build.battery_items(battery(categories={"http_status": 5000}))


def test_params_refuse_bad_sections() -> None:
    good = {"seed": 1, "held_out_fraction": 0.1, "development_fraction": 0.25, "written": None}
    good |= {"categories": {"counting": 3}}
    assert strict.build(BatteryParams, good, "battery").categories == {"counting": 3}
    for change in (
        {"categories": {}},
        {"categories": {"counting": 0}},
        {"held_out_fraction": 0.9},
        {"written": "../x"},
    ):
        with pytest.raises(ParamsError):
            strict.build(BatteryParams, {**good, **change}, "battery")
    hub = {"type": "messages", "name": "chat", "hub_id": "a/b", "revision": "a" * 40}
    me = {"type": "identity", "name": "me", "repeats": 2, "min_rows": 1}
    made = {"seed": 1, "val_fraction": 0.02, "sources": [hub, me]}
    assert len(strict.build(InstructParams, made, "instruct").sources) == 2
    for bad in ({**hub, "revision": "main"}, {**hub, "files": "x"}, {**hub, "name": "a/b"}, {**hub, "type": "chats"}):
        with pytest.raises(ParamsError):
            strict.build(InstructParams, {**made, "sources": [bad]}, "instruct")
    with pytest.raises(ParamsError, match="two sources"):
        strict.build(InstructParams, {**made, "sources": [hub, hub]}, "instruct")

"""The questions of training by reward: exercises that the battery does not hold out, divided by key once more."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from athanor.base.errors import ParamsError, suggest
from athanor.evaluation.sandbox import parse_test
from athanor.rewards.params import GrpoDataParams
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises.build import BATTERY_ONLY, CATEGORIES, MAX_MISSES, is_held_out
from athanor.sources.exercises.exercise import Draw, Exercise
from athanor.text.conversations import Item
from athanor.text.documents import split_of

VALIDATION_SHARE = 0.1  # of all keys
MAX_TEST_CHARS = 400  # of a new test: the results of all have to fit what a process may send


def side_of(exercise: Exercise, seed: int) -> str:
    """train or val; by the key alone, so that no key stands on both sides, whatever category asks for it."""
    return split_of(f"validation/{seed}/{exercise.key}", VALIDATION_SHARE)


def draw_questions(params: GrpoDataParams, battery: BatteryParams) -> dict[str, list[Exercise]]:
    """The exercises of both sides, train and val, by category. No two of them ask the same.

    ParamsError for a category that does not exist, cannot be trained, or does not hold so many.
    """
    sides: dict[str, list[Exercise]] = {"train": [], "val": []}
    questions: set[object] = set()
    for category, count in sorted(params.categories.items()):
        missing = {"train": count, "val": params.validation_per_category}
        rng, misses = _draw(category, params.seed, battery), 0
        while any(missing.values()):
            exercise = CATEGORIES[category](rng)
            rng.number += 1
            if exercise.item.kind == "likelihood":
                fix = "remove it: its answers are compared and never written"
                raise ParamsError("cannot be asked", where=_where(category), fix=fix)
            side = side_of(exercise, params.seed)
            if missing[side] and exercise.item.question not in questions and not is_held_out(exercise, battery):
                questions.add(exercise.item.question)
                item = replace(exercise.item, category=category)
                sides[side].append(replace(exercise, item=with_more_tests(item) if item.tests else item))
                missing[side], misses = missing[side] - 1, 0
            elif (misses := misses + 1) == MAX_MISSES:
                what = f"{missing['train']} of {count} questions and {missing['val']} for validation do not exist"
                raise ParamsError(what, where=_where(category), fix="lower the count, or validation_per_category")
    return sides


def _draw(category: str, seed: int, battery: BatteryParams) -> Draw:
    if category in BATTERY_ONLY:
        raise ParamsError("only the battery asks this", where=_where(category), fix="remove it")
    if category not in CATEGORIES:
        raise ParamsError("unknown exercise category", where=_where(category), fix=suggest(category, CATEGORIES))
    rng = Draw(f"{seed}/grpo/{category}")
    rng.line_seed = battery.seed
    return rng


def _where(category: str) -> str:
    return f"grpo_data.categories.{category}"


def with_more_tests(item: Item) -> Item:
    """A code item with tests of its own besides those that its family shares.

    A table of the shared arguments would pass those. The new arguments are all sums of two old ones: there are too many
    for a table of the length that an answer may have, and they lie where functions of the family differ.
    """
    calls: list[Any] = [ast.parse(parse_test(test)[0], mode="eval").body for test in item.tests]
    name, arguments = calls[0].func.id, [ast.literal_eval(call.args[0]) for call in calls]
    namespace: dict[str, Any] = {}
    exec(item.accepted[0], namespace)  # from our own template, not a model's code
    sums = {repr(a + b): a + b for a in arguments for b in arguments if a + b not in arguments}
    tests = [f"assert {name}({text}) == {namespace[name](value)!r}" for text, value in sums.items()]
    return replace(item, tests=(*item.tests, *(test for test in tests if len(test) <= MAX_TEST_CHARS)))

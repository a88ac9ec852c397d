"""Exercises that ask for a short Python function; the answer is executed against asserts.

Each family has one parameter (a number or a word). The name of the function
carries the parameter, so the same idea with another number is another
exercise and the held-out ones have parameters never seen with their family.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from athanor.corpus.exercises.exercise import Exercise, Side, ask, level
from athanor.corpus.exercises.words import WORDS

REQUESTS = (
    "Write a Python function {call} that {does}.",
    "Write {call} in Python. It {does}.",
    "Define a function {call} that {does}.",
    "I need a Python function {call} that {does}.",
)
NUMBERS = list(range(2, 100))
SMALL = list(range(2, 31))
TEXTS = ("", "a", "stone", "a cat and a dog", "banana")
LISTS = ([], [5], list(range(40)), ["x", "y", "z"])
INTS = (0, 1, 2, 7, 30, 64, 99, 100, -5, 360)


@dataclass(frozen=True)
class Family:
    """A function family: `{n}` stands for the parameter in every template."""

    call: str
    does: str
    body: str
    parameters: tuple[Any, ...]
    arguments: tuple[Any, ...]


def _family(call: str, does: str, body: str, parameters: Sequence[Any], arguments: tuple[Any, ...]) -> Family:
    return Family(call, does, body, tuple(parameters), arguments)


FAMILIES = (
    _family("add_{n}(x)", "returns x plus {n}", "return x + {n}", NUMBERS, INTS),
    _family("subtract_{n}(x)", "returns x minus {n}", "return x - {n}", NUMBERS, INTS),
    _family("times_{n}(x)", "returns x times {n}", "return x * {n}", NUMBERS, INTS),
    _family("modulo_{n}(x)", "returns the remainder of x divided by {n}", "return x % {n}", NUMBERS, INTS),
    _family("divide_by_{n}(x)", "divides x by {n} and rounds down", "return x // {n}", NUMBERS, INTS),
    _family("is_multiple_of_{n}(x)", "tells whether x is a multiple of {n}", "return x % {n} == 0", NUMBERS, INTS),
    _family("more_than_{n}(x)", "tells whether x is greater than {n}", "return x > {n}", NUMBERS, INTS),
    _family("less_than_{n}(x)", "tells whether x is smaller than {n}", "return x < {n}", NUMBERS, INTS),
    _family("at_most_{n}(x)", "returns x but never more than {n}", "return min(x, {n})", NUMBERS, INTS),
    _family("at_least_{n}(x)", "returns x but never less than {n}", "return max(x, {n})", NUMBERS, INTS),
    _family("first_{n}(items)", "returns the first {n} items of a list", "return items[:{n}]", SMALL, LISTS),
    _family("last_{n}(items)", "returns the last {n} items of a list", "return items[-{n}:]", SMALL, LISTS),
    _family("skip_{n}(items)", "returns a list without its first {n} items", "return items[{n}:]", SMALL, LISTS),
    _family("every_{n}(items)", "returns every item at a step of {n}", "return items[::{n}]", SMALL, LISTS),
    _family("repeat_{n}(text)", "repeats a text {n} times", "return text * {n}", SMALL, TEXTS),
    _family(
        "longer_than_{n}(text)",
        "tells whether a text has more than {n} letters",
        "return len(text) > {n}",
        SMALL,
        TEXTS,
    ),
    _family(
        "starts_with_{n}(text)", "tells whether a text starts with {n}", 'return text.startswith("{n}")', WORDS, TEXTS
    ),
    _family("ends_with_{n}(text)", "tells whether a text ends with {n}", 'return text.endswith("{n}")', WORDS, TEXTS),
    _family("count_{n}(items)", "counts how often {n} is in a list", 'return items.count("{n}")', WORDS, LISTS),
    _family("has_{n}(items)", "tells whether {n} is in a list", 'return "{n}" in items', WORDS, LISTS),
    _family("append_{n}(items)", "returns a list with {n} added at the end", 'return items + ["{n}"]', WORDS, LISTS),
)


def python_functions(rng: random.Random, number: int, side: Side) -> Exercise:
    family = rng.choice(FAMILIES)
    parameter = rng.choice(family.parameters)
    call = family.call.format(n=parameter)
    prompt = rng.choice(REQUESTS).format(call=call, does=family.does.format(n=parameter))
    body = family.body.format(n=parameter)
    reply = f"def {call}:\n    {body}"
    name = call.partition("(")[0]
    other = family.parameters[(family.parameters.index(parameter) + 1) % len(family.parameters)]
    rejected = (
        f"def {call}:\n    {family.body.format(n=other)}",
        f"def {call}:\n    pass",
        f"def f{call.partition(name)[2]}:\n    {body}",
        body,
    )
    fenced = f"```python\n{reply}\n```"
    tests = tuple(_tests(name, body, family, parameter, other))
    key = f"function:{family.call}:{parameter}"
    # A one-digit parameter is easy to carry over, a word hard.
    difficulty = level(len(str(parameter)), 2, 3)
    return Exercise(ask(prompt), reply, key, "code", reply, (reply, fenced), rejected, tests, difficulty=difficulty)


def _tests(name: str, body: str, family: Family, parameter: Any, other: Any) -> list[str]:
    """Asserts for the family's arguments and for arguments near the parameter, where neighbours differ."""
    arguments = list(family.arguments)
    if isinstance(parameter, int) and family.arguments is INTS:
        arguments += [parameter - 1, parameter, parameter + 1, 6 * parameter]
    elif isinstance(parameter, int) and family.arguments is TEXTS:
        arguments += ["t" * parameter, "t" * (parameter + 1)]
    elif family.arguments is TEXTS:
        arguments += [parameter, f"{parameter} {other}", f"{other} {parameter}"]
    elif isinstance(parameter, str):
        arguments += [[parameter], [parameter, other, parameter]]
    variable = family.call.partition("(")[2].rstrip(")")
    right = eval(f"lambda {variable}: {body.removeprefix('return ')}")  # our own template, not a model's code
    return [f"assert {name}({argument!r}) == {right(argument)!r}" for argument in arguments]

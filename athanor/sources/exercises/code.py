"""Exercises with Python functions, and choices by log-likelihood that need no instruction tuning.

Agreement is asked in the manner of BLiMP (Warstadt et al. 2020): ways to go on
that differ in one word, of which grammar allows one. Here they differ at two
places, which makes four of them, so that a guess is right in a quarter. Only
the battery asks them; nothing is trained on them.
"""

from __future__ import annotations

import ast
import keyword
from typing import Any

from athanor.sources.exercises.exercise import TEXTS, WORDS, Draw, Exercise, ask, battery_only, category, level, wording

PARAMETERS = {"numbers": range(2, 100), "small": range(2, 31), "words": WORDS["list"]}
ARGUMENTS = {
    "numbers": [0, 1, 2, 7, 30, 64, 99, 100, -5, 360],
    "lists": [[], [5], list(range(40)), ["x", "y", "z"]],
    "texts": ["", "a", "stone", "a cat and a dog", "banana"],
}
BROKEN_CHOICES = 3
# Replacements of a symbol by one of the same length, so that lengths reveal nothing.
REPLACEMENTS = {"(": "[{", ")": "]}", "[": "({", "]": ")}", ":": ";,", ",": ":;", "=": ":;"}


@category
def python_functions(rng: Draw) -> Exercise:
    """A short Python function with one parameter; the answer is executed against asserts."""
    family = rng.choice(TEXTS["functions"])
    parameters = PARAMETERS[family["parameters"]]
    parameter = rng.choice(parameters)
    call, task, body = (family[name].format(n=parameter) for name in ("call", "does", "body"))
    prompt = wording(rng, "python_functions", call=call, does=task)
    reply = f"def {call}:\n    {body}"
    name, _, arguments_text = call.partition("(")
    other = parameters[(parameters.index(parameter) + 1) % len(parameters)]
    wrong = (
        f"def {call}:\n    {family['body'].format(n=other)}",
        f"def {call}:\n    pass",
        f"def f({arguments_text}:\n    {body}",
        body,
    )
    # A one-digit parameter is easy to carry over, a word hard.
    difficulty = level(len(str(parameter)), 2, 3)
    # From our own template, not a model's code.
    reference = eval(f"lambda {arguments_text.rstrip(')')}: {body.removeprefix('return ')}")
    arguments = [*ARGUMENTS[family["arguments"]], *_near_arguments(family["arguments"], parameter, other)]
    tests = tuple(f"assert {name}({argument!r}) == {reference(argument)!r}" for argument in arguments)
    return ask(
        prompt, reply, f"function:{family['call']}:{parameter}", difficulty, wrong,
        kind="code", accepted=(f"```python\n{reply}\n```",), tests=tests,
    )  # fmt: skip


def _near_arguments(kind: str, parameter: Any, other: Any) -> list[Any]:
    """Arguments of a kind (`ARGUMENTS`) near the parameter, where functions that differ a little differ."""
    if isinstance(parameter, str):
        texts = [parameter, f"{parameter} {other}", f"{other} {parameter}"]
        return texts if kind == "texts" else [[parameter], [parameter, other, parameter]]
    numbers = [parameter - 1, parameter, parameter + 1, 6 * parameter]
    return {"numbers": numbers, "texts": ["t" * parameter, "t" * (parameter + 1)]}.get(kind, [])


def _choice(rng: Draw, context: str, answer: str, wrong: list[str], key: str, difficulty: str) -> Exercise:
    """An item with choices. The right one is equally often first, second and so on: that follows the draw's number."""
    choices = list(wrong)
    rng.shuffle(choices)
    choices.insert(rng.number % (len(wrong) + 1), answer)
    options = {"kind": "likelihood", "held_out": True, "choices": tuple(choices)}
    return ask(context, answer, f"{key}:{context}:{answer}", difficulty, tuple(wrong), **options)


def _pick_pair(rng: Draw, nouns: str) -> Any:
    return rng.choice(TEXTS["agreement"][nouns])


@battery_only
def agreement(rng: Draw) -> Exercise:
    """Agreement of subject and verb. Medium: a noun of the same number stands between; hard: one of the other number."""
    plural, distance = rng.randrange(2), rng.randrange(3)
    subject, other = rng.sample(TEXTS["agreement"]["nouns"], 2)
    context = f"The {subject[plural]}"
    if distance:
        context += f" {_pick_pair(rng, 'between')} the {other[plural if distance == 1 else 1 - plural]}"
    verb, determiner, noun, end = (
        _pick_pair(rng, "verbs"),
        _pick_pair(rng, "determiners"),
        _pick_pair(rng, "nouns"),
        rng.randrange(2),
    )
    answer, *wrong = (f"{verb[v]} {determiner[end]} {noun[n]}." for v in (plural, 1 - plural) for n in (end, 1 - end))
    return _choice(rng, context, answer, wrong, "agreement", level(distance, 1, 2))


@battery_only
def determiners(rng: Draw) -> Exercise:
    """Agreement of determiner and noun. Medium and hard: one or more words stand between."""
    plural, noun, adjective = rng.randrange(2), _pick_pair(rng, "nouns"), _pick_pair(rng, "adjectives")
    start = _pick_pair(rng, "leads").format(d=_pick_pair(rng, "determiners")[plural])
    second_determiner, other, end = _pick_pair(rng, "determiners"), _pick_pair(rng, "nouns"), rng.randrange(2)
    answer, *wrong = (
        f"{noun[n]} and {second_determiner[end]} {other[m]}." for n in (plural, 1 - plural) for m in (end, 1 - end)
    )
    difficulty = level(len(adjective.split()), 1, 2)
    return _choice(rng, f"{start} {adjective}".strip(), answer, wrong, "determiner", difficulty)


@battery_only
def python_syntax(rng: Draw) -> Exercise:
    """Which statement is valid Python. Harder with more symbols in it."""
    a, b, c = rng.sample([word for word in WORDS["list"] if not keyword.iskeyword(word)], 3)
    first, second = rng.sample(range(10, 100), 2)
    statement = rng.choice(TEXTS["statements"]).format(a=a, b=b, c=c, n=first)
    difficulty = level(sum(not (char.isalnum() or char.isspace()) for char in statement), 5, 7)
    wrong = rng.sample(broken_forms(statement), BROKEN_CHOICES)
    return _choice(rng, f"{c} = {second}\n", statement, wrong, "python", difficulty)


def broken_forms(statement: str) -> list[str]:
    """Texts as long as `statement` that Python cannot parse: two neighbouring words swapped, or another symbol."""
    words, forms = statement.split(" "), set()
    for index in range(len(words) - 1):
        forms.add(" ".join([*words[:index], words[index + 1], words[index], *words[index + 2 :]]))
    for index, char in enumerate(statement):
        forms |= {statement[:index] + other + statement[index + 1 :] for other in REPLACEMENTS.get(char, "")}
    return sorted(text for text in forms - {statement} if text.strip() == text and not _parses(text))


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True

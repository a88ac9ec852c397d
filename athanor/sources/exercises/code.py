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

from athanor.sources.exercises.exercise import TEXTS, WORDS, Draw, Exercise, ask, category, level, only_asked, wording

PARAMETERS = {"numbers": range(2, 100), "small": range(2, 31), "words": WORDS["list"]}
ARGUMENTS = {
    "numbers": [0, 1, 2, 7, 30, 64, 99, 100, -5, 360],
    "lists": [[], [5], list(range(40)), ["x", "y", "z"]],
    "texts": ["", "a", "stone", "a cat and a dog", "banana"],
}
BROKEN = 3
OTHER = {"(": "[{", ")": "]}", "[": "({", "]": ")}", ":": ";,", ",": ":;", "=": ":;"}  # so that lengths tell nothing


@category
def python_functions(rng: Draw) -> Exercise:
    """A short Python function with one parameter; the answer is executed against asserts."""
    family = rng.choice(TEXTS["functions"])
    parameters = PARAMETERS[family["parameters"]]
    parameter = rng.choice(parameters)
    call, does, body = (family[name].format(n=parameter) for name in ("call", "does", "body"))
    prompt = wording(rng, "python_functions", call=call, does=does)
    reply = f"def {call}:\n    {body}"
    name, _, rest = call.partition("(")
    other = parameters[(parameters.index(parameter) + 1) % len(parameters)]
    wrong = (
        f"def {call}:\n    {family['body'].format(n=other)}",
        f"def {call}:\n    pass",
        f"def f({rest}:\n    {body}",
        body,
    )
    # A one-digit parameter is easy to carry over, a word hard.
    difficulty = level(len(str(parameter)), 2, 3)
    right = eval(f"lambda {rest.rstrip(')')}: {body.removeprefix('return ')}")  # our own template, not a model's code
    arguments = [*ARGUMENTS[family["arguments"]], *_near(family["arguments"], parameter, other)]
    tests = tuple(f"assert {name}({argument!r}) == {right(argument)!r}" for argument in arguments)
    return ask(
        prompt, reply, f"function:{family['call']}:{parameter}", difficulty, wrong,
        kind="code", accepted=(f"```python\n{reply}\n```",), tests=tests,
    )  # fmt: skip


def _near(arguments: str, parameter: Any, other: Any) -> list[Any]:
    """Arguments near the parameter, where neighbours differ."""
    if isinstance(parameter, str):
        near = [parameter, f"{parameter} {other}", f"{other} {parameter}"]
        return near if arguments == "texts" else [[parameter], [parameter, other, parameter]]
    numbers = [parameter - 1, parameter, parameter + 1, 6 * parameter]
    return {"numbers": numbers, "texts": ["t" * parameter, "t" * (parameter + 1)]}.get(arguments, [])


def _choice(rng: Draw, context: str, right: str, wrong: list[str], key: str, difficulty: str) -> Exercise:
    """The right choice stands at every place equally often: the number of the draw goes round the places."""
    choices = list(wrong)
    rng.shuffle(choices)
    choices.insert(rng.number % (len(wrong) + 1), right)
    more = {"kind": "likelihood", "held_out": True, "choices": tuple(choices)}
    return ask(context, right, f"{key}:{context}:{right}", difficulty, tuple(wrong), **more)


def _two(rng: Draw, nouns: str) -> Any:
    return rng.choice(TEXTS["agreement"][nouns])


@only_asked
def agreement(rng: Draw) -> Exercise:
    """Subject and verb. Medium: a noun of the same number lies between; hard: one of the other number."""
    plural, distance = rng.randrange(2), rng.randrange(3)
    subject, other = rng.sample(TEXTS["agreement"]["nouns"], 2)
    context = f"The {subject[plural]}"
    if distance:
        context += f" {_two(rng, 'between')} the {other[plural if distance == 1 else 1 - plural]}"
    verb, determiner, noun, end = _two(rng, "verbs"), _two(rng, "determiners"), _two(rng, "nouns"), rng.randrange(2)
    right, *wrong = (f"{verb[v]} {determiner[end]} {noun[n]}." for v in (plural, 1 - plural) for n in (end, 1 - end))
    return _choice(rng, context, right, wrong, "agreement", level(distance, 1, 2))


@only_asked
def determiners(rng: Draw) -> Exercise:
    """Determiner and noun. Medium and hard: one or more words lie between."""
    plural, noun, adjective = rng.randrange(2), _two(rng, "nouns"), _two(rng, "adjectives")
    start = _two(rng, "leads").format(d=_two(rng, "determiners")[plural])
    also, other, end = _two(rng, "determiners"), _two(rng, "nouns"), rng.randrange(2)
    right, *wrong = (f"{noun[n]} and {also[end]} {other[m]}." for n in (plural, 1 - plural) for m in (end, 1 - end))
    difficulty = level(len(adjective.split()), 1, 2)
    return _choice(rng, f"{start} {adjective}".strip(), right, wrong, "determiner", difficulty)


@only_asked
def python_syntax(rng: Draw) -> Exercise:
    """Which statement is whole. Harder with more symbols in it."""
    a, b, c = rng.sample([word for word in WORDS["list"] if not keyword.iskeyword(word)], 3)
    first, second = rng.sample(range(10, 100), 2)
    whole = rng.choice(TEXTS["statements"]).format(a=a, b=b, c=c, n=first)
    difficulty = level(sum(not (char.isalnum() or char.isspace()) for char in whole), 5, 7)
    wrong = rng.sample(broken_forms(whole), BROKEN)
    return _choice(rng, f"{c} = {second}\n", whole, wrong, "python", difficulty)


def broken_forms(whole: str) -> list[str]:
    """Texts as long as `whole` that Python cannot parse: two neighbouring words swapped, or another symbol."""
    words, forms = whole.split(" "), set()
    for place in range(len(words) - 1):
        forms.add(" ".join([*words[:place], words[place + 1], words[place], *words[place + 2 :]]))
    for place, char in enumerate(whole):
        forms |= {whole[:place] + other + whole[place + 1 :] for other in OTHER.get(char, "")}
    return sorted(text for text in forms - {whole} if text.strip() == text and not _parses(text))


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True

"""Choices by log-likelihood that need no instruction tuning: agreement in minimal pairs, whole against broken Python.

Agreement is asked in the manner of BLiMP (Warstadt et al. 2020): ways to go on
that differ in one word, of which grammar allows one. Here they differ at two
places, which makes four of them, so that a guess is right in a quarter. Only
the battery asks them; nothing is trained on them.
"""

from __future__ import annotations

import ast
import keyword
import random

from athanor.corpus.exercises.exercise import Exercise, Side, ask, level
from athanor.corpus.exercises.words import WORDS

NOUNS = (
    ("file", "files"), ("key", "keys"), ("value", "values"), ("line", "lines"), ("module", "modules"),
    ("method", "methods"), ("object", "objects"), ("test", "tests"), ("name", "names"), ("class", "classes"),
    ("function", "functions"), ("string", "strings"), ("option", "options"), ("window", "windows"),
    ("process", "processes"), ("server", "servers"), ("package", "packages"), ("message", "messages"),
    ("table", "tables"), ("button", "buttons"), ("teacher", "teachers"), ("farmer", "farmers"), ("dog", "dogs"),
    ("horse", "horses"), ("doctor", "doctors"), ("pilot", "pilots"),
)
# What goes on after the subject, singular and plural, before a determiner and a noun.
VERBS = (
    ("is ready for", "are ready for"), ("was behind", "were behind"), ("has", "have"),
    ("does not need", "do not need"), ("needs", "need"), ("comes before", "come before"),
)
BETWEEN = ("near", "behind", "beside", "next to", "in front of")
DETERMINERS = (("this", "these"), ("that", "those"), ("every", "all"), ("one", "two"), ("each", "many"))
LEADS = (
    "Nobody has seen {d}", "We asked for {d}", "They were looking for {d}", "She paid attention to {d}",
    "You can do without {d}", "I would like to have {d}",
)
ADJECTIVES = ("", "new", "old", "small", "large", "other", "small red", "very old", "new and shiny")
BROKEN = 3
OTHER = {"(": "[{", ")": "]}", "[": "({", "]": ")}", ":": ";,", ",": ":;", "=": ":;"}  # so that lengths tell nothing
LINES = (
    "for {a} in {b}:\n    print({a}, {n})",
    "if {a} not in {b}:\n    {c} = {n}",
    "while {a} < {n}:\n    {a} += {b}",
    "def {a}({b}, {c}={n}):\n    return {b} * {c}",
    "with open({a}) as {b}:\n    {c} = {b}.read({n})",
    "{a} = [{b} + {n} for {b} in {c}]",
    "{a} = {b} if {c} > {n} else None",
    "{a} = {{{b}: {n}, {c}: {b}}}",
    "{a} = lambda {b}, {c}: {b} - {n}",
    "print({a}[{n}], {b} and {c})",
    "assert {a} is not {b} or {c} == {n}",
    "{a}, {b} = {c}[:{n}], {c}",
)


def _choice(
    context: str, right: str, wrong: list[str], number: int, rng: random.Random, key: str, difficulty: str
) -> Exercise:
    """The right choice stands at every place equally often: `number` goes round the places."""
    choices = list(wrong)
    rng.shuffle(choices)
    choices.insert(number % (len(wrong) + 1), right)
    return Exercise(
        ask(context), right, key, "likelihood", right, (right,), tuple(wrong), held_out=True,
        difficulty=difficulty, choices=tuple(choices),
    )


def agreement(rng: random.Random, number: int, side: Side) -> Exercise:
    """Subject and verb. Medium: a noun of the same number lies between; hard: one of the other number."""
    plural, distance = rng.randrange(2), rng.randrange(3)
    subject, other = (nouns for nouns in rng.sample(NOUNS, 2))
    context = f"The {subject[plural]}"
    if distance:
        context += f" {rng.choice(BETWEEN)} the {other[plural if distance == 1 else 1 - plural]}"
    verb, (determiner, noun), end = rng.choice(VERBS), (rng.choice(DETERMINERS), rng.choice(NOUNS)), rng.randrange(2)
    right, *wrong = (
        f"{verb[v]} {determiner[end]} {noun[n]}." for v in (plural, 1 - plural) for n in (end, 1 - end)
    )
    return _choice(context, right, wrong, number, rng, f"agreement:{context}:{right}", level(distance, 1, 2))


def determiners(rng: random.Random, number: int, side: Side) -> Exercise:
    """Determiner and noun. Medium and hard: one or more words lie between."""
    plural, noun, adjective = rng.randrange(2), rng.choice(NOUNS), rng.choice(ADJECTIVES)
    start = rng.choice(LEADS).format(d=rng.choice(DETERMINERS)[plural])
    context = f"{start} {adjective}".strip()
    (also, other), end = (rng.choice(DETERMINERS), rng.choice(NOUNS)), rng.randrange(2)
    right, *wrong = (f"{noun[n]} and {also[end]} {other[m]}." for n in (plural, 1 - plural) for m in (end, 1 - end))
    difficulty = level(len(adjective.split()), 1, 2)
    return _choice(context, right, wrong, number, rng, f"determiner:{context}:{right}", difficulty)


def python_syntax(rng: random.Random, number: int, side: Side) -> Exercise:
    """Which statement is whole. Harder with more symbols in it."""
    a, b, c = rng.sample([word for word in WORDS if not keyword.iskeyword(word)], 3)
    first, second = rng.sample(range(10, 100), 2)
    whole = rng.choice(LINES).format(a=a, b=b, c=c, n=first)
    broken = broken_forms(whole)
    context = f"{c} = {second}\n"
    difficulty = level(sum(not (char.isalnum() or char.isspace()) for char in whole), 5, 7)
    return _choice(context, whole, rng.sample(broken, BROKEN), number, rng, f"python:{context}{whole}", difficulty)


def broken_forms(whole: str) -> list[str]:
    """Texts as long as `whole` that Python cannot parse: two neighbouring words swapped, or another symbol."""
    words, found = whole.split(" "), []
    for place in range(len(words) - 1):
        swapped = [*words[:place], words[place + 1], words[place], *words[place + 2 :]]
        found.append(" ".join(swapped))
    for place, char in enumerate(whole):
        for other in OTHER.get(char, ""):
            found.append(whole[:place] + other + whole[place + 1 :])
    return sorted({text for text in found if text.strip() == text and not _parses(text)} - {whole})


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True

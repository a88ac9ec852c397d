"""Exercises whose answer has to keep a form: yes or no, a JSON object, so many lines; and looking a number up."""

from __future__ import annotations

import json
import random

from athanor.corpus.exercises import lists
from athanor.corpus.exercises.exercise import Exercise, Side, ask, level, numeric
from athanor.corpus.exercises.words import CITIES, COLOURS, JOBS, NAMES, PETS, WORDS

MEMBER = (
    "Are {a} and {b} in this list: {list}? Answer yes or no for each.",
    "Yes or no for each: does the list {list} hold {a} and {b}?",
    "Here is a list: {list}. Are {a} and {b} among its words? Yes or no for each.",
    "Say yes or no twice. Is {a} among {list}, and is {b}?",
)
BOTH = ("Yes, Yes", "Yes, No", "No, Yes", "No, No")
RECORD = (
    "Write this as a JSON object: {pairs}",
    "Turn {pairs} into JSON.",
    "Give me a JSON object with {pairs}.",
    "As JSON, please: {pairs}",
)
FIELDS = {"name": NAMES, "city": CITIES, "job": JOBS, "pet": PETS, "colour": COLOURS}
LINES = (
    "Write {word} on {n} lines.",
    "Write the word {word} {n} times, each time on its own line.",
    "Print {word} and not {other} {n} times, one per line.",
    "Instead of {other}, give me {n} lines that each say {word}.",
)
# Four equal lines are still no run of four equal n-grams with the line break after each, so no answer counts as stuck.
COUNTS = {2: "two", 3: "three", 4: "four"}
TABLE = (
    "{table}. Which number belongs to {name}?",
    "Read this: {table}. How much has {name}?",
    "{table}. What stands beside {name}?",
    "Points: {table}. How many points has {name}?",
)


def _form(prompt: str, reply: str, key: str, checks: tuple[str, ...], rejected: tuple[str, ...], hard: str) -> Exercise:
    return Exercise(ask(prompt), reply, key, "format", reply, (reply,), rejected, difficulty=hard, checks=checks)


def yes_no(rng: random.Random, number: int, side: Side) -> Exercise:
    """Whether each of two words is in a list: the four answers are equally often right. Harder with longer lists."""
    words = rng.sample(WORDS, rng.randint(3, 6))
    inside, outside = rng.sample(words, 2), rng.sample([word for word in WORDS if word not in words], 2)
    (a, first), (b, second) = (rng.choice(((yes, "Yes"), (no, "No"))) for yes, no in zip(inside, outside, strict=True))
    reply = f"{first}, {second}"
    prompt = rng.choice(MEMBER).format(a=a, b=b, list=", ".join(words))
    wrong = (*(text for text in BOTH if text != reply), f"{reply}, as you see.", first, f"{a}, {b}")
    return _form(prompt, reply, lists._key(words), (f"yes_no {reply}",), wrong, level(len(words), 4, 6))


def json_object(rng: random.Random, number: int, side: Side) -> Exercise:
    """One to three fields as a JSON object. Harder with more fields."""
    names = rng.sample(sorted(FIELDS), rng.randint(1, 3))
    record = {name: rng.choice(FIELDS[name]) for name in names}
    pairs = ", ".join(f"{name} {value}" for name, value in record.items())
    reply = json.dumps(record)
    last = names[-1]
    other = rng.choice([value for value in FIELDS[last] if value != record[last]])
    wrong = (json.dumps(record | {last: other}), reply[:-1], json.dumps(list(record.values())), f"JSON: {reply}", pairs)
    return _form(
        rng.choice(RECORD).format(pairs=pairs), reply, f"record:{json.dumps(record, sort_keys=True)}",
        (f"json {reply}",), wrong, level(len(names), 2, 3),
    )


def line_count(rng: random.Random, number: int, side: Side) -> Exercise:
    """A word on two, three or four lines, at times with another that is not to be written. Harder with more lines."""
    word, n = rng.choice(WORDS), rng.choice(sorted(COUNTS))
    other = WORDS[(WORDS.index(word) + 1) % len(WORDS)]
    lines = [word] * n
    wrong = ("\n".join(lines[1:]), "\n".join([*lines, word]), "\n".join([*lines[1:], other]), " ".join(lines))
    prompt = rng.choice(LINES).format(word=word, other=other, n=rng.choice((str(n), COUNTS[n])))
    checks = (f"lines {n}", f"each_line {word}")
    return _form(prompt, "\n".join(lines), f"lines:{word}:{n}", checks, wrong, level(n, 3, 4))


def lookup(rng: random.Random, number: int, side: Side) -> Exercise:
    """The number beside a name in a short table. Harder with longer tables."""
    names = rng.sample(NAMES, rng.randint(3, 6))
    values = rng.sample(range(2, 100), len(names))
    place = rng.randrange(len(names))
    table = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
    prompt = rng.choice(TABLE).format(table=table, name=names[place])
    return numeric(prompt, str(values[place]), f"table:{table}", values[place], level(len(names), 4, 6))

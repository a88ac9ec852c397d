"""Exercises with short lists: copying, counting, formats, order and picking.

All of them share one key, the sorted items, so a list held out for one
request is held out for every other.
"""

from __future__ import annotations

import random
from dataclasses import replace

from athanor.corpus.exercises.exercise import Exercise, Side, ask, exact, level
from athanor.corpus.exercises.words import WORDS

COPY = (
    "Repeat after me: {text}",
    "Say exactly this: {text}",
    "Copy this text: {text}",
    "Write the following words again: {text}",
)
# What of a text is copied: wordings, and the words that are left. One part of the question answers one of them only.
PARTS: tuple[tuple[tuple[str, ...], slice], ...] = (
    (COPY, slice(None)),
    (("Copy only the first two words: {text}", "Write just the first two words of: {text}"), slice(2)),
    (("Copy only the last two words: {text}", "Write just the last two words of: {text}"), slice(-2, None)),
    (("Repeat this without its first word: {text}", "Copy all words but the first: {text}"), slice(1, None)),
    (("Repeat this without its last word: {text}", "Copy all words but the last: {text}"), slice(-1)),
)
COUNT = (
    "How many words are in this list: {list}?",
    "Count the items: {list}",
    "How many items are there? {list}",
    "What is the length of this list: {list}?",
)
BULLETS = (
    "Write {listed} as a bullet list.",
    "Make a bulleted list of {listed}.",
    "Put these into bullet points: {list}",
    "Bullet points, please: {list}",
)
NUMBERED = (
    "Write {listed} as a numbered list.",
    "Number these items: {list}",
    "Make a numbered list of {listed}.",
    "List these with numbers: {list}",
)
COMMAS = (
    "Write {spaced} separated by commas.",
    "Join these words with commas: {spaced}",
    "Turn this into a comma-separated list: {spaced}",
    "Put commas between these words: {spaced}",
)
LINED = (
    "Write {listed} on lines of their own.",
    "Put each of {listed} on a new line.",
    "One item per line, please: {list}",
    "Give every word a line of its own: {list}",
)
REVERSE = (
    "Reverse this list: {list}",
    "Write these in reverse order: {list}",
    "Give me this list backwards: {list}",
    "Put these words in the opposite order: {list}",
)
ORDINALS = ("first", "second", "third", "last")
PICK = (
    "What is the {which} word in this list: {list}?",
    "Give me the {which} item of: {list}",
    "Which word comes {which} in {list}?",
    "Take the {which} element from this list: {list}",
)
SORT = (
    "Sort these numbers: {list}",
    "Put these numbers in ascending order: {list}",
    "Order these from smallest to largest: {list}",
    "Arrange these numbers in increasing order: {list}",
)


def _words(rng: random.Random, low: int, high: int) -> list[str]:
    return rng.sample(WORDS, rng.randint(low, high))


def _key(items: list[str]) -> str:
    return "list:" + ",".join(sorted(items))


def _listed(items: list[str]) -> str:
    return ", ".join(items[:-1]) + " and " + items[-1]


def copying(rng: random.Random, number: int, side: Side) -> Exercise:
    """A list of words, or a part of it; all of it, its first two words and so on are asked equally often."""
    words = _words(rng, 3, 6)
    wordings, part = rng.choice(PARTS)
    reply = " ".join(words[part])
    wrong = (*(" ".join(words[other]) for _, other in PARTS), " ".join(reversed(words[part])))
    return exact(rng.choice(wordings).format(text=" ".join(words)), reply, _key(words), wrong, level(len(words), 4, 6))


def counting(rng: random.Random, number: int, side: Side) -> Exercise:
    """How many words there are. One number has to be said: counting aloud, as a numbered list does, is no answer."""
    words = _words(rng, 2, 7)
    prompt, count = rng.choice(COUNT).format(list=", ".join(words)), len(words)
    numbered = "\n".join(f"{place}. {word}" for place, word in enumerate(words, 1))
    made = Exercise(
        ask(prompt), str(count), _key(words), "format", str(count), (str(count), f"There are {count} words."),
        (str(count + 1), f"There are {count + 10}.", numbered, ", ".join(words)), checks=(f"one_number {count}",),
    )
    return replace(made, difficulty=level(count, 4, 6))


def list_format(rng: random.Random, number: int, side: Side) -> Exercise:
    words = _words(rng, 3, 5)
    forms = {
        "bullets": "\n".join(f"- {word}" for word in words),
        "numbers": "\n".join(f"{place}. {word}" for place, word in enumerate(words, 1)),
        "commas": ", ".join(words),
        "lines": "\n".join(words),
    }
    form = rng.choice(sorted(forms))
    wordings = {"bullets": BULLETS, "numbers": NUMBERED, "commas": COMMAS, "lines": LINED}[form]
    prompt = rng.choice(wordings).format(listed=_listed(words), list=", ".join(words), spaced=" ".join(words))
    reply = forms.pop(form)
    accepted = (reply, reply.replace("- ", "* ")) if form == "bullets" else (reply,)
    rejected = (*forms.values(), reply + reply[-1], " ".join(words[1:]))
    made = Exercise(ask(prompt), reply, _key(words), "list", reply, accepted, rejected)
    return replace(made, difficulty=level(len(words), 4, 5))


def list_reverse(rng: random.Random, number: int, side: Side) -> Exercise:
    words = _words(rng, 3, 4)
    reply = ", ".join(reversed(words))
    prompt = rng.choice(REVERSE).format(list=", ".join(words))
    rejected = (", ".join(words), ", ".join(list(reversed(words))[:-1]))
    made = Exercise(ask(prompt), reply, _key(words), "list", reply, (reply,), rejected)
    return replace(made, difficulty=level(len(words), 4, 5))


def list_pick(rng: random.Random, number: int, side: Side) -> Exercise:
    words = _words(rng, 4, 6)  # of three, the third is the last
    which = rng.choice(ORDINALS)
    answer = words[-1] if which == "last" else words[ORDINALS.index(which)]
    prompt = rng.choice(PICK).format(which=which, list=", ".join(words))
    others = tuple(word for word in words if word != answer)
    return exact(prompt, answer, _key(words), (others[0], others[-1], " ".join(words)), level(len(words), 5, 6))


def sorting(rng: random.Random, number: int, side: Side) -> Exercise:
    numbers = rng.sample(range(1, 100), 3)
    if numbers == sorted(numbers):
        numbers.reverse()  # a sorted list would let copying pass
    reply = ", ".join(map(str, sorted(numbers)))
    prompt = rng.choice(SORT).format(list=", ".join(map(str, numbers)))
    rejected = (", ".join(map(str, sorted(numbers, reverse=True))), ", ".join(map(str, numbers)), str(min(numbers)))
    rejected = tuple(text for text in rejected if text != reply)
    made = Exercise(ask(prompt), reply, _key(list(map(str, numbers))), "list", reply, (reply,), rejected)
    inversions = sum(a > b for place, a in enumerate(numbers) for b in numbers[place + 1 :])
    return replace(made, difficulty=level(inversions, 2, 3))

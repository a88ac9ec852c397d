"""The exercise: one question with its model answer, its content key and what a scorer must take or refuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from athanor.base.errors import InputError
from athanor.text.conversations import Item, Message, Messages
from athanor.text.recipes import recipe

OWN_LICENSE = "CC0-1.0"  # generated from templates of this project
TEXTS = recipe("exercises")
WORDS: dict[str, tuple[str, ...]] = {name: tuple(words.split()) for name, words in TEXTS["words"].items()}


@dataclass(frozen=True)
class Exercise:
    """One question and answer.

    `key` is the content that must not stand on both sides of the line between
    training and battery; it is canonical (an unordered pair is sorted), and
    categories that ask about the same content share its name space, so that a
    sum held out in one of them is held out in all. `held_out` is set where the
    held-out thing is the wording and not the content, and for what only the
    battery asks. The difficulty follows a rule of the generator: easy is what its
    smallest form needs, each step up adds length or one more thing to watch.
    """

    item: Item  # what is asked and what a scorer takes and refuses; its category is the generator's
    reply: str
    key: str
    held_out: bool | None = None
    license: str = OWN_LICENSE


class Draw(random.Random):
    """The random numbers for the next exercise of a category, with its number and the side that it is drawn for."""

    number = 0  # how many draws came before
    battery = False  # whether it is for the battery and not for training
    line_seed = 0  # the seed that divides exercises between the two


Generator = Callable[[Draw], Exercise]
CATEGORIES: dict[str, Generator] = {}
BATTERY_ONLY: dict[str, Generator] = {}  # never trained on: they show what pretraining taught


def category(generator: Generator) -> Generator:
    """Registers a generator of exercises for training and battery under its name."""
    CATEGORIES[generator.__name__] = generator
    return generator


def battery_only(generator: Generator) -> Generator:
    """Registers a generator of battery items under its name."""
    BATTERY_ONLY[generator.__name__] = generator
    return generator


def wording(rng: random.Random, name: str, /, **values: object) -> str:
    """One of the wordings of this name, filled in."""
    if name not in TEXTS["wordings"]:
        fix = f"add '{name}' with a list of wordings under wordings:"
        raise InputError(f"'{name}' has no wordings", where="recipes/python/exercises.yaml", fix=fix)
    return rng.choice(TEXTS["wordings"][name]).format(**values)


def level(size: int, medium: int, hard: int) -> str:
    """The difficulty of a size: easy below `medium`, hard from `hard` on."""
    return "hard" if size >= hard else "medium" if size >= medium else "easy"


def ask(
    prompt: str | Messages, reply: str, key: str, difficulty: str, wrong: tuple[str, ...] = (), *,
    kind: str = "exact", accepted: tuple[str, ...] = (), answer: str | None = None, held_out: bool | None = None,
    license: str = OWN_LICENSE, **item_fields: Any,
) -> Exercise:  # fmt: skip
    """An exercise whose reply is accepted; `wrong` lists answers that are nearly right."""
    messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    if kind in ("exact", "numeric"):
        wrong = tuple(dict.fromkeys((*wrong, "I don't know.")))
    rejected = tuple(text for text in wrong if text and text != reply)
    accepted = tuple(dict.fromkeys((reply, *accepted)))
    item = Item("", messages, kind, answer or reply, accepted, rejected, difficulty=difficulty, **item_fields)
    return Exercise(item, reply, key, held_out, license)


def ask_number(prompt: str, reply: str, key: str, difficulty: str, answer: int) -> Exercise:
    """An exercise whose last number counts; the reply may show its steps."""
    wrong, text = (str(answer + 1), f"The answer is {answer + 10}."), str(answer)
    return ask(prompt, reply, key, difficulty, wrong, kind="numeric", accepted=(text,), answer=text)

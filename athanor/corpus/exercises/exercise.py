"""The exercise: one question with its model answer, its content key and what a scorer must take or refuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from athanor.corpus.conversations import Message

MADE_HERE = "CC0-1.0"  # generated from templates of this project
FROM_PYTHON = "PSF-2.0"  # wording taken from the running interpreter


@dataclass(frozen=True)
class Exercise:
    """One question and answer.

    `key` is the content that must not stand on both sides of the line between
    training and battery; it is canonical (an unordered pair is sorted), and
    categories that ask about the same content share its name space, so that a
    sum held out in one of them is held out in all. `held_out` is set where the
    held-out thing is the wording and not the content, and for what only the
    battery asks. `difficulty` follows a rule of the generator: easy is what its
    smallest form needs, each step up adds length or one more thing to watch.
    """

    prompt: tuple[Message, ...]  # ends with a user message
    reply: str
    key: str
    kind: str  # one of ITEM_KINDS
    answer: str  # what the scorer compares with
    accepted: tuple[str, ...]
    rejected: tuple[str, ...]
    tests: tuple[str, ...] = ()
    held_out: bool | None = None
    license: str = MADE_HERE
    difficulty: str = "medium"  # one of DIFFICULTIES
    checks: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """Which side of the line an exercise is drawn for, and the seed that drew the line."""

    battery: bool
    seed: int


# (rng, number of the draw, side) -> Exercise
Draw = Callable[[random.Random, int, Side], Exercise]


def level(size: int, medium: int, hard: int) -> str:
    """The difficulty of a size: easy below `medium`, hard from `hard` on."""
    return "hard" if size >= hard else "medium" if size >= medium else "easy"


def ask(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def numeric(prompt: str, reply: str, key: str, answer: int, difficulty: str) -> Exercise:
    """An exercise whose last number counts; the reply may show its steps."""
    wrong = (str(answer + 1), f"The answer is {answer + 10}.", "I don't know.")
    accepted = tuple(dict.fromkeys((reply, str(answer))))
    return Exercise(ask(prompt), reply, key, "numeric", str(answer), accepted, wrong, difficulty=difficulty)


def exact(
    prompt: str | tuple[Message, ...], reply: str, key: str, wrong: tuple[str, ...], difficulty: str
) -> Exercise:
    """An exercise with one right text; `wrong` lists answers that are nearly right."""
    messages = ask(prompt) if isinstance(prompt, str) else prompt
    rejected = tuple(dict.fromkeys(text for text in (*wrong, "I don't know.") if text and text != reply))
    return Exercise(messages, reply, key, "exact", reply, (reply,), rejected, difficulty=difficulty)

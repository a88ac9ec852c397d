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
    held-out thing is the wording and not the content.
    """

    prompt: tuple[Message, ...]  # ends with a user message
    reply: str
    key: str
    kind: str  # exact, numeric, list or code
    answer: str  # what the scorer compares with
    accepted: tuple[str, ...]
    rejected: tuple[str, ...]
    tests: tuple[str, ...] = ()
    held_out: bool | None = None
    license: str = MADE_HERE


# (rng, number of the draw, whether the battery asks) -> Exercise
Draw = Callable[[random.Random, int, bool], Exercise]


def ask(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def numeric(prompt: str, reply: str, key: str, answer: int) -> Exercise:
    """An exercise whose last number counts; the reply may show its steps."""
    wrong = (str(answer + 1), f"The answer is {answer + 10}.", "I don't know.")
    return Exercise(ask(prompt), reply, key, "numeric", str(answer), (reply, str(answer)), wrong)


def exact(prompt: str | tuple[Message, ...], reply: str, key: str, wrong: tuple[str, ...]) -> Exercise:
    """An exercise with one right text; `wrong` lists answers that are nearly right."""
    messages = ask(prompt) if isinstance(prompt, str) else prompt
    rejected = tuple(dict.fromkeys(text for text in (*wrong, "I don't know.") if text and text != reply))
    return Exercise(messages, reply, key, "exact", reply, (reply,), rejected)

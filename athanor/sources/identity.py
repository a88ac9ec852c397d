"""What the assistant says of itself, and that it does not know what does not exist (recipes/python/identity.yaml)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from athanor.sources.instruct_params import IdentitySource
from athanor.text.conversations import Conversation, Message
from athanor.text.documents import split_of
from athanor.text.recipes import recipe

LICENSE = "CC0-1.0"
PAIRED_SHARE = 4  # one two-turn conversation for so many single ones
TEXTS = recipe("identity")


def conversations(source: IdentitySource, seed: int, val_fraction: float) -> list[Conversation]:
    """At most `repeats` wordings of every topic, as many questions on each kind of invented thing, some in two turns.

    The split goes by the question, so that validation asks in wordings that
    training lacks.
    """
    rng = random.Random(f"{seed}/{source.name}")
    singles = [
        (question, rng.choice(topic["answers"]))
        for topic in TEXTS["topics"]
        for question in rng.sample(topic["questions"], min(source.repeats, len(topic["questions"])))
    ]
    names = invented(rng)
    for topic in TEXTS["unknown"]:
        for _, question in zip(range(source.repeats), itertools.cycle(topic["questions"])):
            name = next(names)
            singles.append((question.format(x=name), rng.choice(topic["answers"]).format(x=name)))
    rng.shuffle(singles)
    sides: dict[str, list[tuple[str, str]]] = {"train": [], "val": []}
    for pair in singles:
        sides[split_of(pair[0], val_fraction)].append(pair)
    rows = []
    for split, questions in sides.items():
        rows += [_conversation(source, split, [pair]) for pair in questions]
        pairs = [rng.sample(questions, 2) for _ in range(len(questions) // PAIRED_SHARE)]
        rows += [_conversation(source, split, pair) for pair in pairs if pair[0][1] != pair[1][1]]
    return rows


def invented(rng: random.Random) -> Iterator[str]:
    """Invented names, each once; with numbers added when all have been used."""
    names = ["".join(syllables) for syllables in itertools.product(*TEXTS["syllables"])]
    rng.shuffle(names)
    yield from names
    for number in itertools.count(2):
        yield from (f"{name} {number}" for name in names)


def _conversation(source: IdentitySource, split: str, turns: list[tuple[str, str]]) -> Conversation:
    messages = [m for question, answer in turns for m in (Message("user", question), Message("assistant", answer))]
    return Conversation(tuple(messages), source.name, LICENSE, split, f"identity:{turns[0][0]}")

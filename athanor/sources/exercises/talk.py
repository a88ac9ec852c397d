"""What people say first, what the assistant answers, and held-out questions of that kind (recipes/python/identity.yaml).

A topic is a list of questions with any of a few answers, drawn anew for each row:
an answer that the question decided would have to be learned by heart for each of
them. Some questions of each topic are the battery's alone; its seed says which.
How they are typed varies on both sides.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from athanor.base.artifacts import digest
from athanor.sources.exercises import facts
from athanor.sources.exercises.exercise import OWN_LICENSE, Draw, Exercise, ask, battery_only, level
from athanor.text.conversations import Message
from athanor.text.questions import WIDE_MARKS
from athanor.text.recipes import recipe

TEXTS = recipe("identity")
TOPICS: dict[str, Any] = TEXTS["topics"]
ALWAYS_TAUGHT = 6  # the questions at the head of a topic, which most people ask; they come three times as often
HELD_OUT_SHARE = 5  # one question of so many of a topic is the battery's
NEAR_WORDS = 3  # questions of so many words that stand within another are no held-out wording of their own
MAX_ANSWER_WORDS = 30
SHORT_WORDS = 10  # accepted answers and the turns before a question: no 13-gram may join an item to training rows


def function_facts() -> facts.Facts:
    return tuple(TEXTS["functions"].items())


FACTS: dict[str, Callable[[], facts.Facts]] = {
    "status": facts.status_facts,
    "error": facts.error_facts,
    "function": function_facts,
}


@dataclass(frozen=True)
class About:
    """What is true of the model that will answer."""

    texts: str = "Python's standard library"
    made: str = "trained from scratch"
    skills: tuple[str, ...] = tuple(dict.fromkeys(TEXTS["skills"].values()))
    python_only: bool = True
    own_text: bool = False  # it was trained on text that may tell of anything

    def fill(self, topic: str, number: int, values: dict[str, str]) -> str | None:
        """An answer of a topic, or None where it says what is not known of this model."""
        skills = [self.skills[(3 * number + place) % len(self.skills)] for place in range(3)] if self.skills else []
        known = dict(zip("abc", skills, strict=False)) if len(set(skills)) == 3 else {}
        known["open" if self.own_text else "closed"] = ""
        try:
            return TOPICS[topic]["answers"][number].format(texts=self.texts, made=self.made, **known, **values)
        except KeyError:
            return None

    def answers(self, topic: str, values: dict[str, str]) -> list[str]:
        filled = (self.fill(topic, number, values) for number in range(len(TOPICS[topic]["answers"])))
        return [answer for answer in filled if answer is not None]

    def topics(self) -> list[str]:
        return [name for name, topic in TOPICS.items() if self.python_only or "only" not in topic]


class Turn(NamedTuple):
    """A question as it is typed, with its answer; `asked` is the question as the recipe has it."""

    topic: str
    asked: str
    question: str
    answer: str
    values: dict[str, str]

    @property
    def messages(self) -> tuple[Message, Message]:
        return Message("user", self.question), Message("assistant", self.answer)

    @property
    def license(self) -> str:
        return facts.FROM_PYTHON if TOPICS[self.topic].get("values") in ("status", "error") else OWN_LICENSE


def turn(rng: random.Random, topic: str, about: About, battery_seed: int, held_out: bool = False) -> Turn:
    """A question of one side of the line, and its answer."""
    held = held_out_questions(topic, battery_seed)
    usual = TOPICS[topic]["questions"][:ALWAYS_TAUGHT]
    taught = [text for text in TOPICS[topic]["questions"] if text not in held]
    asked = rng.choice(held if held_out else [*taught, *usual, *usual])
    typed = as_typed(rng, asked, TOPICS[topic]["category"] != "first_words")
    values = _values(rng, TOPICS[topic].get("values"))
    if typed.islower() and "fact" not in values and rng.random() < 0.5:
        values = {name: value.lower() for name, value in values.items()}
    answers = about.answers(topic, values)
    return Turn(topic, asked, typed.format(**values), rng.choice(answers), values)


def _values(rng: random.Random, kind: str | None) -> dict[str, str]:
    if kind in FACTS:
        name, fact = rng.choice(FACTS[kind]())
        return {"x": name, "fact": fact}
    if kind == "invented":
        return {"x": "".join(map(rng.choice, TEXTS["syllables"]))}
    return {"x": rng.choice(TEXTS["values"][kind])} if kind else {}


@functools.cache
def _questions() -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(topic["questions"] for topic in TOPICS.values())))


def words_of(text: str) -> str:
    """The words of a text in small letters, with a space on both sides."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


@functools.cache
def held_out_questions(topic: str, seed: int) -> tuple[str, ...]:
    """The questions that only the battery asks: no usual one, and none that stands within another or has another in it.

    As far as there are such, every word of theirs is taught in another question of the topic: a small model
    cannot guess what a word means that it has hardly seen.
    """
    others = [words_of(text) for text in _questions()]

    def stands_alone(text: str) -> bool:
        words = words_of(text)
        pairs = [(words, other) if len(words) < len(other) else (other, words) for other in others if other != words]
        return not any(short in long for short, long in pairs if len(short.split()) >= NEAR_WORDS)

    questions = TOPICS[topic]["questions"]
    candidates = sorted(filter(stands_alone, questions[ALWAYS_TAUGHT:]), key=lambda text: digest([seed, text]))
    held: list[str] = []
    for known in (True, False):
        for text in candidates:
            taught = {word for other in questions if other not in (*held, text) for word in words_of(other).split()}
            wanted = max(2, len(questions) // HELD_OUT_SHARE) if known else 2
            if len(held) < wanted and text not in held and (not known or taught >= set(words_of(text).split())):
                held.append(text)
    return tuple(held)


def as_typed(rng: random.Random, text: str, opened: bool) -> str:
    """A question as people type it: with an opening if `opened`, shortened, in other letters, without its mark, mistyped.

    A place in braces is left as it is.
    """
    if opened and rng.random() < 0.15:
        text = rng.choice(TEXTS["openers"]) + (text if text.startswith("I ") else text[0].lower() + text[1:])
    known = [(long, short) for long, short in TEXTS["shortened"].items() if re.search(rf"\b{long}\b", text)]
    if known and rng.random() < 0.25:
        long, short = rng.choice(known)
        text = re.sub(rf"\b{long}\b", short, text, count=1)
    body = text.rstrip("?.!" + WIDE_MARKS)
    mark = text[len(body) :]
    if mark and opened and rng.random() < 0.06:
        body += rng.choice(TEXTS["enders"])
    if rng.random() < 0.05:
        body = _mistyped(rng, body)
    if rng.random() < 0.4:
        body = body.lower()
    elif "{" not in body and rng.random() < 0.04:
        body = body.upper()
    if rng.random() < 0.35:
        marks = ("", "", "", "!", "??") if mark == "?" else ("", "", "!", ".") if mark else ("!", "!", ".")
        mark = rng.choice(marks) if (mark or body)[-1:].isascii() else ""
    return body + mark


def _mistyped(rng: random.Random, text: str) -> str:
    """With two letters of a longer word in the wrong order, or one of them twice or not at all."""
    places = [match.start() for match in re.finditer(r"(?<![{\w])[A-Za-z]{4,}(?![}\w])", text)]
    if not places:
        return text
    at = rng.choice(places) + rng.randint(1, 2)
    first, second = text[at], text[at + 1]
    return text[:at] + rng.choice((second + first, first + first + second, second)) + text[at + 2 :]


def before(rng: random.Random, topic: str, about: About) -> str | None:
    """A topic that this one may follow; None for a topic that begins a conversation."""
    after = [name for name in TOPICS[topic].get("after", ()) if name in about.topics()]
    return rng.choice(after) if after else None


def weighted(names: Iterable[str]) -> list[str]:
    return [name for name in names for _ in range(TOPICS[name].get("weight", 1))]


def _item(rng: Draw, category: str) -> Exercise:
    """A held-out question of one of the category's topics; a right answer has a word of that topic's.

    It names nobody and nothing that was not asked for.
    """
    about = About()
    topics = [name for name, topic in TOPICS.items() if topic["category"] == category]
    if any(TOPICS[name].get("values") in FACTS for name in topics):
        topics = weighted(topics)  # so that much of what is asked is inside; else every topic counts alike
    random.Random(category).shuffle(topics)
    asked = turn(rng, topics[rng.number % len(topics)], about, rng.line_seed, held_out=True)
    messages = (*_short_history(rng, asked.topic, about), asked.messages[0])
    key, difficulty = f"{category}:{asked.topic}:{asked.asked}", level(len(asked.question.split()), 4, 6)
    other = turn(rng, rng.choice([name for name in topics if _marks(name) != _marks(asked.topic)]), about, 0).answer
    if "fact" in asked.values:
        refusals = ("I do not know that.", other)
        return ask(messages, asked.answer, key, difficulty, refusals, held_out=True, license=asked.license)
    accepted = [text for text in about.answers(asked.topic, asked.values) if len(text.split()) <= SHORT_WORDS]
    checks = [f"mentions {'|'.join(_marks(asked.topic))}", f"max_words {MAX_ANSWER_WORDS}"]
    wrong = ["Errors should never pass silently.", " ".join(accepted[:1] * (MAX_ANSWER_WORDS + 1))]
    if name := asked.values.get("x"):
        checks.append(f"names_in {name}")
        wrong += [f"{accepted[0]} So says Nobody.", *(text.replace(name, "Zorx") for text in accepted if name in text)]
    return ask(
        messages, accepted[0], key, difficulty, tuple(wrong), kind="format", accepted=tuple(accepted),
        checks=tuple(checks), held_out=True,
    )  # fmt: skip


def _marks(topic: str) -> tuple[str, ...]:
    return TOPICS[topic].get("marks", ())


def _short_history(rng: Draw, topic: str, about: About) -> tuple[Message, ...]:
    name = before(rng, topic, about)
    while name:
        messages = turn(rng, name, about, rng.line_seed).messages
        if sum(len(message.content.split()) for message in messages) <= SHORT_WORDS:
            return messages
        name = before(rng, topic, about)
    return ()


@battery_only
def identity(rng: Draw) -> Exercise:
    """What the assistant is; every topic has an answer of its own."""
    return _item(rng, "identity")


@battery_only
def first_words(rng: Draw) -> Exercise:
    """Greetings, thanks, goodbyes, what it can do, and what people say after an answer."""
    return _item(rng, "first_words")


@battery_only
def unknown(rng: Draw) -> Exercise:
    """Questions outside of what it learned, and questions inside that are asked in the same ways and need an answer."""
    return _item(rng, "unknown")

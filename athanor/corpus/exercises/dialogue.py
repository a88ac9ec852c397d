"""Exercises over several turns, and the small talk that joins exercises into longer conversations."""

from __future__ import annotations

import random

from athanor.corpus.conversations import Message
from athanor.corpus.exercises.exercise import Exercise, Side, exact
from athanor.corpus.exercises.words import CITIES, COLOURS, JOBS, NAMES, PETS

SYSTEM = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a small model that answers short questions.",
    "Be precise and stop when the answer is complete.",
    "You answer questions about Python, numbers and lists.",
)
SMALL_TALK = (
    (("Thanks!", "Thank you.", "Great, thanks.", "Thank you very much!"), "You're welcome!"),
    (("Hello!", "Hi there.", "Good morning.", "Hey!"), "Hello! What can I do for you?"),
    (("Bye!", "Goodbye.", "That's all for today.", "See you later."), "Goodbye!"),
)
# what is told, how it is asked for, the answer, and what may be told; {v} is what has to be remembered
MEMORIES = (
    ("I live in {v}.", ("Where do I live?", "Which city do I live in?"), "You live in {v}.", CITIES),
    ("I work as a {v}.", ("What is my job?", "What do I work as?"), "You work as a {v}.", JOBS),
    ("I have a {v}.", ("Which pet do I have?", "What animal do I have?"), "You have a {v}.", PETS),
    ("I like {v}.", ("Which colour do I like?", "What colour is my favourite?"), "You like {v}.", COLOURS),
)
GREETINGS = ("My name is {name}.", "I am {name}.", "Hello, I'm {name}.", "Call me {name}.")
NAME_QUESTIONS = ("What is my name?", "Do you remember my name?", "What am I called?", "Who am I?")


def memory(rng: random.Random, number: int, side: Side) -> Exercise:
    """The user tells a name and one more thing, and later asks for one of the two."""
    name = rng.choice(NAMES)
    tell, questions, answer, values = rng.choice(MEMORIES)
    value = rng.choice(values)
    others = [other for other in values if other != value]
    history = (
        Message("user", f"{rng.choice(GREETINGS).format(name=name)} {tell.format(v=value)}"),
        # Short, so that no 13 words in a row leave out the name or the value: those would be a twin in training.
        Message("assistant", f"Hello {name}!"),
    )
    if rng.random() < 0.25:  # the name stands in every conversation, so "the name" may not answer most questions
        other = rng.choice([other for other in NAMES if other != name])
        question, reply = rng.choice(NAME_QUESTIONS), f"Your name is {name}."
        wrong, difficulty = (f"Your name is {other}.", "Your name is Athanor.", value), "easy"
    else:
        question, reply = rng.choice(questions), answer.format(v=value)
        wrong, difficulty = (answer.format(v=rng.choice(others)), name), "medium"
    return exact((*history, Message("user", question)), reply, f"person:{name}:{value}", wrong, difficulty)


def small_talk(rng: random.Random, kind: int) -> tuple[Message, Message]:
    """One small exchange; `kind` 0 thanks, 1 greets, 2 says goodbye."""
    questions, reply = SMALL_TALK[kind]
    return Message("user", rng.choice(questions)), Message("assistant", reply)

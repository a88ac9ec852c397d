"""Conversations in which people greet, ask what the assistant is, and ask what it does not know (recipes/python/identity.yaml)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from athanor.sources.exercises import talk
from athanor.sources.exercises.exercise import OWN_LICENSE
from athanor.sources.exercises.talk import TEXTS, TOPICS, About, Turn
from athanor.sources.instruct_params import (
    ExercisesSource,
    IdentitySource,
    InstructParams,
    InstructSource,
    MessagesSource,
)
from athanor.sources.names import names_and_sentences
from athanor.sources.params import DocumentSource, PythonSource
from athanor.text.conversations import Conversation, Message
from athanor.text.documents import split_of

DIALOGUE_SHARE = 4  # one conversation of two or three turns for so many single ones
POLITE = ("hello", "thanks", "bye")  # the topics that stand around another one
IN_SMALL_LETTERS = 0.3  # of the questions about names: names, too, are typed so
# Of the rows on one's own text: a sentence of it, a question about the world, and a sum where no exercise teaches to add.
SENTENCE_EVERY, WORLD_EVERY, SUM_EVERY = 8, 4, 3
WORLD = ("person", "place", "work")  # topics of the latter
TRIES = 50  # draws of a turn for the side of the line on which a conversation is
MODEL_CARD = "the texts that my model card lists"
OWN_SKILL = "answer short questions about my texts"  # with text and conversations of one's own


def about(source: IdentitySource, documents: Sequence[DocumentSource], chats: Sequence[InstructSource]) -> About:
    """What a model says of its texts and skills, so that it is true for the sources at hand."""
    python = [isinstance(document, PythonSource) for document in documents]
    taught = {
        name for chat in chats if isinstance(chat, ExercisesSource) for name, rows in chat.categories.items() if rows
    }
    own = [OWN_SKILL for chat in chats if isinstance(chat, MessagesSource) and chat.files and not all(python)]
    skills = tuple(dict.fromkeys([*own, *(phrase for name, phrase in TEXTS["skills"].items() if name in taught)]))
    if not source.from_scratch or not any(python):
        made = "trained from scratch" if source.from_scratch else "fine-tuned"
        return About(MODEL_CARD, made, skills, python_only=False, own_text=source.from_scratch)
    if all(python):
        return About(skills=skills)
    return About("Python's standard library and other texts", skills=skills, python_only=False, own_text=True)


def conversations(
    source: IdentitySource, documents: Sequence[DocumentSource], instruct: InstructParams, battery_seed: int
) -> list[Conversation]:
    """`repeats` questions of every topic, more of those with a weight, and some conversations of several turns.

    The split goes by the question, so that validation asks in wordings that
    training lacks; all turns of a conversation lie on one side.
    """
    rng, told = random.Random(f"{instruct.seed}/{source.name}"), about(source, documents, instruct.sources)
    names = talk.weighted(told.topics())
    beginnings = [name for name in names if "after" not in TOPICS[name] and name not in POLITE]
    topics = [[name] for name in names for _ in range(source.repeats)]
    for _ in range(len(topics) // DIALOGUE_SHARE):
        topic = rng.choice(beginnings)
        ends = [name for name in told.topics() if topic in TOPICS[name].get("after", ())]
        topics.append([*rng.choice(((), ("hello",))), topic, rng.choice((*ends, "thanks", "bye"))])
    rows = []
    for wanted in topics:
        earlier = talk.before(rng, wanted[0], told)
        turns = _turns(rng, [earlier, *wanted] if earlier else wanted, instruct.val_fraction, battery_seed, told)
        if turns:
            messages = tuple(message for turn in turns for message in turn.messages)
            key = " | ".join(f"identity:{turn.asked}" for turn in turns)
            licenses = " AND ".join(sorted({turn.license for turn in turns}))
            rows.append(Conversation(messages, source.name, licenses, _side(turns[-1], instruct.val_fraction), key))
    rng.shuffle(rows)
    return rows + _about_text(source, documents, instruct)


def _about_text(
    source: IdentitySource, documents: Sequence[DocumentSource], instruct: InstructParams
) -> list[Conversation]:
    """Questions about what one's own text tells of, and others that nobody has taught the answers to; and its sentences."""
    found, sentences = names_and_sentences(documents) if source.text_rows else ([], [])
    rng, rows, known = random.Random(f"{instruct.seed}/{source.name}/text"), [], TEXTS["text"]
    adds = TEXTS["skills"]["addition"] in about(source, documents, instruct.sources).skills
    for number in range(source.text_rows if sentences else 0):
        x, y = rng.sample(found, 2) if len(found) > 1 else ("", "")
        asked, answers = rng.choice(known["questions"]), known["answers"]
        if number % SENTENCE_EVERY == 0:
            asked, answers = rng.choice(sentences), known["reads"]
        elif not adds and number % SUM_EVERY == 0:
            asked, answers = rng.choice(known["sums"]), known["no_sums"]
            x, y = (str(rng.randrange(rng.choice((10, 100)))) for _ in "xy")
        elif not x or number % WORLD_EVERY == 0:
            topic = TOPICS[rng.choice(WORLD)]
            asked, x = (
                rng.choice(topic["questions"][: talk.ALWAYS_TAUGHT]),
                rng.choice(TEXTS["values"][topic["values"]]),
            )
        question = asked if answers is known["reads"] else talk.as_typed(rng, asked, True).format(x=x, y=y)
        if rng.random() < IN_SMALL_LETTERS:
            question = question.lower()
        messages = (Message("user", question), Message("assistant", rng.choice(answers)))
        key = f"identity:{asked}"
        rows.append(Conversation(messages, source.name, OWN_LICENSE, split_of(key, instruct.val_fraction), key))
    return rows


def _side(turn: Turn, val_fraction: float) -> str:
    return split_of(f"identity:{turn.asked}", val_fraction)


def _turns(
    rng: random.Random, topics: Sequence[str], val_fraction: float, battery_seed: int, told: About
) -> list[Turn]:
    """A turn on each topic, all on the side of the last one; none if that side lacks a topic."""
    turns = [talk.turn(rng, topics[-1], told, battery_seed)]
    side = _side(turns[0], val_fraction)
    for topic in reversed(topics[:-1]):
        drawn = (talk.turn(rng, topic, told, battery_seed) for _ in range(TRIES))
        found = next((turn for turn in drawn if _side(turn, val_fraction) == side), None)
        if found is None:
            return []
        turns.insert(0, found)
    return turns

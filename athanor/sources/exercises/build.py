"""Training conversations and battery items from the same generators, divided by content key before anything else."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from athanor.base.artifacts import digest
from athanor.base.errors import GateError, ParamsError, suggest
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises import code, facts, lists, numbers, talk  # noqa: F401  (they register their categories)
from athanor.sources.exercises.exercise import BATTERY_ONLY, CATEGORIES, OWN_LICENSE, Draw, Exercise, wording
from athanor.sources.exercises.written import read_written
from athanor.sources.instruct_params import ExercisesSource
from athanor.text.conversations import Conversation, Item, Message
from athanor.text.documents import split_of

MAX_MISSES = 20_000  # draws in a row without a new exercise before a category counts as exhausted
MAX_JOINED_EXERCISES = 3  # exercises in one multi-turn conversation
MAX_MULTI_TURN_CHARS = 500  # keeps joined conversations inside a context of 256 tokens


def is_held_out(exercise: Exercise, battery: BatteryParams) -> bool:
    """Whether an exercise belongs to the battery; a pure function of its key, the seed and the fraction."""
    if exercise.held_out is not None:
        return exercise.held_out
    return split_of(f"battery/{battery.seed}/{exercise.key}", battery.held_out_fraction) == "val"


def draw_exercises(category: str, count: int, seed: str, held_out: bool, battery: BatteryParams) -> list[Exercise]:
    """`count` exercises of one side of the line; battery ones have distinct prompts.

    ParamsError when the category does not hold so many.
    """
    draws = {**CATEGORIES, **BATTERY_ONLY} if held_out else CATEGORIES
    if category in BATTERY_ONLY and not held_out:
        raise ParamsError("only the battery asks this", where=f"categories.{category}", fix="remove it from instruct")
    if category not in draws:
        raise ParamsError("unknown exercise category", where=f"categories.{category}", fix=suggest(category, draws))
    rng = Draw(f"{seed}/{category}/{'battery' if held_out else 'training'}")
    rng.battery, rng.line_seed = held_out, battery.seed
    exercises: list[Exercise] = []
    questions: set[tuple[object, ...]] = set()
    misses = 0
    while len(exercises) < count and misses < MAX_MISSES:
        exercise = draws[category](rng)
        rng.number += 1
        # Facts are few and meant to repeat in training; everything else is asked once.
        repeats = exercise.held_out is False
        if is_held_out(exercise, battery) == held_out and (repeats or exercise.item.question not in questions):
            questions.add(exercise.item.question)
            exercises.append(exercise)
            misses = 0
        else:
            misses += 1
    if len(exercises) == count:
        return exercises
    raise ParamsError(
        f"only {len(exercises)} different exercises, {count} wanted",
        where=f"categories.{category}",
        fix="lower the count",
    )


def training_conversations(
    source: ExercisesSource, seed: int, val_fraction: float, battery: BatteryParams
) -> list[Conversation]:
    """All conversations of an exercises source, in a seeded order, none of them held out for the battery.

    Train and validation are divided by exercise key; the parts of a
    multi-turn conversation all lie on one side.
    """
    rng = random.Random(f"{seed}/{source.name}/build")
    pool = [
        exercise
        for category, count in sorted(source.categories.items())
        for exercise in draw_exercises(category, count, f"{seed}/{source.name}", False, battery)
    ]

    def split(exercise: Exercise) -> str:
        return split_of(f"validation/{seed}/{exercise.key}", val_fraction)

    conversations = [_conversation([exercise], split(exercise), source, rng, battery.seed) for exercise in pool]
    sides = {"train": [], "val": []}
    for exercise in pool:
        sides[split(exercise)].append(exercise)
    for _ in range(source.multi_turn_rows):
        side = "val" if len(sides["val"]) >= MAX_JOINED_EXERCISES and rng.random() < val_fraction else "train"
        exercises, chars_left = [], MAX_MULTI_TURN_CHARS
        for exercise in rng.sample(sides[side], min(rng.choice((1, 2, 2, MAX_JOINED_EXERCISES)), len(sides[side]))):
            size = sum(len(message.content) for message in exercise.item.prompt) + len(exercise.reply)
            if not exercises or size <= chars_left:
                exercises.append(exercise)
                chars_left -= size
        conversations.append(_conversation(exercises, side, source, rng, battery.seed, chatty=True))
    rng.shuffle(conversations)
    return conversations


def _conversation(
    exercises: list[Exercise],
    split: str,
    source: ExercisesSource,
    rng: random.Random,
    battery_seed: int,
    chatty: bool = False,
) -> Conversation:
    messages: list[Message] = []
    if rng.random() < source.system_fraction:
        messages.append(Message("system", wording(rng, "system")))
    if chatty and rng.random() < 0.2:
        messages += talk.turn(rng, "hello", talk.About(), battery_seed).messages
    for exercise in exercises:
        messages += [*exercise.item.prompt, Message("assistant", exercise.reply)]
    if chatty and (len(exercises) == 1 or rng.random() < 0.5):
        end = "thanks" if rng.random() < 0.7 else "bye"
        messages += talk.turn(rng, end, talk.About(), battery_seed).messages
    licenses = sorted({exercise.license for exercise in exercises} | {OWN_LICENSE})
    key = " | ".join(exercise.key for exercise in exercises)
    return Conversation(tuple(messages), source.name, " AND ".join(licenses), split, key)


def battery_items(battery: BatteryParams) -> list[Item]:
    """The held-out items, generated and written, sorted by category and id."""
    items = [
        replace(exercise.item, category=category)
        for category, count in sorted(battery.categories.items())
        for exercise in draw_exercises(category, count, str(battery.seed), True, battery)
    ]
    if battery.written is not None:
        items += read_written(battery.written, battery.seed)
    return divide(sorted(items, key=lambda item: (item.category, item.id)), battery)


def divide(items: list[Item], battery: BatteryParams) -> list[Item]:
    """The items with their split: the same share of every category, chosen by seed and question, is for development."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.category, []).append(item)
    chosen = {
        item.question
        for group in groups.values()
        for item in sorted(group, key=lambda item: digest([battery.seed, item.id]))[
            : min(round(len(group) * battery.development_fraction), len(group) - 1)
        ]
    }
    return [replace(item, split="development" if item.question in chosen else "test") for item in items]


def check_held_out(conversations: Mapping[str, Iterable[Conversation]], items: Sequence[Item]) -> int:
    """GateError when a held-out question stands in a conversation of any source, alone or after the same history.

    Returns the number of questions compared. Near twins are the business of
    the generators (they divide by content key) and of `clean`.
    """
    held_out = {item.prompt: item for item in items}
    compared = 0
    for name, rows in conversations.items():
        for row in rows:
            for number, message in enumerate(row.messages):
                if message.role != "user":
                    continue
                compared += 1
                item = held_out.get(row.messages[: number + 1]) or held_out.get((message,))
                if item is not None:
                    raise GateError(
                        "battery held out",
                        f"a question of the battery ({item.category}) is in the instruction source '{name}': "
                        f"{message.content[:80]!r}",
                        where=f"instruct.sources ({name})",
                        fix="remove it from the source, or reword the question",
                    )
    return compared

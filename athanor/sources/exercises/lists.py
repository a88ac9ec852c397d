"""Exercises with short lists (copying, counting, order, picking) and with forms that an answer has to keep.

Those on lists of words share one key, the sorted items, so a list held out for
one request is held out for every other.
"""

from __future__ import annotations

import json

from athanor.sources.exercises.exercise import TEXTS, WORDS, Draw, Exercise, ask, category, level, wording
from athanor.text.conversations import Message

ORDINALS = ("first", "second", "third", "last")
FIELDS = {"name": "names", "city": "cities", "job": "jobs", "pet": "pets", "colour": "colours"}
# Four equal lines are still no run of four equal n-grams with the line break after each, so no answer counts as stuck.
COUNTS = {2: "two", 3: "three", 4: "four"}


def _words(rng: Draw, low: int, high: int) -> list[str]:
    return rng.sample(WORDS["list"], rng.randint(low, high))


def list_key(items: list[str]) -> str:
    return "list:" + ",".join(sorted(items))


@category
def copying(rng: Draw) -> Exercise:
    """A list of words, or a part of it; all of it, its first two words and so on are asked equally often."""
    words, spans = _words(rng, 3, 6), TEXTS["copying"]
    chosen = rng.choice(spans)
    copied = words[slice(*chosen["part"])]
    wrong = (*(" ".join(words[slice(*other["part"])]) for other in spans), " ".join(reversed(copied)))
    prompt = rng.choice(chosen["wordings"]).format(text=" ".join(words))
    return ask(prompt, " ".join(copied), list_key(words), level(len(words), 4, 6), wrong)


@category
def counting(rng: Draw) -> Exercise:
    """How many words there are. The answer is one number: a numbered list, which counts aloud, is no answer."""
    words = _words(rng, 2, 7)
    listed, count = ", ".join(words), len(words)
    return ask(
        wording(rng, "counting", list=listed), str(count), list_key(words), level(count, 4, 6),
        (str(count + 1), f"There are {count + 10}.", _numbered(words), listed),
        kind="format", accepted=(f"There are {count} words.",), checks=(f"one_number {count}",),
    )  # fmt: skip


def _numbered(words: list[str]) -> str:
    return "\n".join(f"{number}. {word}" for number, word in enumerate(words, 1))


@category
def list_format(rng: Draw) -> Exercise:
    words = _words(rng, 3, 5)
    forms = {
        "bullets": "\n".join(f"- {word}" for word in words),
        "numbers": _numbered(words),
        "commas": ", ".join(words),
        "lines": "\n".join(words),
    }
    form = rng.choice(sorted(forms))
    listed = ", ".join(words[:-1]) + " and " + words[-1]
    prompt = wording(rng, form, listed=listed, list=forms["commas"], spaced=" ".join(words))
    reply = forms.pop(form)
    accepted = (reply.replace("- ", "* "),) if form == "bullets" else ()
    wrong = (*forms.values(), reply + reply[-1], " ".join(words[1:]))
    return ask(prompt, reply, list_key(words), level(len(words), 4, 5), wrong, kind="list", accepted=accepted)


@category
def list_reverse(rng: Draw) -> Exercise:
    words = _words(rng, 3, 4)
    listed, backwards = ", ".join(words), words[::-1]
    prompt = wording(rng, "list_reverse", list=listed)
    wrong = (listed, ", ".join(backwards[:-1]))
    return ask(prompt, ", ".join(backwards), list_key(words), level(len(words), 4, 5), wrong, kind="list")


@category
def list_pick(rng: Draw) -> Exercise:
    words = _words(rng, 4, 6)  # of three, the third is the last
    ordinal = rng.choice(ORDINALS)
    answer = words[-1] if ordinal == "last" else words[ORDINALS.index(ordinal)]
    prompt = wording(rng, "list_pick", which=ordinal, list=", ".join(words))
    others = [word for word in words if word != answer]
    wrong = (others[0], others[-1], " ".join(words))
    return ask(prompt, answer, list_key(words), level(len(words), 5, 6), wrong)


@category
def sorting(rng: Draw) -> Exercise:
    numbers = rng.sample(range(1, 100), 3)
    if numbers == sorted(numbers):
        numbers.reverse()  # a sorted list would let copying pass
    shown, rising, falling = (
        ", ".join(map(str, row)) for row in (numbers, sorted(numbers), sorted(numbers, reverse=True))
    )
    inversions = sum(a > b for index, a in enumerate(numbers) for b in numbers[index + 1 :])
    prompt, key = wording(rng, "sorting", list=shown), list_key(list(map(str, numbers)))
    return ask(prompt, rising, key, level(inversions, 2, 3), (falling, shown, str(min(numbers))), kind="list")


@category
def json_object(rng: Draw) -> Exercise:
    """One to three fields as a JSON object. Harder with more fields."""
    names = rng.sample(sorted(FIELDS), rng.randint(1, 3))
    record = {name: rng.choice(WORDS[FIELDS[name]]) for name in names}
    pairs = ", ".join(f"{name} {value}" for name, value in record.items())
    reply, last = json.dumps(record), names[-1]
    other = rng.choice([value for value in WORDS[FIELDS[last]] if value != record[last]])
    wrong = (json.dumps(record | {last: other}), reply[:-1], json.dumps(list(record.values())), f"JSON: {reply}", pairs)
    prompt, key = wording(rng, "json_object", pairs=pairs), f"record:{json.dumps(record, sort_keys=True)}"
    return ask(prompt, reply, key, level(len(names), 2, 3), wrong, kind="format", checks=(f"json {reply}",))


@category
def line_count(rng: Draw) -> Exercise:
    """A word on two, three or four lines, at times with another that is not to be written. Harder with more lines."""
    words = WORDS["list"]
    word, n = rng.choice(words), rng.choice(sorted(COUNTS))
    other = words[(words.index(word) + 1) % len(words)]
    lines = [word] * n
    wrong = ("\n".join(lines[1:]), "\n".join([*lines, word]), "\n".join([*lines[1:], other]), " ".join(lines))
    template = rng.choice(TEXTS["wordings"]["line_count"])
    prompt = template.format(word=word, other=other, n=rng.choice((str(n), COUNTS[n])))
    checks = (f"lines {n}", f"each_line {word}")
    return ask(prompt, "\n".join(lines), f"lines:{word}:{n}", level(n, 3, 4), wrong, kind="format", checks=checks)


@category
def memory(rng: Draw) -> Exercise:
    """The user tells a name and one more thing, and later asks for one of the two."""
    names = WORDS["names"]
    name, topic = rng.choice(names), rng.choice(TEXTS["memories"])
    values = WORDS[topic["values"]]
    value = rng.choice(values)
    history = (
        Message("user", f"{wording(rng, 'greetings', name=name)} {topic['tell'].format(v=value)}"),
        # Short, so that no 13 words in a row leave out the name or the value: those would be a twin in training.
        Message("assistant", f"Hello {name}!"),
    )
    if rng.random() < 0.25:  # the name stands in every conversation, so "the name" may not answer most questions
        other = rng.choice([other for other in names if other != name])
        question, reply, difficulty = wording(rng, "name_questions"), f"Your name is {name}.", "easy"
        wrong = (f"Your name is {other}.", "Your name is Athanor.", value)
    else:
        question, reply, difficulty = rng.choice(topic["questions"]), topic["answer"].format(v=value), "medium"
        wrong = (topic["answer"].format(v=rng.choice([other for other in values if other != value])), name)
    return ask((*history, Message("user", question)), reply, f"person:{name}:{value}", difficulty, wrong)

"""Score answers to battery items, and say what an answer without thought would score.

Constant answers (some usual ones, and every answer that an item accepts),
pieces of the question and fixed places among choices are scored like a model;
their best result is the floor that stands beside every category's score.
item_gate.py lets every item prove itself first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from decimal import Decimal

from athanor.corpus.conversations import Item
from athanor.errors import GateError
from athanor.evaluation.formats import holds
from athanor.evaluation.sandbox import extract_code, passes, passes_many
from athanor.evaluation.statistics import standard_error

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
CONSTANTS = ("", "Yes", "No", "None", "I don't know.", *map(str, range(8)), "42", "100", "- a\n- b\n- c")
READ = ("exact", "numeric", "list", "likelihood")  # kinds of which `_read` tells all that counts
CONSTANT_CODE = "def f(x):\n    return x"


def score(item: Item, answer: str) -> bool:
    """Whether an answer is right. An empty answer is wrong."""
    if item.kind == "code":
        return bool(answer.strip()) and passes(extract_code(answer), item.tests)
    return _score_text(item, answer)


def score_many(items: Sequence[Item], answers: Sequence[str], workers: int = 2) -> list[bool]:
    """`score` for many answers; the ones to be executed run a few at a time."""
    results = [item.kind != "code" and _score_text(item, text) for item, text in zip(items, answers, strict=True)]
    places = [i for i, item in enumerate(items) if item.kind == "code" and answers[i].strip()]
    ran = passes_many([(extract_code(answers[i]), items[i].tests) for i in places], workers)
    for place, result in zip(places, ran, strict=True):
        results[place] = result
    return results


def _score_text(item: Item, answer: str) -> bool:
    text = answer.strip()
    if not text:
        return False
    if item.kind in READ:
        found = _read(item.kind, answer)
        return found is not None and found == _read(item.kind, item.answer)
    if item.kind == "format":
        return all(holds(check, text) for check in item.checks)
    raise GateError("battery", f"unknown item kind '{item.kind}'", where=item.id)


def _read(kind: str, answer: str) -> Hashable:
    """What counts of an answer: one that reads as the expected answer does is right. None: nothing that counts."""
    if kind == "likelihood":
        return answer  # one of the choices, so the whole of it
    text = answer.strip()
    if kind == "numeric":
        numbers = NUMBER.findall(text)
        return Decimal(numbers[-1]) if numbers else None
    return read_list(text) if kind == "list" else text


def read_list(text: str) -> tuple[str, tuple[str, ...]]:
    """The format of a list (bullets, numbered, commas, lines) and its items, trimmed.

    A numbered list counts only if its numbers run 1, 2, 3, ...
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    if all(re.match(r"[-*] \S", line) for line in lines):
        return "bullets", tuple(line[2:].strip() for line in lines)
    if all(re.match(rf"{number}[.)] \S", line) for number, line in enumerate(lines, 1)):
        return "numbered", tuple(line.split(" ", 1)[1].strip() for line in lines)
    if len(lines) == 1:
        return "commas", tuple(part.strip() for part in lines[0].split(","))
    return "lines", tuple(lines)


def choose(log_likelihoods: Sequence[float], choices: Sequence[str], *, normalised: bool) -> int:
    """The place of the likeliest choice, the first of equal ones.

    As lm-evaluation-harness does: its acc compares the sums over the choice's
    tokens, its acc_norm (`normalised`) those sums divided by the choice's characters.
    """
    sizes = [len(choice) if normalised else 1 for choice in choices]
    values = [value / size for value, size in zip(log_likelihoods, sizes, strict=True)]
    return values.index(max(values))


def null_answers(item: Item) -> dict[str, str]:
    """Answers that need no thought, by strategy: constants, pieces of the question itself, a place among choices."""
    if item.choices:
        return {
            "the first choice": item.choices[0],
            "the last choice": item.choices[-1],
            "the shortest choice": min(item.choices, key=len),
            "the longest choice": max(item.choices, key=len),
        }
    question = item.prompt[-1].content
    numbers = NUMBER.findall(question)
    words = re.findall(r"\w+", question.rpartition(": ")[2])
    answers = {f"constant {text!r}": text for text in (*CONSTANTS, CONSTANT_CODE)}
    answers["the question"] = question
    answers["the first number"] = numbers[0] if numbers else ""
    answers["the last number"] = numbers[-1] if numbers else ""
    answers["the first word"] = words[0] if words else ""
    answers["the last word"] = words[-1] if words else ""
    return answers


def null_floors(items: Sequence[Item]) -> dict[str, dict[str, float | str]]:
    """Per category the best null strategy: {"floor": its share right, "strategy": its name}.

    A model may follow one idea where it speaks and another where it compares
    choices: where a category holds both, the best of each are added.
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.category, []).append(item)
    floors: dict[str, dict[str, float | str]] = {}
    for category, group in sorted(groups.items()):
        parts = [[item for item in group if bool(item.choices) == compared] for compared in (False, True)]
        best = [_best_null(part) for part in parts if part]
        floors[category] = {
            "floor": sum(right for right, _ in best) / len(group),
            "strategy": "; ".join(name for right, name in best if right),
        }
    return floors


def _best_null(items: Sequence[Item]) -> tuple[int, str]:
    """How many items the best strategy gets right, and its name."""
    tally: Counter[str] = Counter()
    for item in items:
        for name, text in null_answers(item).items():
            # None of these defines the asked function, so there is nothing to execute.
            tally[name] += item.kind != "code" and _score_text(item, text)
    hits = {**tally, **_repeated(items)}
    best = max(sorted(hits), key=lambda name: hits[name])
    return hits[best], best


def _repeated(items: Sequence[Item]) -> dict[str, int]:
    """How many items each answer that one of them accepts is right for, said to all of them.

    By looking up what it reads as; scoring each answer with each item would take the square of their number.
    Code counts where it is the item's own: functions of other items are not executed.
    """
    read = Counter((item.kind, _read(item.kind, item.answer)) for item in items if item.kind in READ)
    kinds = sorted({kind for kind, _ in read})
    forms = Counter(item.checks for item in items if item.kind == "format")
    own = Counter(text for item in items if item.kind == "code" for text in set(item.accepted))
    found = {}
    for text in dict.fromkeys(text for item in items for text in item.accepted):
        stripped = text.strip()
        formed = sum(n for checks, n in forms.items() if all(holds(check, stripped) for check in checks))
        found[f"constant {text!r}"] = own[text] + formed + sum(read[kind, _read(kind, text)] for kind in kinds)
    return found


def summarise(items: Sequence[Item], results: Sequence[bool]) -> dict[str, dict[str, float | int | str]]:
    """Per category: n, right, accuracy, stderr, floor, strategy, and how many standard errors lie above the floor."""
    table: dict[str, dict[str, float | int | str]] = {}
    for category, floor in null_floors(items).items():
        marks = [result for item, result in zip(items, results, strict=True) if item.category == category]
        accuracy, stderr = sum(marks) / len(marks), standard_error(sum(marks), len(marks))
        margin = (accuracy - float(floor["floor"])) / stderr
        table[category] = {
            "n": len(marks),
            "right": sum(marks),
            "accuracy": accuracy,
            "stderr": stderr,
            **floor,
            "above_floor": margin,
        }
    return table

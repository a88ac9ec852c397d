"""Score answers to battery items, and say what an answer without thought would score.

Constant answers, pieces of the question and fixed places among choices are
scored like a model; their best result is the floor that stands beside every
category's score. item_gate.py lets every item prove itself first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from athanor.corpus.conversations import Item
from athanor.errors import GateError
from athanor.evaluation.formats import holds
from athanor.evaluation.sandbox import extract_code, passes, passes_many
from athanor.evaluation.statistics import standard_error

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
CONSTANTS = ("", "Yes", "No", "None", "I don't know.", *map(str, range(8)), "42", "100", "- a\n- b\n- c")
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
    if item.kind == "exact":
        return text == item.answer.strip()
    if item.kind == "numeric":
        numbers = NUMBER.findall(text)
        return bool(numbers) and Decimal(numbers[-1]) == Decimal(item.answer)
    if item.kind == "list":
        return read_list(text) == read_list(item.answer)
    if item.kind == "format":
        return all(holds(check, text) for check in item.checks)
    if item.kind == "likelihood":
        return answer == item.answer  # one of the choices, so the whole of it
    raise GateError("battery", f"unknown item kind '{item.kind}'", where=item.id)


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
    """Per category the best null strategy: {"floor": its share right, "strategy": its name}."""
    hits: dict[str, dict[str, int]] = {}
    counts: dict[str, int] = {}
    for item in items:
        counts[item.category] = counts.get(item.category, 0) + 1
        tally = hits.setdefault(item.category, {})
        for name, text in null_answers(item).items():
            # No null strategy defines the asked function, so there is nothing to execute.
            right = item.kind != "code" and _score_text(item, text)
            tally[name] = tally.get(name, 0) + int(right)
    floors: dict[str, dict[str, float | str]] = {}
    for category, tally in sorted(hits.items()):
        best = max(sorted(tally), key=lambda name: tally[name])
        floors[category] = {"floor": tally[best] / counts[category], "strategy": best}
    return floors


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

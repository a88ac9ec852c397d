"""Score answers to battery items.

floors.py scores answers without thought in the same way, and item_gate.py lets every item prove itself first.
Items of kind format hold checks of an answer's form: "name argument", each a fact a program can decide.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from athanor.base.errors import GateError
from athanor.evaluation.sandbox import extract_code, isolation, passes, passes_many
from athanor.text.conversations import Item

PARSED_KINDS = ("exact", "numeric", "list", "likelihood")  # an answer of these kinds is right if its `_parsed` value is
CONSTANT_CODE = "def f(x):\n    return x"


def scorable(items: Iterable[Item]) -> tuple[list[Item], dict[str, int]]:
    """The items that this machine can score, and of each category how many it cannot: code that nothing would confine."""
    all_items = list(items)
    unscorable = [item for item in all_items if item.kind == "code" and not isolation()]
    remaining = [item for item in all_items if item.kind != "code"] if unscorable else all_items
    return remaining, dict(sorted(Counter(item.category for item in unscorable).items()))


def score(item: Item, answer: str) -> bool:
    """Whether an answer is right. An empty answer is wrong."""
    if item.kind == "code":
        code = extract_code(answer)
        return defines_only(code, item.tests) and passes(code, item.tests)
    return _score_text(item, answer)


def score_many(items: Sequence[Item], answers: Sequence[str], workers: int = 2) -> list[bool]:
    """`score` for many answers; the ones to be executed run a few at a time."""
    results = [item.kind != "code" and _score_text(item, text) for item, text in zip(items, answers, strict=True)]
    codes = {index: extract_code(answers[index]) for index, item in enumerate(items) if item.kind == "code"}
    indices = [index for index, code in codes.items() if defines_only(code, items[index].tests)]
    passed = passes_many([(codes[index], items[index].tests) for index in indices], workers)
    for index, result in zip(indices, passed, strict=True):
        results[index] = result
    return results


def defines_only(code: str, tests: Sequence[str]) -> bool:
    """Whether a program's one function, by `def` or as a lambda, is the one that the tests call.

    A program that defines the functions of all questions, or binds names that it makes up while it runs, answers none.
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lambdas = [node for node in body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)]
    names += [ast.unparse(target) for node in lambdas for target in node.targets]
    return len(names) == 1 and all(test.startswith(f"assert {names[0]}(") for test in tests)


def _score_text(item: Item, answer: str) -> bool:
    text = answer.strip()
    if not text:
        return False
    if item.kind in PARSED_KINDS:
        parsed = _parsed(item.kind, answer)
        return parsed is not None and parsed == _parsed(item.kind, item.answer)
    if item.kind == "format":
        return all(passes_check(check, text) for check in item.checks)
    raise GateError("battery", f"unknown item kind '{item.kind}'", where=item.id)


@functools.lru_cache(maxsize=2**16)  # the floors read the same answers for every item
def _parsed(kind: str, answer: str) -> Hashable:
    """The value of an answer that is compared with the expected answer's; None where it has no such value."""
    if kind == "likelihood":
        return answer  # one of the choices, so the whole of it
    text = answer.strip()
    if kind == "numeric":
        found = numbers(text)
        return found[-1] if found else None
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
    """The index of the likeliest choice, the first of equal ones.

    As lm-evaluation-harness does: its acc compares the sums over the choice's
    tokens, its acc_norm (`normalised`) those sums divided by the choice's characters.
    """
    sizes = [len(choice) if normalised else 1 for choice in choices]
    values = [value / size for value, size in zip(log_likelihoods, sizes, strict=True)]
    return values.index(max(values))


# With a sign, thousands separated by commas, decimals, a small exponent, or as a fraction: 1/42 is not 42.
NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,2}(?!\w)|/\d+(?![\w/]))?"
)
MAX_DIGITS = 1000  # of a number that is read; longer ones are an attack on the reader
NAME = re.compile(r"(?<=[^.!?:\s] )[A-Z][\w'-]*")  # not at the beginning of a sentence
OWN_NAMES = ("I", "Athanor", "English", "HTTP", "JSON", "No", "Python")  # what any answer may name
SENTENCE_END = re.compile(r"[.!?]+(?=\s|$)")


def number_value(text: str) -> Fraction | None:
    """Return the value of a match of NUMBER; None for one without, such as 1/0."""
    try:
        return Fraction(text.replace(",", "").replace("\u2212", "-")) if len(text) <= MAX_DIGITS else None
    except (ValueError, ZeroDivisionError):
        return None


def numbers(text: str) -> list[Fraction | None]:
    """Return the values of the numbers in a text, in order."""
    return list(map(number_value, NUMBER.findall(text)))


def _tagged_number(text: str) -> tuple[str, Decimal]:
    """A number as a tuple, which equals no other JSON value (in Python True == 1). 1 and 1.0 stay equal."""
    return ("number", Decimal(text))


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, parse_int=_tagged_number, parse_float=_tagged_number)
    except (ValueError, RecursionError):
        return None


def _has_exact_keys(text: str, keys: str) -> bool:
    parsed = _parse_json(text)
    return isinstance(parsed, dict) and sorted(parsed) == sorted(keys.split(","))


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _sentences(text: str) -> int:
    """How many sentences; -1 for a text that does not end one."""
    ends = list(SENTENCE_END.finditer(text))
    return len(ends) if ends and ends[-1].end() == len(text) else -1


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "yes_no": lambda text, right: text in (right, f"{right}."),
    "one_of": lambda text, options: text.removesuffix(".") in options.split("|"),
    "one_number": lambda text, right: numbers(text) == [Fraction(right)],
    "words": lambda text, n: len(text.split()) == int(n),
    "max_words": lambda text, n: len(text.split()) <= int(n),
    "min_words": lambda text, n: len(text.split()) >= int(n),
    "lines": lambda text, n: len(text.split("\n")) == int(n),
    "each_line": lambda text, same: all(line.strip() == same for line in text.split("\n")),
    "each_starts": lambda text, start: all(line.startswith(start) for line in text.split("\n")),
    "sentences": lambda text, n: _sentences(text) == int(n),
    "upper": lambda text, _: text.upper() == text != text.lower(),
    "lower": lambda text, _: text.lower() == text != text.upper(),
    "starts": lambda text, start: text.startswith(start),
    "ends": lambda text, end: text.endswith(end),
    "contains": _has_word,
    "without": lambda text, word: not _has_word(text, word),
    "no_letter": lambda text, letter: letter.lower() not in text.lower(),
    "mentions": lambda text, words: any(_has_word(text, word) for word in words.split("|")),
    "names_in": lambda text, known: set(NAME.findall(text)) <= {*known.split(), *OWN_NAMES},
    "json": lambda text, value: _parse_json(text) == _parse_json(value),
    "json_keys": _has_exact_keys,
}


def passes_check(check: str, text: str) -> bool:
    """Whether a stripped answer passes one check; GateError for a check that does not exist."""
    name, _, argument = check.partition(" ")
    if name not in CHECKS:
        raise GateError("battery", f"unknown check '{check}'", fix=f"one of: {', '.join(CHECKS)}")
    return CHECKS[name](text, argument)

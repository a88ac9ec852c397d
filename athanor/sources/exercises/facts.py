"""Exercises on facts of the running Python interpreter: the facts are trained, the wording of the question is held out.

Every fact stands in training in several wordings; the battery asks in
wordings that no training row uses, chosen by the battery's seed. Answers are short enough (at most
MAX_WORDS words) that no 13-gram can join an item to a document.
"""

from __future__ import annotations

import ast
import builtins
import functools
import http
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from athanor.base.artifacts import digest
from athanor.base.errors import InputError
from athanor.sources import stdlib
from athanor.sources.exercises.exercise import TEXTS, Draw, Exercise, ask, category, level

Facts = tuple[tuple[str, str], ...]  # name and answer

FROM_PYTHON = "PSF-2.0"  # wording taken from the running interpreter
WORDINGS: dict[str, tuple[str, ...]] = TEXTS["facts"]
MAX_WORDS = 11
MIN_FACTS = 20
STDLIB = stdlib.root()
HELD_OUT_WORDINGS = 2  # of each kind; the battery's seed says which


def first_sentence(docstring: str) -> str:
    """On one line, without a name before it and the full stop behind it."""
    first = " ".join(docstring.strip().split("\n\n")[0].split())
    first = re.sub(r"^[\w.]+(\.py)?\s*(--?|:|\u2013)\s+", "", first)
    return re.split(r"(?<=[a-z)])\.\s", first, maxsplit=1)[0].rstrip(".")


def summary(docstring: str | None) -> str | None:
    """The first sentence of a docstring as one line, or None if it is no plain short sentence."""
    if not docstring:
        return None
    first = first_sentence(docstring)
    usable = 2 <= len(first.split()) <= MAX_WORDS and len(first) <= 90 and first.isascii() and first[0].isalpha()
    signature = re.match(r"\w+\(", first)
    if not usable or signature or "->" in first or "==" in first or ">>>" in first or "~" in first:
        return None
    return first[0].upper() + first[1:] + "."


def _docstrings_of(path: Path) -> Iterator[tuple[str, str | None]]:
    """("", module docstring) and (name, docstring) of the public top-level functions in a source file."""
    _, tree = stdlib.parse(path.read_bytes(), str(path))
    yield "", ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, ast.get_docstring(node)


def _source(module: str) -> Path | None:
    paths = (STDLIB / f"{module}.py", STDLIB / module / "__init__.py")
    return next((path for path in paths if path.is_file()), None)


@functools.cache
def status_facts() -> Facts:
    return tuple((str(status.value), f"{status.value} {status.phrase}") for status in sorted(http.HTTPStatus))


@functools.cache
def error_facts() -> Facts:
    """Built-in exceptions and warnings with their docstrings."""
    facts = {}
    for name, value in sorted(vars(builtins).items()):
        if isinstance(value, type) and issubclass(value, BaseException) and value.__name__ == name:
            facts[name] = summary(value.__doc__)
    return _usable(facts, "errors")


@functools.cache
def module_facts() -> Facts:
    facts = {}
    for name in sorted(sys.stdlib_module_names):
        path = None if name.startswith("_") or name in {"this", "antigravity", "idlelib"} else _source(name)
        if path is not None:
            text = summary(next(_docstrings_of(path))[1])
            facts[name] = None if text is None or text.startswith(name.capitalize() + " ") else text
    return _usable(facts, "modules")


@functools.cache
def docstring_facts() -> Facts:
    """Summaries of built-in functions and of the methods of built-in types: few enough for each to be told often."""
    facts = {}
    owners = {"": builtins, "str.": str, "list.": list, "dict.": dict, "set.": set}
    for prefix, owner in owners.items():
        for name, value in sorted(vars(owner).items()):
            # What `site` adds is for a prompt: the docstring of `help` says nothing of it.
            added_by_site = type(value).__module__ == "_sitebuiltins"
            if not name.startswith("_") and callable(value) and not isinstance(value, type) and not added_by_site:
                facts[prefix + name] = summary(value.__doc__)
    return _usable(facts, "docstrings")


def _usable(facts: dict[str, str | None], description: str) -> Facts:
    """The facts whose answer belongs to one name only; an answer that several names share is not asked for."""
    all_answers = [answer for answer in facts.values() if answer]
    usable = tuple(
        (name, answer) for name, answer in sorted(facts.items()) if answer and all_answers.count(answer) == 1
    )
    if len(usable) < MIN_FACTS:
        raise InputError(
            f"only {len(usable)} usable {description} in this interpreter's standard library",
            where=STDLIB,
            fix="use a full CPython installation with sources, and do not run Python with -OO",
        )
    return usable


@functools.cache
def held_out_wordings(kind: str, seed: int) -> tuple[str, ...]:
    """The wordings that only the battery uses; a fresh seed holds out other ones."""
    candidates = [wording for wording in WORDINGS[kind] if wording not in WORDINGS["asked_elsewhere"]]
    chosen = sorted(candidates, key=lambda wording: digest([seed, wording]))[:HELD_OUT_WORDINGS]
    return tuple(wording for wording in WORDINGS[kind] if wording in chosen)


def _fact(rng: Draw, facts: Facts, kind: str) -> Exercise:
    # Training goes round the facts, so that each one is seen equally often; the battery draws a sample.
    name, answer = rng.choice(facts) if rng.battery else facts[rng.number % len(facts)]
    wordings, held_out = WORDINGS[kind], held_out_wordings(kind, rng.line_seed)
    wording = rng.choice(held_out if rng.battery else [wording for wording in wordings if wording not in held_out])
    position = facts.index((name, answer))
    near = (facts[position - 1][1], facts[(position + 1) % len(facts)][1], answer.rsplit(" ", 1)[0])
    key, difficulty = f"{kind}:{name}:{wordings.index(wording)}", level(len(answer.split()), 5, 8)
    return ask(wording.format(name=name), answer, key, difficulty, near, held_out=rng.battery, license=FROM_PYTHON)


@category
def http_status(rng: Draw) -> Exercise:
    return _fact(rng, status_facts(), "status")


@category
def error_meaning(rng: Draw) -> Exercise:
    return _fact(rng, error_facts(), "error")


@category
def module_recall(rng: Draw) -> Exercise:
    return _fact(rng, module_facts(), "module")


@category
def docstring_recall(rng: Draw) -> Exercise:
    return _fact(rng, docstring_facts(), "docstring")

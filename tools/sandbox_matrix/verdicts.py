"""Verdicts of an earlier sandbox and ours on right and wrong functions: held-out exercises, and mutations of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from athanor.evaluation import sandbox
from athanor.sources.exercises.code import python_functions
from athanor.sources.exercises.exercise import Draw
from tools.sandbox_matrix.runners import load

# What a model gets wrong, as a change of the text.
MUTATIONS = (
    ("return ", "return not "), ("return ", "return str("), ("return ", "print("), (" + ", " - "), (" % ", " // "),
    (" > ", " >= "), ("min", "max"), (":\n    return", ":\n    import re, math, json, collections\n    return"),
    ("def ", "import datetime, itertools, typing\ndef "), ("return ", "raise ValueError #"), ("\n    ", "\n"),
    ("[", "list(reversed("), ("def ", "import nothing_of_that_name\ndef "),
)  # fmt: skip


def functions(count: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    rng = Draw(1)
    rng.battery = True
    produced = 0
    while True:
        exercise = python_functions(rng).item
        code = exercise.accepted[0]
        texts = [*exercise.accepted, *exercise.rejected]
        texts += [code.replace(old, new) for old, new in rng.sample(MUTATIONS, 4) if old in code]
        for text in texts:
            yield sandbox.extract_code(text), tuple(exercise.tests)
            produced += 1
            if produced == count:
                return


def compare(path: Path, count: int) -> int:
    """Print how many verdicts differ and the milliseconds of each; status 1 if any differs."""
    earlier, tasks = load(str(path)), list(functions(count))
    found, spent = [], []
    for runner in (earlier, sandbox):
        start = time.monotonic()
        found.append(runner.passes_many(tasks))
        spent.append(1000 * (time.monotonic() - start) / count)
    differing = [task for task, *pair in zip(tasks, *found, strict=True) if pair[0] != pair[1]]
    print(f"{count} functions, {sum(found[1])} right; differing verdicts: {len(differing)}")
    print(f"ms each, two at a time: earlier {spent[0]:.1f}, ours {spent[1]:.1f}")
    for code, _ in differing:
        print(code, end="\n\n")
    return int(bool(differing))

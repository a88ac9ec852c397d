"""The runners that the matrix compares, each asked for one verdict, and the contexts it runs them in.

`compare` has verdicts of an earlier sandbox and ours on right and wrong functions: held-out exercises, and mutations.
"""

from __future__ import annotations

import importlib.util
import os
import random
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from athanor.evaluation import confined, sandbox
from athanor.sources.exercises.code import python_functions
from athanor.sources.exercises.exercise import Side

CONTEXTS = {  # name -> (user, whether namespaces may be made)
    "root, namespaces": (0, True),
    "root, none": (0, False),
    "user, namespaces": (65534, True),
    "user, none": (65534, False),
}
# unshare, setns, mount, clone, clone3: as a container's default profile, refuse what makes or enters a namespace.
DENIED = {"x86_64": (272, 308, 165, 56, 435), "aarch64": (97, 268, 40, 220, 435)}
NEW_NAMESPACES, NO_SUCH_CALL, FIRST_ARGUMENT = 0x7E020000, 0x00050026, 16


def load(path: str) -> ModuleType:
    """A module from a file anywhere."""
    spec = importlib.util.spec_from_file_location("other_runner", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ours(code: str, tests: Sequence[str]) -> bool:
    return sandbox.passes(code, tests)


def earlier(path: str) -> Callable[[str, Sequence[str]], bool]:
    """A sandbox.py of another version of this project."""
    return load(path).passes


def code_eval(path: str) -> Callable[[str, Sequence[str]], bool]:
    """`execute.py` of the metric code_eval (huggingface/evaluate), called as the metric calls it; lm-evaluation-harness
    scores HumanEval and MBPP with it."""
    check = load(path).check_correctness
    return lambda code, tests: check(code + "\n" + "\n".join(tests), 3.0, 0, 0)["passed"]


def without_namespaces() -> None:
    """From here on no process of ours can make a namespace: a filter that lets everything else pass."""
    machine = os.uname().machine
    unshare, setns, mount, clone, clone3 = DENIED[machine]
    lines = [(confined.LOAD, 0, 0, confined.NUMBER)]
    for number, answer in (
        (unshare, confined.REFUSE),
        (setns, confined.REFUSE),
        (mount, confined.REFUSE),
        (clone3, NO_SUCH_CALL),
    ):
        lines += [(confined.EQUAL, 0, 1, number), (confined.RETURN, 0, 0, answer)]
    lines += [
        (confined.EQUAL, 0, 3, clone), (confined.LOAD, 0, 0, FIRST_ARGUMENT), (confined.ANY_BIT, 0, 1, NEW_NAMESPACES),
        (confined.RETURN, 0, 0, confined.REFUSE), (confined.RETURN, 0, 0, confined.ALLOW),
    ]  # fmt: skip
    confined.install(b"".join(struct.pack("=HBBI", *line) for line in lines))


# What a model gets wrong, as a change of the text.
MUTATIONS = (
    ("return ", "return not "), ("return ", "return str("), ("return ", "print("), (" + ", " - "), (" % ", " // "),
    (" > ", " >= "), ("min", "max"), (":\n    return", ":\n    import re, math, json, collections\n    return"),
    ("def ", "import datetime, itertools, typing\ndef "), ("return ", "raise ValueError #"), ("\n    ", "\n"),
    ("[", "list(reversed("), ("def ", "import nothing_of_that_name\ndef "),
)  # fmt: skip


def functions(count: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    rng = random.Random(1)
    produced = 0
    while True:
        exercise = python_functions(rng, 0, Side(battery=True, seed=1))
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

"""The runners that the matrix compares, each asked for one verdict, and the contexts it runs them in."""

from __future__ import annotations

import importlib.util
import os
import struct
from collections.abc import Callable, Sequence
from types import ModuleType

from athanor.evaluation import confined, sandbox

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

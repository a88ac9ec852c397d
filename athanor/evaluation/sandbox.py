"""Run a short Python function that a model wrote, and get its results without trusting it.

The tests are asserts of the form `assert CALL == LITERAL`. Only the calls
enter the process that runs the code; the expected values stay here and are
compared here. So nothing the code prints, writes or patches can forge a pass:
it would have to return the right values.

What keeps the code in is a system call filter (sandbox_child.py): it can compute
and write its results, and the kernel refuses everything else. Around it, where
bubblewrap works, stand namespaces of its own (files, processes, network, IPC,
host name, for a plain user also users), and root becomes nobody. Where there
is no filter, no model-written code is run. A process shows that its filter
holds before it gets a task.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from athanor.base.errors import InputError
from athanor.evaluation import sandbox_child

_PYTHON = os.path.realpath(sys.executable)  # the one that a virtual environment points to: standard library only
ANSWER_SECONDS = (
    sandbox_child.WALL_SECONDS + 50
)  # sandbox_child.py keeps the time; this is for a busy machine, and the worst
# With the filter, the kernel refuses even these calls, which Python's audit does not report.
PROBE = """
import os
def refused():
    number = os.getpid()
    for act in (os.stat, os.mkfifo):
        try:
            act("/")
        except PermissionError:
            number -= 1
    return number
"""


def extract_code(answer: str) -> str:
    """The code in an answer: the first fenced block if there is one, else the whole text."""
    fence = re.search(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    return fence.group(1) if fence else answer.strip("\n")


def parse_test(test: str) -> tuple[str, object]:
    """`assert CALL == LITERAL` as (call text, value); InputError for any other form."""
    try:
        node = ast.parse(test).body[0]
        assert isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare)
        assert len(node.test.ops) == 1 and isinstance(node.test.ops[0], ast.Eq)
        return ast.unparse(node.test.left), ast.literal_eval(node.test.comparators[0])
    except (SyntaxError, ValueError, IndexError, AssertionError):
        raise InputError("a test must read `assert CALL == LITERAL`", where=test) from None


def isolation() -> str:
    """What confines model-written code on this machine, in words; "" where such code is not run at all."""
    confinement = _confinement()
    return confinement[1] if confinement else ""


def passes(code: str, tests: Sequence[str]) -> bool:
    """Whether every test's call returns a value of the expected type and equal to it."""
    return passes_many([(code, tests)])[0]


def passes_many(tasks: Sequence[tuple[str, Sequence[str]]], workers: int = 2) -> list[bool]:
    """`passes` for many (code, tests) pairs, each in a process of its own, a few at a time.

    InputError where nothing confines the code (`isolation`).
    """
    parsed = [(code, [parse_test(test) for test in tests]) for code, tests in tasks]
    for code, pairs in parsed:
        if not pairs:
            raise InputError("no tests", where=code[:60], fix="give at least one assert")
    if not parsed:
        return []
    confinement = _confinement()
    if confinement is None:
        fix = "evaluate on Linux (x86-64 or arm64) in a container that allows seccomp, or leave out items of kind code"
        raise InputError("this machine has no system call filter, so model-written code is not run", fix=fix)
    results, pending = [False] * len(parsed), deque(range(len(parsed)))

    def work() -> None:
        with _Process(confinement[0]) as process:
            while True:
                try:
                    index = pending.popleft()
                except IndexError:
                    return
                code, pairs = parsed[index]
                texts = process.call(code, [call for call, _ in pairs])
                results[index] = len(texts) == len(pairs) and all(
                    _equals_literal(text, value) for text, (_, value) in zip(texts, pairs, strict=True)
                )

    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        for future in [pool.submit(work) for _ in range(min(max(1, workers), len(parsed)))]:
            try:
                future.result()
            except OSError as error:
                fix = "look for full memory or a limit on processes, then run again"
                raise InputError(f"no process for code that a model wrote: {error}", fix=fix) from None
    return results


def _equals_literal(text: str, expected: object) -> bool:
    if len(text) > 2 * len(repr(expected)):
        return False  # no equal value reads so; what is parsed here is bounded by what the battery expects
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return _equal_with_types(value, expected)


def _equal_with_types(a: Any, b: Any) -> bool:
    """Whether two values are equal and of one type at every depth; plain == takes True for 1."""
    if type(a) is not type(b) or a != b:
        return False
    if isinstance(a, (dict, set)):  # equal, so in order of repr only what differs in type stands beside another
        a, b = (sorted(x.items() if isinstance(x, dict) else x, key=repr) for x in (a, b))
    return not isinstance(a, (list, tuple)) or all(map(_equal_with_types, a, b))


@functools.cache
def _confinement() -> tuple[tuple[str, ...], str] | None:
    """The command that starts a confined program, and in words what confines it; None where nothing does."""
    for name, prefix in (("bubblewrap, ", _bubblewrap()), ("", ())):
        with contextlib.suppress(OSError), _Process(prefix) as process:
            return prefix, f"{name}system call filter, uid {process.uid}"
    return None


def _bubblewrap() -> tuple[str, ...]:
    """The command that gives a program namespaces of its own and shows it the standard library only."""
    spaces = ("ipc", "pid", "net", "uts", "cgroup-try")
    command = [shutil.which("bwrap") or "bwrap", *(f"--unshare-{name}" for name in spaces)]
    if os.geteuid() == 0:  # to become nobody needs no namespace of users, and two capabilities
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", f"{sys.base_prefix}/lib", _PYTHON):
        command += ["--ro-bind-try", path, path]
    return (*command, "--dev-bind", "/dev/null", "/dev/null", "--remount-ro", "/", "--chdir", "/")


class _Process:
    """A running process of sandbox_child.py. OSError where it does not start or shows no filter."""

    def __init__(self, prefix: Sequence[str]) -> None:
        self.command = [*prefix, _PYTHON, "-s", "-S", "-P", "-B", "-c", inspect.getsource(sandbox_child)]
        self._start()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()

    def _start(self) -> None:
        self.channel, child_end = socket.socketpair()
        self.channel.settimeout(ANSWER_SECONDS)
        null = subprocess.DEVNULL
        with child_end:
            self.process = subprocess.Popen(
                self.command, stdin=child_end, stdout=null, stderr=null, cwd="/", env={"PYTHONHASHSEED": "0"},
                start_new_session=True,
            )  # fmt: skip
        try:
            (self.uid,) = struct.unpack(">I", self._receive(4))
            if self._request(PROBE, ["refused()"]) != ["-3"]:
                raise OSError("the system call filter does not hold")
        except OSError:
            self.__exit__()
            raise

    def call(self, code: str, calls: list[str]) -> list[str]:
        """The values of the calls as text; fewer where the code failed. A process that is lost is replaced once."""
        for _ in range(2):
            try:
                return self._request(code, calls)
            except OSError:
                self.__exit__()
                self._start()
        return []

    def _request(self, code: str, calls: list[str]) -> list[str]:
        self.channel.sendall(json.dumps({"code": code, "calls": calls}).encode() + b"\n")
        (size,) = struct.unpack(">I", self._receive(4))
        try:
            texts = json.loads(self._receive(size))
        except (ValueError, RecursionError, MemoryError):
            return []
        return texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else []

    def _receive(self, size: int) -> bytes:
        chunks = []
        while size:
            chunks.append(self.channel.recv(size))
            if not chunks[-1]:
                raise OSError("the confined process ended")
            size -= len(chunks[-1])
        return b"".join(chunks)

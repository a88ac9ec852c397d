"""Run a short Python function that a model wrote, and get its results without trusting it.

The tests are asserts of the form `assert CALL == LITERAL`. Only the calls
enter the child process; the expected values stay here and are compared here.
So nothing the code prints, writes or patches can forge a pass: it would have
to return the right values. The child is an isolated interpreter in a session
of its own with limits on CPU time, memory, files and processes, an empty
environment, no network, and a wall-clock limit after which the whole session
is killed. This holds back what a small model can write by accident; it is
not a wall against an expert attacker with a kernel exploit.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from athanor.errors import InputError

CPU_SECONDS = 3
WALL_SECONDS = 10.0  # generous: a busy machine starts an interpreter slowly, and CPU time is limited already
MEMORY_BYTES = 512 * 2**20
RESULT_BYTES = 64 * 2**10

# Runs in the child. Results go to a private duplicate of stdout; the code's own output goes nowhere.
_RUNNER = f"""
import sys, os, json, resource
task = json.loads(sys.stdin.buffer.read())
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for handle in (0, 1, 2):
    os.dup2(null, handle)
os.close(null)
if task["drop"]:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name, limit in (("CPU", {CPU_SECONDS}), ("AS", {MEMORY_BYTES}), ("FSIZE", {RESULT_BYTES}), ("CORE", 0),
                    ("NOFILE", 32), ("NPROC", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
BLOCKED = ("socket.", "subprocess.", "ctypes.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system",
           "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link",
           "os.symlink", "os.truncate", "os.putenv", "shutil.", "pty.", "signal.")
def guard(event, arguments, blocked=BLOCKED, read=os.O_RDONLY, write=os.O_WRONLY | os.O_RDWR | os.O_CREAT):
    if event.startswith(blocked) or event == "open" and arguments[2] & write:
        raise PermissionError(event)
sys.addaudithook(guard)
space, results = {{"__name__": "answer"}}, []
try:
    exec(compile(task["code"], "answer", "exec"), space)
    for call in task["calls"]:
        results.append(repr(eval(call, space)))
except BaseException:
    pass
os.write(out, json.dumps(results).encode())
os._exit(0)
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


@functools.cache
def network_off() -> tuple[str, ...]:
    """The command prefix that takes the network away, or () where unprivileged namespaces are not allowed."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = (unshare, "--map-root-user", "--net")
    return command if subprocess.run((*command, "true"), capture_output=True).returncode == 0 else ()


def passes(code: str, tests: Sequence[str]) -> bool:
    """Whether every test's call returns a value of the expected type and equal to it."""
    pairs = [parse_test(test) for test in tests]
    if not pairs:
        raise InputError("no tests", where=code[:60], fix="give at least one assert")
    try:
        ast.parse(code)  # spares a process for text that is no Python at all
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    results = _call(code, [call for call, _ in pairs])
    if len(results) != len(pairs):
        return False
    return all(_same(text, expected) for text, (_, expected) in zip(results, pairs, strict=True))


def passes_many(tasks: Sequence[tuple[str, Sequence[str]]], workers: int = 2) -> list[bool]:
    """`passes` for many (code, tests) pairs, each in a process of its own, a few at a time."""
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        return list(pool.map(lambda task: passes(*task), tasks))


def _same(text: str, expected: object) -> bool:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return _alike(value, expected)


def _alike(a: Any, b: Any) -> bool:
    """Equal and of one type, at every depth: to Python True is 1."""
    if type(a) is not type(b) or a != b:
        return False
    if isinstance(a, (dict, set)):  # equal, so in order of repr only what differs in type stands beside another
        a, b = (sorted(x.items() if isinstance(x, dict) else x, key=repr) for x in (a, b))
    return not isinstance(a, (list, tuple)) or all(map(_alike, a, b))


def _call(code: str, calls: list[str]) -> list[str]:
    prefix = network_off()
    drop = not prefix and os.geteuid() == 0
    task = json.dumps({"code": code, "calls": calls, "drop": drop}).encode()
    command = [*prefix, sys.executable, "-I", "-S", "-B", "-c", _RUNNER]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryDirectory(prefix="athanor-") as folder:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(task, timeout=WALL_SECONDS)
        except subprocess.TimeoutExpired:
            return []
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the session is gone, as it should be
            process.wait()
        out.seek(0)
        text = out.read(RESULT_BYTES)
    try:
        results = json.loads(text)
    except ValueError:
        return []
    return results if isinstance(results, list) and all(isinstance(item, str) for item in results) else []

"""The process in which model-written code runs. sandbox.py starts it and says what to run.

It imports what a short function may want, gives root away, and then makes a
copy of itself (a fork) for each task. The copy closes everything it does not
need and asks the kernel for a system call filter: from then on it can use
memory, the clock and one pipe, and nothing else. No file can be opened, no
process, thread or socket made, no signal sent, in whatever way the code asks
for it, also with machine code of its own. The filter needs neither root nor
namespaces, and no privilege can lift it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

CPU_SECONDS = 3
WALL_SECONDS = 10.0  # generous: on a busy machine a second of CPU takes many
MEMORY_BYTES = 512 * 2**20
RESULT_BYTES = 4 * 2**20
MAX_DEPTH = 5000  # of recursion; Python's own 1000 less the frames of this file refuses right answers
NOBODY = 65534

# No file can be opened later, so what is not imported before is not there.
# The last ones are imported by other modules, or by str.encode, at the first use.
MODULES = """abc argparse array ast base64 binascii bisect calendar cmath codecs collections.abc colorsys concurrent.futures
contextlib copy csv dataclasses datetime decimal difflib doctest enum errno fnmatch fractions functools graphlib
hashlib heapq hmac html html.parser inspect io ipaddress itertools json keyword locale logging math numbers operator os.path
pathlib pickle pprint queue random re secrets shutil socket statistics string struct subprocess sys tempfile textwrap
threading time timeit tokenize traceback types typing unicodedata unittest urllib.parse uuid warnings weakref
xml.etree.ElementTree zlib _strptime encodings.ascii encodings.idna encodings.latin_1 encodings.utf_16 encodings.utf_32"""

# Numbers of system calls. With these alone nothing can be opened, made or reached: the open handles are /dev/null and
# the pipe. mmap and mprotect stand apart, as they are refused what would make memory executable.
CALLS = {
    "x86_64": (0xC000003E, {
        "read": 0, "write": 1, "munmap": 11, "brk": 12, "rt_sigreturn": 15, "sched_yield": 24, "mremap": 25,
        "madvise": 28, "nanosleep": 35, "exit": 60, "futex": 202, "restart_syscall": 219, "clock_gettime": 228,
        "clock_nanosleep": 230, "exit_group": 231, "getrandom": 318,
    }, {"mmap": 9, "mprotect": 10}),
    "aarch64": (0xC00000B7, {
        "read": 63, "write": 64, "exit": 93, "exit_group": 94, "futex": 98, "nanosleep": 101, "clock_gettime": 113,
        "clock_nanosleep": 115, "sched_yield": 124, "restart_syscall": 128, "rt_sigreturn": 139, "brk": 214,
        "munmap": 215, "mremap": 216, "madvise": 233, "getrandom": 278,
    }, {"mmap": 222, "mprotect": 226}),
}  # fmt: skip
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refused calls fail with EPERM
NUMBER, ARCHITECTURE, PROTECTION = 0, 4, 32  # places in struct seccomp_data; the last is the low half of argument 2
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2

# Events of Python's audit that computing needs; importing lists folders and takes the refusal for an empty one.
AUDITED = (
    "compile", "exec", "import", "object.", "code.__new__", "function.__new__", "builtins.id", "builtins.input",
    "array.__new__", "sys._getframe", "pickle.find_class", "time.sleep",
)  # fmt: skip


def filter_program(machine: str) -> bytes:
    """The filter as a program of the kernel's packet filter language: (operation, jump if true, if false, operand).

    KeyError for a machine whose numbers are not known.
    """
    architecture, unconditional, without_exec = CALLS[machine]
    instructions = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    for number in unconditional.values():
        instructions += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for number in without_exec.values():
        instructions += [(EQUAL, 0, 4, number), (LOAD, 0, 0, PROTECTION), (ANY_BIT, 1, 0, 4), (RETURN, 0, 0, ALLOW)]
        instructions += [(RETURN, 0, 0, REFUSE)]
    instructions += [(RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _prctl(option: int, *values: Any) -> None:
    words = [value if isinstance(value, ctypes._Pointer) else ctypes.c_ulong(value) for value in values]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *words, *[ctypes.c_ulong(0)] * (4 - len(words))):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def install(program: bytes) -> None:
    """Put this process, and all that it starts, behind a filter for good."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.pointer(_Program(len(program) // 8, program)))


def _confine(parent: int, out: int, program: bytes) -> None:
    """Close everything but the pipe, set the limits, then the filter, then the audit as a second wall."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent was gone before
    for handle in (0, 1):
        os.dup2(2, handle)
    os.dup2(out, 3)
    os.closerange(4, 2**16)
    limits = {"CPU": CPU_SECONDS, "AS": MEMORY_BYTES, "FSIZE": 0, "CORE": 0, "NOFILE": 4, "NPROC": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
    install(program)

    def guard(event: str, arguments: object, allowed: tuple[str, ...] = AUDITED) -> None:
        if not event.startswith(allowed):
            raise PermissionError(event)

    sys.addaudithook(guard)


def literal(value: Any) -> str:
    """Return the text of a value that ast.literal_eval reads back; TypeError for one that holds any other type.

    A subclass with a `__repr__` of its own reads like a value that it is not.
    """
    kind = type(value)
    if kind is float:
        return repr(value).replace("inf", "1e999")
    if kind in (type(None), bool, int, complex, str, bytes):
        return repr(value)
    if kind is dict:
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if kind not in (list, tuple, set):
        raise TypeError(kind.__name__)
    if not value:
        return repr(value)
    texts = ", ".join(map(literal, value))
    return f"[{texts}]" if kind is list else f"({texts},)" if kind is tuple else f"{{{texts}}}"


def _execute(code: str, calls: list[str]) -> None:
    """Run the code and write the values of the calls as text; the process ends here."""
    random.seed(0)  # the same code gets the same verdict
    sys.setrecursionlimit(MAX_DEPTH)
    namespace: dict[str, Any] = {"__name__": "answer"}
    results = []
    with contextlib.suppress(BaseException):
        exec(compile(code, "answer", "exec"), namespace)
        for call in calls:
            results.append(literal(eval(call, namespace)))
    os.write(3, json.dumps(results).encode())


def _result(code: str, calls: list[str], program: bytes) -> bytes:
    """What a forked copy of this process wrote; empty if it wrote too much or did not end in time."""
    parent = os.getpid()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _confine(parent, writer, program)
            _execute(code, calls)
        finally:
            os._exit(0)
    os.close(writer)
    text, deadline = b"", time.monotonic() + WALL_SECONDS
    try:
        while len(text) <= RESULT_BYTES and select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = os.read(reader, RESULT_BYTES)
            if not chunk:
                return text
            text += chunk
        return b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


def _drop_root() -> None:
    """Root becomes nobody. Root of a user namespace that has no such user stays the plain user that it is outside."""
    with contextlib.suppress(OSError):
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)  # type: ignore[attr-defined]  # this file is for Linux
        os.setresuid(NOBODY, NOBODY, NOBODY)  # type: ignore[attr-defined]


def serve() -> None:
    """Answer tasks that come on handle 0, a socket: a line of JSON in, the length and the bytes of the results out."""
    for name in MODULES.split():
        with contextlib.suppress(ImportError):  # some systems leave one out
            exec(f"import {name}", {})
    if os.geteuid() == 0:
        _drop_root()
    os.environ.clear()
    program = filter_program(os.uname().machine)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=0) as channel:
        channel.sendall(struct.pack(">I", os.geteuid()))
        for line in channel.makefile("rb"):
            task = json.loads(line)
            text = _result(task["code"], task["calls"], program)
            channel.sendall(struct.pack(">I", len(text)) + text)


if __name__ == "__main__":
    serve()

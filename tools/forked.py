"""A function run in a forked child as if it were a process of its own, with Python and its libraries loaded already.

Importing torch takes seconds, and a hundred kills would wait for it a hundred times.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Ended(NamedTuple):
    """How a child ended: its status as `subprocess` would give it, and whether it was killed at its limit."""

    status: int
    seconds: float
    late: bool


def forked(work: Callable[[], int], folder: Path, log: Path, limit: float) -> Ended:
    """Run `work` in a child with `folder` as its directory and its output in `log`, for `limit` seconds at most."""
    sys.stdout.flush()  # or the child would say it again
    started, child = time.monotonic(), os.fork()
    if not child:
        _run(work, folder, log)
    handle = os.pidfd_open(child)
    late = not select.select([handle], [], [], limit)[0]
    os.close(handle)
    if late:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(status, time.monotonic() - started, late)


def _run(work: Callable[[], int], folder: Path, log: Path) -> None:
    """The child; never returns."""
    code = 1
    try:
        told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (told, 1), (told, 2)):
            os.dup2(source, target)
        os.chdir(folder)
        os.environ["DVC_ROOT"] = str(folder)
        code = work()
        _modules(log).write_text("\n".join(name for name in sys.modules if not name.startswith("__")))
    finally:
        os._exit(code)


def status_of(run: Callable[[], int]) -> int:
    """As Python would end a process that runs this."""
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        with suppress(OSError):
            traceback.print_exc()
        return 1
    try:  # what a process does at its end
        sys.stdout.flush()
    except OSError:
        return code or 120
    return code


def learn(log: Path) -> None:
    """Import what a child that came to its end had imported: later ones find it in memory."""
    for name in _modules(log).read_text().split("\n"):
        with suppress(Exception):
            importlib.import_module(name)


def last_line(log: str) -> str:
    return (log.strip().splitlines() or ["no message"])[-1][:300]


def _modules(log: Path) -> Path:
    return log.with_suffix(".modules")

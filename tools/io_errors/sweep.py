"""One operation, and every call of it that can fail."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tools.forked import forked, last_line, learn, status_of
from tools.io_errors.operations import LIMIT_SECONDS, Operation

KINDS = {"read": 1, "write": 2, "fsync": 3, "rename": 4, "print": 5, "none": 6}
SHORT = "half of the bytes"


@dataclass(frozen=True)
class Fault:
    """kind: of the call. error: its errno, 0 for a short write. stays: all later ones fail as well."""

    kind: str
    error: int
    stays: bool

    def __str__(self) -> str:
        return f"{self.kind} {errno.errorcode.get(self.error, SHORT)}"


FAULTS = (
    Fault("read", errno.EIO, False),
    Fault("write", errno.EIO, False),
    Fault("write", errno.ENOSPC, True),
    Fault("write", 0, False),
    Fault("fsync", errno.EIO, False),
    Fault("fsync", errno.ENOSPC, True),
    Fault("rename", errno.EIO, False),
    Fault("rename", errno.ENOSPC, True),
    Fault("print", errno.EIO, False),
    Fault("print", errno.EPIPE, True),
    Fault("print", 0, False),
)
QUIET = Fault("none", 0, False)
NO_TERMINAL = ("print",)  # nothing can be told where telling is what fails


@dataclass
class Tally:
    """What came of the injections into an operation."""

    name: str
    injections: int = 0
    at_once: int = 0
    stopped: int = 0
    ended: int = 0
    healed: int = 0
    hand: int = 0
    problems: list[str] = field(default_factory=list)
    files: Counter[str] = field(default_factory=Counter)  # kinds of files that the failed calls were about

    def __add__(self, other: Tally) -> Tally:
        sums = {
            n: getattr(self, n) + getattr(other, n)
            for n in ("injections", "at_once", "stopped", "ended", "healed", "hand")
        }
        return Tally(self.name, **sums, problems=self.problems + other.problems, files=self.files + other.files)


@dataclass(frozen=True)
class Attempt:
    """calls: those that failed, or all that were seen when none was to fail: kind, and kind of file."""

    status: int
    failed: int
    calls: list[tuple[str, str]]
    log: str


def sweep(operation: Operation, most: int, faults: tuple[Fault, ...] = FAULTS) -> Tally:
    """Inject each fault into each call of its kind, or into a sample of `most`."""
    tally = Tally(operation.name)
    operation.prepare()
    operation.begin()
    quiet = attempt(operation, QUIET, 0)
    wrong = operation.problems()
    if quiet.status or wrong:
        tally.problems.append(
            f"{operation.name}: a quiet run ended with {quiet.status}; {wrong} {last_line(quiet.log)}"
        )
        return tally
    learn(operation.log)
    for turn, fault in enumerate(faults):
        for number, file in sample([name for kind, name in quiet.calls if kind == fault.kind], most, turn):
            inject(operation, fault, number, tally, file)
    return tally


def sample(files: Sequence[str], most: int, turn: int) -> list[tuple[int, str]]:
    """All calls by number, or `most` by number and kind of file: the first of each kind, then the last, then between.

    What one turn leaves out, the next one begins with, so that the faults of a sweep together meet every kind of file.
    How often a stage saves depends on the time it takes, so a number among all calls would not be the same file again.
    """
    if not most or len(files) <= most:
        return [(number, "") for number in range(1, len(files) + 1)]
    calls = Counter(files)
    ordered: dict[tuple[int, str], None] = {}  # a set in order
    for part in (0.0, 1.0, 0.5, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875):
        ordered |= dict.fromkeys((1 + round(part * (count - 1)), name) for name, count in calls.items())
    found = list(ordered)
    return [found[(turn * most + i) % len(found)] for i in range(min(most, len(found)))]


def inject(operation: Operation, fault: Fault, number: int, tally: Tally, like: str = "") -> None:
    """Fail the n-th call, or the n-th of those about a kind of file, and all that follow if the fault stays."""
    operation.begin()
    hit = attempt(operation, fault, number, like)
    if not hit.failed:
        return  # this time there were fewer calls
    tally.injections += 1
    (_, file), *_ = hit.calls or [("", "?")]  # a process that died before it could say
    tally.files[file] += 1
    where = f"{operation.name}, {fault}, call {number} ({file})"
    if hit.status not in (0, 1, 75):
        tally.problems.append(f"{where}: ended with {hit.status}: {last_line(hit.log)}")
    elif hit.status and fault.kind not in NO_TERMINAL and ("Traceback" in hit.log or not hit.log.strip()):
        tally.problems.append(f"{where}: not told in words: {last_line(hit.log)}")
    if hit.status == 0:
        if wrong := operation.problems():
            tally.problems.append(f"{where}: status 0, but {wrong}")
        else:
            tally.at_once += 1
            return
    elif hit.status == 75:
        tally.stopped += 1
    else:
        tally.ended += 1
    operation.between(number)
    again = attempt(operation, QUIET, 0)
    wrong = operation.problems()
    if again.status == 0 and not wrong:
        tally.healed += 1
    else:
        tally.hand += 1
        tally.problems.append(f"{where}: the next plain run ended with {again.status}; {wrong} {last_line(again.log)}")


def attempt(operation: Operation, fault: Fault, number: int, like: str = "") -> Attempt:
    """Run the operation in a fork, with the fault in its n-th call; 0 counts the calls and fails none."""
    report, paths = operation.base / "failed", operation.base / "paths"
    report.unlink(missing_ok=True)

    def work() -> int:
        shim, below, pattern = ctypes.CDLL(None), os.fsencode(operation.inside), os.fsencode(f"*{like}")
        seen = os.open(paths, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        shim.io_errors_arm(
            KINDS[fault.kind], ctypes.c_long(number), fault.error, int(fault.stays), below, pattern, seen
        )
        try:
            return status_of(operation.run)
        finally:
            failed = int(shim.io_errors_failed())
            shim.io_errors_arm(0, ctypes.c_long(0), 0, 0, b"", b"", -1)
            with suppress(BaseException):
                sys.stderr.flush(), sys.stdout.flush()
            report.write_text(str(failed))

    status = forked(work, operation.work, operation.log, LIMIT_SECONDS).status
    failed = int(report.read_text()) if report.is_file() else 1
    names = {str(number): kind for kind, number in KINDS.items()}
    lines = [line.partition(" ") for line in paths.read_text(errors="replace").splitlines()]
    calls = [(names[number], kind_of_file(path, operation)) for number, _, path in lines]
    return Attempt(status, failed, calls, operation.log.read_text(errors="replace"))


def kind_of_file(path: str, operation: Operation) -> str:
    """The path below the operation's folder, with a star for numbers, digests and names of the moment."""
    name = path.removeprefix(f"{operation.work}/").removeprefix(f"{operation.inside}/")
    name = re.sub(r"^scratch/code/.*\.py$", "code/*.py", name)
    return re.sub(r"(?<=\.)\w{8}(?=\.tmp\b)|[0-9a-f]{12,}|\d+([-_]\d+)*", "*", name)

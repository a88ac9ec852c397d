"""Fail the n-th read, write, fsync, rename or print of an operation, for n = 1 ... end, and look at what is left.

    python -m tools.io_errors [--operations LIST] [--most N] [--inputs DIR] [--keep DIR]

Operations: store (the chat page's feedback), journal, ship, ship-first (into no database yet), prune, and the stages
of a micro run by their names. Each injection is a forked process in which one call fails: reads with EIO; writes with
EIO, ENOSPC (from there on: the disk stays full) and half of the bytes; fsync and rename with EIO and ENOSPC; writes to
the terminal with EIO, EPIPE (from there on) and half of the bytes. Then the same operation runs once more without
errors.

What must hold: the process ends with 0, 1 or 75; with 0 its results are right; otherwise it says what happened
without a traceback; nothing that it acknowledged is lost; and the plain run afterwards ends with the
same bytes as ever, without anybody's help. --most bounds n per kind of error by a sample over all kinds of files
(default: all).

Needs Linux and a C compiler. --inputs names a directory where all stages have run with the micro preset. The errors
come from a small library (shim.c) by LD_PRELOAD: SQLite and Arrow are reached, memory-mapped reads are not.
Exit status 1 when something did not hold.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from athanor.base.errors import AthanorError
from tools.forked import forked, last_line, learn, status_of
from tools.io_errors.operations import LIMIT_SECONDS, Operation, named
from tools.scratch import Scratch, environment

SHIM = Path(__file__).with_name("shim.c")
STAGES = (
    "download",
    "train-classifiers",
    "clean",
    "train-tokenizer",
    "shard",
    "sft-data",
    "pretrain",
    "sft",
    "eval",
    "export",
)
OPERATIONS = ("store", "journal", "ship", "ship-first", "prune", *STAGES)


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


COLUMNS = (
    "injections",
    "ended well at once",
    "with 75",
    "told and ended",
    "right after the next plain run",
    "hand repairs",
)
INJECTIONS, AT_ONCE, STOPPED, ENDED, HEALED, HAND = COLUMNS


@dataclass
class Tally:
    """What came of the injections into an operation."""

    name: str
    ends: Counter[str] = field(default_factory=Counter)  # see COLUMNS
    problems: list[str] = field(default_factory=list)
    files: Counter[str] = field(default_factory=Counter)  # kinds of files that the failed calls were about


@dataclass(frozen=True)
class Attempt:
    """calls: those that failed, or all that were seen when none was to fail: kind, and kind of file."""

    status: int
    failed: int
    calls: list[tuple[str, str]]
    log: str


def sweep(operation: Operation, most: int) -> Tally:
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
    for turn, fault in enumerate(FAULTS):
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
    tally.ends[INJECTIONS] += 1
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
            tally.ends[AT_ONCE] += 1
            return
    elif hit.status == 75:
        tally.ends[STOPPED] += 1
    else:
        tally.ends[ENDED] += 1
    operation.between(number)
    again = attempt(operation, QUIET, 0)
    wrong = operation.problems()
    if again.status == 0 and not wrong:
        tally.ends[HEALED] += 1
    else:
        tally.ends[HAND] += 1
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.io_errors", description="fail the n-th I/O call")
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="with commas (default: all)")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="injections per kind of error (default: all)")
    parser.add_argument("--inputs", type=Path, metavar="DIR", help="where all stages of a micro run have run")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new directory and keep it")
    args = parser.parse_args()
    names = args.operations.split(",")
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        parser.error(f"no operation '{unknown[0]}'; there are {', '.join(OPERATIONS)}")
    base = args.keep or Path(os.environ.get("IO_ERRORS_BASE") or tempfile.mkdtemp(prefix="athanor-io-errors-"))
    base = base.resolve()
    if "IO_ERRORS_BASE" not in os.environ:
        start_again(base)
    started, tallies = time.monotonic(), []
    try:
        scratch = Scratch(Path.cwd(), base / "scratch")
        print(f"| operation | {' | '.join(COLUMNS)} |\n| --- {'| ---: ' * len(COLUMNS)}|")
        for operation in operations(names, scratch, args.inputs):
            tallies.append(sweep(operation, args.most))
            print(row(operation.name, tallies[-1].ends), flush=True)
            for problem in tallies[-1].problems:
                print(problem, file=sys.stderr, flush=True)
    except AthanorError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(base, ignore_errors=True)
    ends = sum((tally.ends for tally in tallies), Counter())
    problems = [problem for tally in tallies for problem in tally.problems]
    print(row("all", ends), end="\n\n")
    for tally in tallies:
        print(f"{tally.name}: {', '.join(f'{count} {name}' for name, count in sorted(tally.files.items()))}")
    print(f"\n{ends[INJECTIONS]} injections, {ends[HAND]} hand repairs, {len(problems)} problems,"
          f" {time.monotonic() - started:.0f} s")  # fmt: skip
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def start_again(base: Path) -> None:
    """This command once more with the library loaded, which has to be there before Python is."""
    base.mkdir(parents=True, exist_ok=True)
    library = base / "shim.so"
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2", "-o", library, SHIM, "-ldl"], check=True)
    settings = {"LD_PRELOAD": str(library), "IO_ERRORS_BASE": str(base), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tools.io_errors", *sys.argv[1:]]
    os.execve(sys.executable, words, environment(**settings))


def operations(names: list[str], scratch: Scratch, inputs: Path | None) -> list[Operation]:
    built = [name for name in names if name in STAGES or name in ("ship", "ship-first", "prune")]
    if built:
        if inputs is None:
            scratch.inputs = scratch.folder(scratch.base / "inputs", scratch.params)
            last = max((STAGES.index(name) for name in built if name in STAGES), default=STAGES.index("shard"))
            for stage in STAGES[: last + 1]:
                scratch.fresh(stage, scratch.inputs)
        else:
            scratch.inputs = inputs.resolve()
    return [named(name, scratch) for name in names]


def row(name: str, ends: Counter[str]) -> str:
    return f"| {name} | {' | '.join(str(ends[column]) for column in COLUMNS)} |"


if __name__ == "__main__":
    sys.exit(main())

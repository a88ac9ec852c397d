"""Fail the n-th read, write, fsync, rename or print of an operation, for n = 1 ... end, and look at what is left.

    python -m tools.io_errors [--operations LIST] [--most N] [--inputs DIR] [--keep DIR]

Operations: store (the chat page's database), journal, ship, ship-first (into no database yet), prune, and the stages
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
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from athanor.base.errors import AthanorError
from tools.io_errors.operations import Operation, named
from tools.io_errors.sweep import Tally, sweep
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
        for operation in operations(names, scratch, args.inputs):
            tallies.append(sweep(operation, args.most))
            print(table(tallies[-1:]) if len(tallies) == 1 else table(tallies[-1:]).splitlines()[-1], flush=True)
            print(*tallies[-1].problems, sep="\n", end="\n" * bool(tallies[-1].problems), file=sys.stderr, flush=True)
    except AthanorError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(base, ignore_errors=True)
    total = sum(tallies, Tally("all"))
    print(table([total]).splitlines()[-1], end="\n\n")
    for tally in tallies:
        print(f"{tally.name}: {', '.join(f'{count} {name}' for name, count in sorted(tally.files.items()))}")
    print(f"\n{total.injections} injections, {total.hand} hand repairs, {len(total.problems)} problems,"
          f" {time.monotonic() - started:.0f} s")  # fmt: skip
    for problem in total.problems:
        print(f"  {problem}")
    return 1 if total.problems else 0


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


def table(tallies: list[Tally]) -> str:
    head = "| operation | injections | ended well at once | with 75 | told and ended | right after the next plain run | hand repairs |"
    lines = [head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for t in tallies:
        lines.append(f"| {t.name} | {t.injections} | {t.at_once} | {t.stopped} | {t.ended} | {t.healed} | {t.hand} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

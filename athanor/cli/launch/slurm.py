"""`athanor launch slurm`: a job script that trains in a chain of jobs."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from pathlib import Path

from athanor.base.artifacts import write_text
from athanor.base.errors import ParamsError
from athanor.cli.render import fill_template
from athanor.runtime.journal import rows
from athanor.runtime.machine import anchor, machine

UNMEASURED_MARGIN = 300  # s before the end of a job, where no save was ever timed here
RESERVE = 60  # s for the last words of DVC, and for a file system that is slower than it was
SLURM_EARLY = 30  # s by which Slurm may send its signal too soon: it looks twice a minute
JOBS = 20
PARTS = ("step", "checkpoint", "evaluation")


def options(parser: argparse.ArgumentParser) -> None:
    parser.description = "A job script for sbatch. Any other option of sbatch goes in with --sbatch."
    parser.add_argument("file", nargs="?", metavar="FILE", help="where to write it; the screen without")
    parser.add_argument("--nodes", type=int, metavar="N", help="of each job (machine.yaml, else 1)")
    parser.add_argument("--processes", type=int, metavar="P", help="ranks on each node; 0 is one per accelerator")
    parser.add_argument("--gpus", type=int, metavar="G", help="cards of each node")
    parser.add_argument("--cpus", type=int, metavar="C", help="cores of each node")
    parser.add_argument(
        "--time", metavar="T", default="04:00:00", help="limit of one job, as sbatch takes it (04:00:00)"
    )
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    parser.add_argument("--exclude", metavar="NODES", help="nodes to leave out, such as n07,n[12-14]")
    parser.add_argument(
        "--sbatch", metavar="LINE", action="append", default=[], help="any other option: --sbatch=--qos=long"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", default=JOBS, help=f"the chain has at most so many jobs ({JOBS})"
    )
    parser.add_argument("--array", action="store_true", help="a chain by --array, where requeueing is not allowed")


def run(args: argparse.Namespace) -> int:
    text = script(args, *margin(anchor(), seconds_of(args.time)))
    (anchor() / ".athanor").mkdir(exist_ok=True)  # Slurm writes its log there, and makes no folder
    if args.file:
        write_text(Path(args.file), text)
    else:
        sys.stdout.write(text)
    print(f"now: sbatch {args.file or 'FILE'}", file=sys.stderr)
    return 0


def script(args: argparse.Namespace, seconds: int, why: str) -> str:
    local = machine().launch
    nodes, processes = args.nodes or local.nodes, local.processes if args.processes is None else args.processes
    wanted = {
        "job-name": "athanor",
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": args.gpus,
        "cpus-per-task": args.cpus,
        "time": args.time,
        "partition": args.partition,
        "account": args.account,
        "exclude": args.exclude,
        "array": f"1-{args.jobs}%1" if args.array else None,
        "signal": f"B:USR1@{seconds}",
        "chdir": str(anchor()),
        "output": ".athanor/slurm-%A_%a.log" if args.array else ".athanor/slurm-%j.log",
        "open-mode": "append",
    }
    flags = [*([] if args.array else ["--requeue"]), *(f"--{name}={value}" for name, value in wanted.items() if value)]
    return fill_template(
        "job.sh.j2",
        flags=[*flags, *args.sbatch],
        nodes=nodes,
        processes=processes,
        jobs=args.jobs,
        array=args.array,
        margin=seconds,
        why=why,
        end=seconds + SLURM_EARLY + RESERVE,
        python=shlex.quote(sys.executable),
        programs=shlex.quote(os.path.dirname(sys.executable)),
    ).rstrip("\n") + "\n"  # fmt: skip


def margin(root: Path, limit: float) -> tuple[int, str]:
    """Seconds before a job's end at which it is asked to save, and where the number comes from.

    A step, a checkpoint and an evaluation must fit, the longest that any run here has told of, twice; a quarter of the
    time at most.
    """
    longest = dict.fromkeys(PARTS, 0.0)
    for path in (root / ".athanor" / "runs").glob("*/journal.jsonl"):
        for row in rows(path.read_bytes()):
            for part in PARTS:
                longest[part] = max(longest[part], row.get("m", {}).get(f"time.{part}_s", 0.0))
    if longest["checkpoint"]:
        told = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in longest.items() if seconds)
        seconds, why = RESERVE + math.ceil(2 * sum(longest.values())), f"the longest measured here: {told}"
    else:
        seconds, why = UNMEASURED_MARGIN, "no checkpoint was timed here yet; after the first run, make the script again"
    if seconds > limit / 4:
        seconds, why = int(limit / 4), f"a quarter of the time, though {seconds} s were better ({why})"
    return seconds, why


def seconds_of(text: str) -> float:
    """A time limit of Slurm's in seconds: MIN, MIN:SEC, H:MIN:SEC, D-H, D-H:MIN or D-H:MIN:SEC (man sbatch)."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ParamsError(f"{text!r} is no time", where="--time", fix="such as 90 (minutes), 04:00:00 or 2-00:00:00")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    total = 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds
    if total < 120:
        raise ParamsError(
            f"{text!r} is too short", where="--time", fix="2 minutes at least: Slurm looks at its clock twice a minute"
        )
    return float(total)

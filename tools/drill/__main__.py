"""Kill resumable stages again and again, at bad moments and worse ones, and compare every byte with a quiet run.

    python -m tools.drill [--stages pretrain,sft,download] [--kills N] [--seed S] [--keep DIR]
                            [--inputs DIR]

For each stage: one uninterrupted run as a process of its own, then rounds in
which attempts die one after the other until one of them ends. Each round's
outputs, metrics, plots, last checkpoint, samples read and journal must be
those of the uninterrupted run. Works in a scratch directory, touches nothing
of this checkout, and exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from athanor.base.errors import AthanorError, ParamsError
from athanor.runtime.progress import duration
from tools.drill.faults import KINDS, STAGES, plan
from tools.drill.stage import Drill, Outcome
from tools.scratch import Scratch, environment


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.drill", description="kill stages at bad moments, compare every byte"
    )
    parser.add_argument("--stages", default=",".join(STAGES), help="resumable stages to drill, with commas")
    parser.add_argument("--kills", type=int, default=34, metavar="N", help="SIGKILLs per stage (34)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="chooses moments and their order (1)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new directory and keep all of it")
    parser.add_argument(
        "--overlap", action="store_true", help="batches are read and checkpoints written beside the steps"
    )
    parser.add_argument("--inputs", type=Path, metavar="DIR", help="a directory where the pipeline has run with them")
    args = parser.parse_args()
    args.stages = args.stages.split(",")
    unknown = [name for name in args.stages if name not in STAGES]
    if unknown:
        raise ParamsError(f"'{unknown[0]}' is no resumable stage", where="--stages", fix=f"use {', '.join(STAGES)}")
    if args.kills < 1:
        raise ParamsError(f"{args.kills} is out of range", where="--kills", fix="use a value ≥ 1")
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        raise ParamsError("the directory is not empty", where=str(args.keep), fix="name a new one")
    if not sys.platform.startswith("linux"):
        raise ParamsError("the drill needs Linux (/proc and fork)", where="tools.drill", fix="run it in a container")
    return args


def main() -> int:
    args = arguments()
    started = time.monotonic()
    base = args.keep or Path(tempfile.mkdtemp(prefix="athanor-drill-"))
    base.mkdir(parents=True, exist_ok=True)
    try:
        outcomes = drill(args, base.resolve())
    except BaseException:
        if not args.keep:
            shutil.rmtree(base)
        raise
    print(table(outcomes))
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    kills = sum(outcome.kills.total() for outcome in outcomes)
    print(f"\n{kills} kills, {len(problems)} differences, {duration(time.monotonic() - started)}")
    for problem in problems:
        print(f"  {problem}")
    if problems:
        print(f"Kept for a look: {base}")
    elif not args.keep:
        shutil.rmtree(base)
    return 1 if problems else 0


def drill(args: argparse.Namespace, base: Path) -> list[Outcome]:
    drilled = environment(ATHANOR_OVERLAP="on" if args.overlap else "off")
    os.environ.clear()
    os.environ.update(drilled)  # before a stage is imported
    scratch = Scratch(Path.cwd(), base)
    if args.inputs:
        scratch.use_inputs(args.inputs, args.stages)
    else:
        say("building the inputs")
        scratch.build_inputs(args.stages)
    outcomes = []
    for stage in args.stages:
        draw = random.Random(f"{args.seed} {stage}")
        one = Drill(scratch, stage, draw, keep=args.keep is not None)
        outcomes.append(one.run(plan(stage, args.kills, draw)))
    return outcomes


def say(text: str) -> None:
    print(f"drill: {text}", file=sys.stderr, flush=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table: a row for each stage and kind of death, and one for the ends of its rounds."""
    head = ("stage", "what happens", "kills", "resumed from a checkpoint", "began anew", "differences")
    rows = []
    for outcome in outcomes:
        for kind, words in KINDS.items():
            numbers = (outcome.kills[kind], outcome.resumed[kind], outcome.anew[kind], outcome.different[kind])
            if any(numbers):
                rows.append((outcome.stage, words, *map(str, numbers)))
        totals = (outcome.kills.total(), outcome.resumed.total(), outcome.anew.total(), len(outcome.problems))
        rows.append((outcome.stage, f"all: {outcome.rounds} rounds to the end", *map(str, totals)))
    rule = ["---"] * 2 + ["---:"] * (len(head) - 2)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AthanorError as error:
        sys.exit(str(error))

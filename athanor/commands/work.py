"""One part of the work that a coordinator left in a folder: what a job of Slurm, or of another scheduler, runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from athanor.errors import InputError
from athanor.pipeline.slurm import TASKS, run_part


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", type=int, required=True, metavar="I", help="from 0")
    parser.add_argument("--of", type=int, required=True, metavar="N")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.part < args.of:
        raise InputError(f"{args.part} is out of range", where="--part", fix=f"use 0 to {args.of - 1}")
    if not (args.folder / TASKS).is_file():
        fix = "a stage makes it when machine.yaml says executor: slurm; this machine has to see the same files"
        raise InputError(f"no {TASKS} there", where=str(args.folder), fix=fix)
    run_part(args.folder.absolute(), args.part, args.of)
    return 0

"""Training on several machines: a look at them before it, and a job script that starts it on all of them.

    athanor launch check [--nodes N] [--processes P] [--json]
    athanor launch slurm [FILE] [--nodes N] [--time T] ...

check   meets as a training would; names a rank that does not come or is silent, measures the ways between them, and
        says how much of a training step they would take. Started on each node. Exit status 1: something is wrong
slurm   a job script for sbatch, to the screen or into FILE: a chain of jobs that goes on where the last one ended

The settings `launch` of machine.yaml hold where no option stands in their place. More: docs/scale-out.md.
"""

from __future__ import annotations

import argparse
import dataclasses

from athanor.base.strict import build
from athanor.runtime.machine import Launch, machine


def options(parser: argparse.ArgumentParser) -> None:
    from athanor.cli.launch import slurm

    kinds = parser.add_subparsers(dest="kind", required=True, metavar="check | slurm")
    check = kinds.add_parser("check", help="do the ranks meet, how fast are the links, what share of a step is that")
    check.add_argument("--processes", type=int, metavar="P", help="ranks on each node; 0 is one per accelerator")
    check.add_argument("--endpoint", metavar="HOST:PORT", help="of node 0, where they meet")
    check.add_argument("--nodes", type=int, metavar="N", help="how many take part, this one included")
    check.add_argument("--wait", type=float, metavar="S", help="seconds to wait for the others")
    check.add_argument("--json", action="store_true", help="for scripts")
    slurm.options(kinds.add_parser("slurm", help="a job script for sbatch"))


def settings(args: argparse.Namespace) -> Launch:
    """`launch` of this machine with what the command line says in its place."""
    named = {
        "processes": args.processes,
        "nodes": args.nodes,
        "endpoint": args.endpoint,
        "wait_s": args.wait,
    }
    values = dataclasses.asdict(machine().launch) | {name: value for name, value in named.items() if value is not None}
    found: Launch = build(Launch, values, "launch")
    return found


def run(args: argparse.Namespace) -> int:
    if args.kind == "slurm":
        from athanor.cli.launch import slurm

        return slurm.run(args)
    from athanor.cli.launch.check import check

    return check(settings(args), args.json)

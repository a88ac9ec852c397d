"""Training on several machines: a look at them before it, and ways to start it on all of them.

    athanor launch check [--nodes N] [--processes P] [--hosts A,B] [--json]
    athanor launch repro --hosts A,B [arguments of athanor repro]
    athanor launch slurm [FILE] [--nodes N] [--time T] ...

check   meets as a training would; names a rank that does not come or is silent, measures the ways between them, and
        says how much of a training step they would take. Started on each node by hand, or on --hosts by ssh. Exit
        status 1: something is wrong
repro   athanor repro here, with its training on --hosts as well, by ssh; machine.yaml may say so for good
slurm   a job script for sbatch, to the screen or into FILE: a chain of jobs that goes on where the last one ended

The settings `launch` of machine.yaml hold where no option stands in their place. More: docs/scale-out.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys

from athanor.base.errors import ParamsError
from athanor.base.strict import build
from athanor.runtime.machine import Launch, machine


def options(parser: argparse.ArgumentParser) -> None:
    from athanor.cli.launch import slurm

    kinds = parser.add_subparsers(dest="kind", required=True, metavar="check | repro | slurm")
    check = kinds.add_parser("check", help="do the ranks meet, how fast are the links, what share of a step is that")
    repro = kinds.add_parser("repro", help="athanor repro here, and its training on other hosts too")
    for kind in (check, repro):
        kind.add_argument("--processes", type=int, metavar="P", help="ranks on each node; 0 is one per accelerator")
        kind.add_argument("--hosts", metavar="A,B", help="the nodes beside this one, as ssh knows them")
        kind.add_argument("--endpoint", metavar="HOST:PORT", help="of node 0, where they meet")
    check.add_argument("--nodes", type=int, metavar="N", help="how many take part, this one included")
    check.add_argument("--wait", type=float, metavar="S", help="seconds to wait for the others")
    check.add_argument("--json", action="store_true", help="for scripts")
    repro.add_argument("arguments", nargs=argparse.REMAINDER, help="of athanor repro, after --")
    slurm.options(kinds.add_parser("slurm", help="a job script for sbatch"))


def settings(args: argparse.Namespace) -> Launch:
    """`launch` of this machine with what the command line says in its place."""
    named = {
        "processes": args.processes,
        "hosts": args.hosts and [host.strip() for host in args.hosts.split(",")],
        "nodes": getattr(args, "nodes", None),
        "endpoint": args.endpoint,
        "wait_s": getattr(args, "wait", None),
    }
    values = dataclasses.asdict(machine().launch) | {name: value for name, value in named.items() if value is not None}
    found: Launch = build(Launch, values, "launch")
    return found


def run(args: argparse.Namespace) -> int:
    if args.kind == "slurm":
        from athanor.cli.launch import slurm

        return slurm.run(args)
    wanted = settings(args)
    if args.kind == "check":
        from athanor.cli.launch.check import check

        return check(wanted, args.json)
    if not wanted.hosts:
        raise ParamsError("names no other machine", where="--hosts", fix="--hosts node2,node3, as ssh knows them")
    from athanor.cli import repro

    os.environ["ATHANOR_LAUNCH"] = wanted.as_text()
    sys.argv = ["athanor repro", *(word for word in args.arguments if word != "--")]
    return repro.main()

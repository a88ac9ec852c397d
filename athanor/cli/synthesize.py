"""Conversations that another model writes about your documents, which it sends away; may cost money. docs/synthetic.md

athanor synthesize --dry-run     how many requests, what they may cost at most, and two of them; sends nothing
athanor synthesize [--force]     send what is not answered yet, within the budget; makes corpus/synthetic/NAME.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from athanor.base.artifacts import read_json, read_manifest, write_bytes
from athanor.cli import side
from athanor.cli.render import fill_template
from athanor.runtime.closure import PROBES
from athanor.runtime.machine import anchor
from athanor.runtime.run import PARAMS
from athanor.runtime.schema import check_file
from athanor.synthesis.endpoint import Ledger, is_local
from athanor.synthesis.params import SyntheticParams
from athanor.synthesis.requests import plan_requests
from stages.synthesize import CLEAN, KIND, LOG, OUT, VERSION

STAGE_FILE, STAGE = Path(PROBES) / "synthesize.yaml", "synthesize"
PUBLIC, LEAF = Path("corpus/synthetic"), Path("metrics/runs/synthesize.json")
SAMPLES = 2


def dry_run(params: SyntheticParams) -> str:
    """What would be sent, without sending anything."""
    requests, ledger = plan_requests(params, CLEAN / "train"), Ledger(anchor() / LOG, params)
    unanswered = [request for request in requests if request.identity not in ledger.replies]
    return fill_template(
        "synthesize.txt.j2",
        target=None,
        params=params,
        requests=requests,
        categories=Counter(request.category for request in requests),
        left=unanswered,
        ledger=ledger,
        samples=unanswered[:SAMPLES],
    )


def publish(params: SyntheticParams) -> str:
    """Copy the stage's result to where download may read it, with a card; returns how to train on it."""
    target = PUBLIC / f"{params.name}.jsonl"
    values = {"params": params, "manifest": read_manifest(OUT, KIND, VERSION), "facts": read_json(LEAF)["facts"]}
    card = fill_template("synthesize.md.j2", **values) + "\n"
    for path, data in ((target, (OUT / target.name).read_bytes()), (target.with_suffix(".md"), card.encode())):
        if not path.is_file() or path.read_bytes() != data:  # or download would run again
            write_bytes(path, data)
    return fill_template("synthesize.txt.j2", target=target, **values)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would be sent, and send nothing")
    parser.add_argument("--force", action="store_true", help="even if nothing has changed: ask again what failed")


def run(args: argparse.Namespace) -> int:
    params: SyntheticParams = check_file(PARAMS)["synthetic"]
    is_local(params.base_url)
    if args.dry_run:
        print(dry_run(params), end="")
        return 0
    status = side.repro(Path.cwd(), STAGE_FILE, STAGE, args.force)
    if status:
        print("\nsynthesize did not finish: the message is above. Every reply is kept.", file=sys.stderr)
        return status
    print(publish(params), end="")
    return 0

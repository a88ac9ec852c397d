"""Conversations that another model writes about your documents, which it sends away; may cost money. docs/synthetic.md

athanor synthesize --dry-run [--show N]   how many requests, what they may cost at most, and N of them; sends nothing
athanor synthesize [--force]              send what is not answered yet, within the budget; makes corpus/synthetic/NAME
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json, read_manifest, write_bytes
from athanor.cli import side
from athanor.cli.render import fill_template
from athanor.runtime.closure import PROBES
from athanor.runtime.machine import anchor
from athanor.runtime.run import PARAMS
from athanor.runtime.schema import check_file
from athanor.synthesis.endpoint import address
from athanor.synthesis.ledger import Ledger, Spent, cost, prices
from athanor.synthesis.params import SyntheticParams
from athanor.synthesis.requests import Request, plan_requests
from stages.synthesize import CLEAN, KIND, LOG, OUT, SEEDS, VERSION

STAGE_FILE, STAGE = Path(PROBES) / "synthesize.yaml", "synthesize"
PUBLIC, LEAF = Path("corpus/synthetic"), Path("metrics/runs/synthesize.json")
BYTES_PER_TOKEN = 4  # of English text, for a guess beside the bound


def dry_run(params: SyntheticParams, show: int) -> str:
    """What would be sent, without sending anything."""
    requests = plan_requests(params, CLEAN / "train", SEEDS)
    ledger = Ledger(anchor() / LOG, params.name, params.budget, params.max_output_tokens).load()
    unanswered = [request for request in requests if request.identity not in ledger.answers]
    return fill_template(
        "synthesize.txt.j2",
        target=None,
        params=params,
        priced=prices(params.budget),
        url=address(params.api, params.base_url),
        key=os.environ.get(params.key_env or ""),
        requests=requests,
        categories=Counter(request.category for request in requests),
        left=unanswered,
        most=max_spent(unanswered, params),
        bytes_per_token=BYTES_PER_TOKEN,
        spent=ledger.spent,
        affordable=affordable_count(unanswered, params, ledger.spent),
        samples=unanswered[:: max(1, len(unanswered) // max(show, 1))][:show],
    )


def max_spent(requests: Sequence[Request], params: SyntheticParams) -> Spent:
    """The most requests, tokens and money that these requests may use."""
    max_tokens, price = params.max_output_tokens, prices(params.budget)
    return sum((cost(request.worst_input_tokens, max_tokens, price) for request in requests), Spent())


def affordable_count(requests: Sequence[Request], params: SyntheticParams, spent: Spent) -> int:
    """How many of the first requests fit the budget if each of them costs as much as it may."""
    for count, request in enumerate(requests):
        spent += max_spent([request], params)
        if spent.exceeded(params.budget) is not None:
            return count
    return len(requests)


def publish(params: SyntheticParams) -> Path:
    """Copy the stage's result to where download may read it, with a card."""
    manifest, leaf = read_manifest(OUT, KIND, VERSION), read_json(LEAF)
    target = PUBLIC / f"{params.name}.jsonl"
    for path, data in (
        (target, (OUT / target.name).read_bytes()),
        (target.with_suffix(".md"), card(params.name, manifest, leaf["facts"]).encode()),
    ):
        if not path.is_file() or path.read_bytes() != data:
            write_bytes(path, data)
    return target


def card(name: str, manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    return fill_template("synthesize.md.j2", name=name, manifest=manifest, facts=facts) + "\n"


def report(params: SyntheticParams, target: Path) -> str:
    """What came out, and what to write into params.yaml to train on it."""
    facts = read_json(LEAF)["facts"]
    spent = Spent(*(facts[f"spent_{name}"] for name in ("requests", "tokens", "money")))
    kept_count = read_manifest(OUT, KIND, VERSION)["counts"]["kept"]
    values = {"params": params, "priced": prices(params.budget), "target": target, "spent": spent, "kept": kept_count}
    return fill_template("synthesize.txt.j2", **values)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would be sent, and send nothing")
    parser.add_argument("--show", type=int, default=2, metavar="N", help="requests that a dry run shows")
    parser.add_argument("--force", action="store_true", help="even if nothing has changed: ask again what failed")


def run(args: argparse.Namespace) -> int:
    params: SyntheticParams = check_file(PARAMS)["synthetic"]
    if args.dry_run:
        print(dry_run(params, args.show), end="")
        return 0
    address(params.api, params.base_url)
    status = side.repro(Path.cwd(), STAGE_FILE, STAGE, args.force)
    if status:
        print("\nsynthesize did not finish: the message is above. Every answer is kept.", file=sys.stderr)
        return status
    print(report(params, publish(params)), end="")
    return 0

"""Conversations that another model writes about your documents, which it sends away; may cost money. docs/synthetic.md

athanor synthesize --dry-run [--show N]   how many requests, what they may cost at most, and N of them; sends nothing
athanor synthesize [--force]              send what is not answered yet, within the budget; makes corpus/synthetic/NAME
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json, read_manifest, write_bytes
from athanor.cli import side
from athanor.runtime.closure import SIDE
from athanor.runtime.machine import anchor
from athanor.runtime.run import PARAMS
from athanor.runtime.schema import check_file
from athanor.synthesis.endpoint import address
from athanor.synthesis.ledger import Ledger, Spent, cost, prices
from athanor.synthesis.params import SyntheticBudget, SyntheticParams
from athanor.synthesis.requests import Request, planned
from stages.synthesize import CLEAN, KIND, LOG, OUT, SEEDS, VERSION

STAGE_FILE, STAGE = Path(SIDE) / "synthesize.yaml", "synthesize"
PUBLIC, LEAF = Path("corpus/synthetic"), Path("metrics/runs/synthesize.json")
BYTES_PER_TOKEN = 4  # of English text, for a guess beside the bound


def dry_run(params: SyntheticParams, show: int) -> list[str]:
    """What would be sent, without sending anything."""
    url, requests = address(params.api, params.base_url), planned(params, CLEAN / "train", SEEDS)
    ledger = Ledger(anchor() / LOG, params.name, params.budget, params.max_output_tokens).look()
    left = [request for request in requests if request.identity not in ledger.answers]
    most = total(left, params)
    read = most.tokens - len(left) * params.max_output_tokens
    shares = ", ".join(f"{name} {count:,}" for name, count in Counter(r.category for r in requests).items())
    name = params.key_env
    key = "none" if name is None else f"{name}, {'set' if os.environ.get(name) else 'not set'}"
    lines = [
        f"To             {url}, model {params.model or 'not named yet (synthetic.model)'}; key in {key}",
        f"Requests       {len(requests):,} ({shares}); {len(requests) - len(left):,} answered already",
        f"At most        {read:,} tokens read ({_guess(read)} as English goes),"
        f" {len(left) * params.max_output_tokens:,} written{_money(most, params.budget)}",
        f"Spent          {_told(ledger.spent, params.budget)} under the name {params.name}",
        f"Budget         {_limits(params.budget)}",
        f"               enough for {affordable(left, params, ledger.spent):,} of the {len(left):,} at their most",
    ]
    for number, request in enumerate(left[:: max(1, len(left) // max(show, 1))][:show], 1):
        lines += ["", f"--- sample {number}, {request.category}, {request.identity}", request.system, "", request.user]
    return [*lines, "", "Nothing was sent."]


def total(requests: Sequence[Request], params: SyntheticParams) -> Spent:
    """The most that these may use."""
    found = Spent()
    for request in requests:
        found += cost(request.worst_input_tokens, params.max_output_tokens, prices(params.budget))
    return found


def affordable(requests: Sequence[Request], params: SyntheticParams, spent: Spent) -> int:
    """How many of the first requests fit the budget if each of them uses its most."""
    for number, request in enumerate(requests):
        spent += cost(request.worst_input_tokens, params.max_output_tokens, prices(params.budget))
        if spent.beyond(params.budget) is not None:
            return number
    return len(requests)


def _guess(tokens: int) -> str:
    return f"about {tokens // BYTES_PER_TOKEN:,}"


def _money(spent: Spent, budget: SyntheticBudget) -> str:
    return f", {spent.money:,.2f} in money" if prices(budget) else "; no cost, for no prices are set"


def _told(spent: Spent, budget: SyntheticBudget) -> str:
    return f"{spent.requests:,} requests, {spent.tokens:,} tokens{_money(spent, budget) if prices(budget) else ''}"


def _limits(budget: SyntheticBudget) -> str:
    money = "" if budget.money is None else f", {budget.money:,.2f} in money"
    return f"{budget.requests:,} requests, {budget.tokens:,} tokens{money}"


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
    """Where the conversations come from and what was measured of them, for whoever trains on them or passes them on."""
    counts, measures = manifest["counts"], manifest["measures"]
    days = facts["first_day"] + (f" to {facts['last_day']}" if facts["last_day"] != facts["first_day"] else "")
    left_out = {**counts["left_out"], **{f"answers: {why}": count for why, count in counts["malformed"].items()}}
    return "\n".join(
        [
            f"# {name}: conversations written by another model",
            "",
            f"- Model: {manifest['model']} (the server's own word: {', '.join(manifest['served_by']) or 'none'})",
            f"- Server: {manifest['url']} ({manifest['api']} API), answers of {days}",
            f"- Conversations: {counts['kept']:,} of {counts['conversations']:,}, from {counts['answers']:,} answers to"
            f" {counts['requests']:,} requests; by category: {_list(counts['categories'])}",
            f"- Left out: {_list(left_out)}",
            f"- Different first questions {measures['distinct_prompts']:.1%},"
            f" different 4-grams {measures['distinct_4grams']:.1%}, "
            f"commonest opening of an answer '{measures['opening']}' {measures['opening_share']:.1%}",
            f"- Stopped by the budget: {manifest['stopped_by_budget'] or 'no'}",
            f"- License given: {manifest['license']}. What a provider's terms allow (training another model, passing"
            " outputs on) is yours to check; nobody did it for you.",
            f"- Licenses of the documents shown, by conversations: {_list(manifest['document_licenses'])}",
            f"- Digest of the documents: {manifest['parents']['clean'][:16]}, of the battery kept out:"
            f" {manifest['parents']['battery'][:16]}",
            "",
        ]
    )


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count) or "none"


def report(params: SyntheticParams, target: Path) -> list[str]:
    """What came out, and what to write into params.yaml to train on it."""
    counts = read_manifest(OUT, KIND, VERSION)["counts"]
    facts = read_json(LEAF)["facts"]
    spent = Spent(*(facts[f"spent_{name}"] for name in ("requests", "tokens", "money")))
    return [
        "",
        f"Conversations  {counts['kept']:,} in {target.as_posix()}, about them {target.with_suffix('.md').as_posix()}",
        f"Spent          {_told(spent, params.budget)} of {_limits(params.budget)}",
        "To train on them, in params.yaml:",
        "  instruct.sources:",
        f"  - {{type: messages, name: {params.name}, files: {target.as_posix()}, hub_id: null, hub_config: null,",
        "     revision: null, hub_split: train, shape: messages, columns: [messages], select: null,",
        f"     max_malformed_fraction: 0.0, max_rows: 1000000, min_rows: 1, license: {json.dumps(params.license)}}}",
        f"  sft_data.sources.{params.name}: {{max_copies: 1, repeats: 1, max_supervised_tokens: null}}",
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would be sent, and send nothing")
    parser.add_argument("--show", type=int, default=2, metavar="N", help="requests that a dry run shows")
    parser.add_argument("--force", action="store_true", help="even if nothing has changed: ask again what failed")


def run(args: argparse.Namespace) -> int:
    params: SyntheticParams = check_file(PARAMS)["synthetic"]
    if args.dry_run:
        print("\n".join(dry_run(params, args.show)))
        return 0
    address(params.api, params.base_url)
    status = side.repro(Path.cwd(), STAGE_FILE, STAGE, args.force)
    if status:
        print("\nsynthesize did not finish: the message is above. Every answer is kept.", file=sys.stderr)
        return status
    print("\n".join(report(params, publish(params))))
    return 0

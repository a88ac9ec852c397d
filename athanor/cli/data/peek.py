"""Random documents of the corpus, kept and dropped, with everything known about them.

athanor data peek                                    five of all
athanor data peek --dropped --rule low_quality       what a rule takes
athanor data peek --kept --score 'quality<0.4' -n 9  what is just good enough
athanor data peek --cluster a21a480d                 a cluster of duplicates, with what differs
"""

from __future__ import annotations

import argparse
import json
import secrets
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.cleaning.table import REASONS
from athanor.cli import render
from athanor.cli.data.choose import Clusters, draw, known, score_condition, twins_of
from athanor.cli.data.read import DROPPED, KEPT, Corpus, Place, weak_labels


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", action="append", default=[], help="of this source; may be given again")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--kept", action="store_true", help="only documents that stayed")
    which.add_argument("--dropped", action="store_true", help="only documents that went")
    parser.add_argument("--rule", action="append", default=[], help="dropped for this reason; may be given again")
    what = "like 'quality<0.4', 'toxicity>0.9'"
    parser.add_argument("--score", action="append", default=[], metavar="COND", help=what)
    parser.add_argument("--cluster", metavar="ID", help="the cluster of duplicates that this document is in")
    parser.add_argument("-n", type=int, default=5, metavar="N", help="how many (default 5)")
    parser.add_argument("--seed", type=int, help="the same documents again (default: a new one each time, printed)")
    parser.add_argument("--chars", type=int, default=600, help="characters of each text, 0 for all (default 600)")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    corpus = Corpus(Path.cwd())
    drawn = peek(corpus, args)
    text = render.fill_template("peek.txt.j2", **drawn, weak_labels=weak_labels(corpus.root))
    print(json.dumps(drawn, indent=2) if args.json else text)
    return 0


def peek(corpus: Corpus, args: argparse.Namespace) -> dict[str, Any]:
    """The seed, how many documents match, and those that were drawn, as plain JSON types."""
    if args.n < 1 or args.chars < 0:
        raise InputError("a number is too small", where="-n, --chars", fix="use -n 1 or more, --chars 0 or more")
    if args.kept and args.rule:
        raise InputError("no rule took what was kept", where="--kept --rule", fix="leave one of them out")
    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    if args.cluster:
        matching, places = _cluster(corpus, args.cluster, args.n)
    else:
        matching, places = draw(
            corpus,
            args.n,
            seed,
            fates=(KEPT,) if args.kept else (DROPPED,) if args.dropped or args.rule else (KEPT, DROPPED),
            sources=[known(name, corpus.sources, "--source") for name in args.source],
            rules=[known(name, REASONS, "--rule") for name in args.rule],
            scores=[score_condition(each) for each in args.score],
        )
    entries = corpus.entries(places)
    twins, rows = twins_of(corpus, entries), []
    for entry in entries:
        shown, note = render.cut(entry.text, args.chars)
        rows.append({**entry.as_json(), "text": shown, "cut": note or None, "chars": len(entry.text)})
        if twin := twins.get(entry.twin or ""):
            rows[-1]["twin_is"] = {name: getattr(twin, name) for name in ("id", "fate", "source", "split", "meta")}
            rows[-1]["differs_from_twin"] = render.differences(twin.text, entry.text)
    return {"seed": None if args.cluster else seed, "matching": matching, "documents": rows}


def _cluster(corpus: Corpus, start: str, count: int) -> tuple[int, list[Place]]:
    """Documents in the cluster, and where some of them are: the one that stayed (or what became of it), then copies."""
    clusters = Clusters(corpus)
    root = clusters.choose(start)
    rows = [Place(corpus.dropped, row) for row in clusters.members[root]]
    first = [place for place in corpus.find([root]).get(root, []) if place not in rows][:1]
    return len(first) + len(rows), [*first, *rows][:count]

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from athanor.commands.data import show
from athanor.commands.data.choose import Clusters, Wanted, draw, known, rule_name, score_condition
from athanor.commands.data.read import DROPPED, KEPT, Corpus, Entry, Place, weak_labels
from athanor.errors import InputError


def parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", action="append", default=[], help="of this source; may be given again")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--kept", action="store_true", help="only documents that stayed")
    which.add_argument("--dropped", action="store_true", help="only documents that went")
    parser.add_argument("--rule", action="append", default=[], help="dropped for this reason; may be given again")
    parser.add_argument(
        "--score", action="append", default=[], metavar="COND", help="like 'quality<0.4', 'toxicity>0.9'"
    )
    parser.add_argument("--cluster", metavar="ID", help="the cluster of duplicates that this document is in")
    parser.add_argument("-n", type=int, default=5, metavar="N", help="how many (default 5)")
    parser.add_argument("--seed", type=int, help="the same documents again (default: a new one each time, printed)")
    parser.add_argument("--chars", type=int, default=600, help="characters of each text, 0 for all (default 600)")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    corpus = Corpus(Path.cwd())
    told = peek(corpus, args)
    print(json.dumps(told, indent=2) if args.json else show.visible(text(corpus, told)))
    return 0


def peek(corpus: Corpus, args: argparse.Namespace) -> dict[str, Any]:
    """The seed, how many documents match, and those that were drawn, as plain JSON types."""
    if args.n < 1 or args.chars < 0:
        raise InputError("a number is too small", where="-n, --chars", fix="use -n 1 or more, --chars 0 or more")
    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    if args.cluster:
        matching, places = _cluster(corpus, args.cluster, args.n)
    else:
        fates = (KEPT,) if args.kept else (DROPPED,) if args.dropped or args.rule else (KEPT, DROPPED)
        if args.kept and args.rule:
            raise InputError("no rule took what was kept", where="--kept --rule", fix="leave one of them out")
        wanted = Wanted(
            tuple(known(name, corpus.sources, "--source") for name in args.source),
            fates,
            tuple(rule_name(name) for name in args.rule),
            tuple(score_condition(each) for each in args.score),
        )
        matching, places = draw(corpus, wanted, args.n, seed)
    entries = corpus.entries(places)
    twins = twins_of(corpus, entries)
    rows = []
    for entry in entries:
        shown, note = show.cut(entry.text, args.chars)
        row = {**entry.as_json(), "text": shown, "cut": note or None, "chars": len(entry.text)}
        twin = twins.get(entry.twin or "")
        if twin is not None:
            differ = show.differences(twin.text, entry.text)
            row["twin_is"] = {
                "id": twin.id,
                "fate": twin.fate,
                "source": twin.source,
                "split": twin.split,
                "meta": twin.meta,
            }
            row["differs_from_twin"] = differ
        rows.append(row)
    return {"seed": None if args.cluster else seed, "matching": matching, "documents": rows}


def _cluster(corpus: Corpus, start: str, count: int) -> tuple[int, list[Place]]:
    """Documents in the cluster, and where some of them are: the one that stayed (or what became of it), then copies."""
    clusters = Clusters(corpus)
    root = clusters.choose(start)
    rows = [Place(corpus.dropped, row) for row in clusters.members()[root]]
    first = [place for place in corpus.find([root]).get(root, []) if place not in rows][:1]
    return len(first) + len(rows), [*first, *rows][:count]


def twins_of(corpus: Corpus, entries: Sequence[Entry]) -> dict[str, Entry]:
    """The documents that dropped duplicates among `entries` repeat, by id; kept ones where there are several."""
    places = corpus.find(entry.twin for entry in entries if entry.twin)
    chosen = {found: where[0] for found, where in places.items()}
    return dict(zip(chosen, corpus.entries(list(chosen.values())), strict=True))


# -- in words ----------------------------------------------------------------------------------------------------------


def text(corpus: Corpus, told: dict[str, Any]) -> str:
    documents = told["documents"]
    if not documents:
        return "no document matches"
    parts = []
    for number, row in enumerate(documents, 1):
        lines = [f"── {number} of {len(documents)} " + "─" * 60, *facts(corpus, row), ""]
        lines.append(row["text"])
        if row["cut"]:
            lines.append(f"[… {row['cut']} are shown; --chars 0 shows all]")
        if "twin_is" in row:
            lines += ["", *_beside(row)]
        parts.append("\n".join(lines))
    again = "" if told["seed"] is None else f"; the same again: --seed {told['seed']}"
    return "\n\n".join([*parts, f"{len(documents)} of {told['matching']:,} that match{again}"])


def facts(corpus: Corpus, row: dict[str, Any]) -> list[str]:
    weak = weak_labels(corpus.root)
    ids = row["id"] + (f"  (now {row['clean_id']})" if row["clean_id"] not in (None, row["id"]) else "")
    meta = ", ".join(f"{name} {value}" for name, value in sorted(row["meta"].items()))
    lines = [f"id       {ids}", f"source   {row['source']}, {row['kind']}, licence {row['license']}, {row['split']}"]
    lines += [f"meta     {meta}"] if meta else []
    fate = row["fate"] if row["rule"] is None else f"dropped by {row['rule']}: {row['detail']}"
    lines += [f"fate     {fate}", f"scores   {scores(row['scores'], weak)}", f"size     {show.size(row['bytes'])}"]
    return lines


def scores(found: dict[str, float], weak: dict[str, bool]) -> str:
    """Scores in one line, with the reminder that labels were weak."""
    if not found:
        return "none: it went before it was scored"
    line = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    named = [name for name, on in weak.items() if on]
    return f"{line}   (weak labels: {', '.join(named)})" if named else line


def _beside(row: dict[str, Any]) -> list[str]:
    twin = row["twin_is"]
    what = f"{twin['fate']}, {twin['source']}, {twin['split']}"
    if not row["differs_from_twin"]:
        return [f"the same text as {twin['id']} ({what})"]
    return [
        f"compared with {twin['id']} ({what}): - there, + here",
        *("  " + line for line in row["differs_from_twin"]),
    ]

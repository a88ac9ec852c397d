"""Random documents of the corpus, kept and dropped, with everything known about them.

athanor data peek                                    five of all
athanor data peek --dropped --rule low_quality       what a rule takes
athanor data peek --kept --score 'quality<0.4' -n 9  what is just good enough
athanor data peek --cluster a21a480d                 a cluster of duplicates, with what differs
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from athanor.base.errors import InputError, suggest
from athanor.cleaning.measuring import SCORES
from athanor.cleaning.reasons import REASONS
from athanor.cli import render
from athanor.cli.data.read import CLEAN, DROPPED, KEPT, Corpus, Entry, RowRef, weak_labels


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", action="append", default=[], help="of this source; may be given again")
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--kept", action="store_true", help="only documents that stayed")
    selection.add_argument("--dropped", action="store_true", help="only documents that went")
    parser.add_argument("--rule", action="append", default=[], help="dropped for this reason; may be given again")
    explanation = "like 'quality<0.4', 'toxicity>0.9'"
    parser.add_argument("--score", action="append", default=[], metavar="COND", help=explanation)
    parser.add_argument("--cluster", metavar="ID", help="the cluster of duplicates that this document is in")
    parser.add_argument("-n", "--count", dest="n", type=int, default=5, metavar="N", help="how many (default 5)")
    parser.add_argument("--seed", type=int, help="the same documents again (default: a new one each time, printed)")
    parser.add_argument("--chars", type=int, default=600, help="characters of each text, 0 for all (default 600)")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    corpus = Corpus(Path.cwd())
    result = peek(corpus, args)
    text = render.fill_template("peek.txt.j2", **result, weak_labels=weak_labels(corpus.root))
    print(json.dumps(result, indent=2) if args.json else text)
    return 0


def peek(corpus: Corpus, args: argparse.Namespace) -> dict[str, Any]:
    """The seed, how many documents match, and those that were drawn, as plain JSON types."""
    if args.n < 1 or args.chars < 0:
        raise InputError("a number is too small", where="-n, --chars", fix="use -n 1 or more, --chars 0 or more")
    if args.kept and args.rule:
        raise InputError("no rule took what was kept", where="--kept --rule", fix="leave one of them out")
    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    if args.cluster:
        matching, refs = _cluster(corpus, args.cluster, args.n)
    else:
        matching, refs = draw(
            corpus,
            args.n,
            seed,
            fates=(KEPT,) if args.kept else (DROPPED,) if args.dropped or args.rule else (KEPT, DROPPED),
            sources=[known_name(name, corpus.sources, "--source") for name in args.source],
            rules=[known_name(name, REASONS, "--rule") for name in args.rule],
            scores=[score_condition(condition) for condition in args.score],
        )
    entries = corpus.entries(refs)
    twins, rows = twins_of(corpus, entries), []
    for entry in entries:
        excerpt, note = render.cut(entry.text, args.chars)
        rows.append({**entry.as_json(), "text": excerpt, "cut": note or None, "chars": len(entry.text)})
        if twin := twins.get(entry.twin or ""):
            rows[-1]["twin_is"] = {name: getattr(twin, name) for name in ("id", "fate", "source", "split", "meta")}
            rows[-1]["differs_from_twin"] = render.differences(twin.text, entry.text)
    return {"seed": None if args.cluster else seed, "matching": matching, "documents": rows}


def _cluster(corpus: Corpus, start: str, count: int) -> tuple[int, list[RowRef]]:
    """How many documents the cluster has, and the rows of some: first the one that stayed (if known), then copies."""
    clusters = Clusters(corpus)
    root = clusters.choose(start)
    rows = [RowRef(corpus.dropped, row) for row in clusters.members[root]]
    first = [ref for ref in corpus.find([root]).get(root, []) if ref not in rows][:1]
    return len(first) + len(rows), [*first, *rows][:count]


# -- choosing documents: by source, fate, rule, score or cluster, at random and yet the same for one seed -----------------

COMPARE = {"<=": le, ">=": ge, "<": lt, ">": gt}
Condition = tuple[str, str, float]  # of a score


def score_condition(text: str) -> Condition:
    """`quality<0.4` as its three parts; InputError with the names that there are."""
    match = re.fullmatch(r"\s*([a-z_]+)\s*(<=|>=|<|>)\s*([0-9.]+)\s*", text)
    where = f"--score {text}"
    try:
        name, sign, number = match[1], match[2], float(match[3])  # type: ignore[index]
    except (TypeError, ValueError):
        raise InputError("not a condition", where=where, fix="write it as 'quality<0.4' or 'toxicity>=0.9'") from None
    if name not in SCORES:
        raise InputError(f"no score is named '{name}'", where=where, fix=f"use one of: {', '.join(SCORES)}")
    return name, sign, number


def known_name(value: str, names: Sequence[str], option: str) -> str:
    """`value` if it is one of the names, else an InputError that says which it probably meant."""
    if value in names:
        return value
    fix = suggest(value, names, f"use one of: {', '.join(names)}", cutoff=0.5)
    raise InputError(f"there is no '{value}'", where=option, fix=fix)


def _mask(
    batch: pa.RecordBatch, file: Path, sources: Sequence[str], rules: Sequence[str], scores: Sequence[Condition]
) -> np.ndarray:
    mask = np.ones(len(batch), bool)
    for name, values in (("source", sources), ("rule", rules)):
        if values:
            mask &= pc.is_in(batch[name], value_set=pa.array(values)).to_numpy(zero_copy_only=False)
    for name, sign, number in scores:
        if name not in batch.schema.names:
            fix = "run dvc repro clean with this version of the code"
            raise InputError("no scores in this file", where=str(file), fix=fix)
        values = batch[name].to_numpy(zero_copy_only=False).astype(np.float64)  # null, of what was never scored, is NaN
        mask &= COMPARE[sign](values, number)
    return mask


class Draw:
    """A random draw of `count` rows from those added batch by batch: those with the smallest random keys stay.

    Keys depend on the seed and the file, so a draw is the same each time, and
    memory is that of the draw.
    """

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, 0
        self._best: list[tuple[float, RowRef]] = []

    def add(self, file: Path, first: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Add `rows` of a batch that begins with row `first` of its file; `keys` are those of the whole batch."""
        self.seen += len(rows)
        rows = rows[np.argsort(keys[rows])[: self.count]]
        keyed_refs = [
            (key, RowRef(file, first + row)) for key, row in zip(keys[rows].tolist(), rows.tolist(), strict=True)
        ]
        self._best = sorted([*self._best, *keyed_refs])[: self.count]

    @property
    def refs(self) -> list[RowRef]:
        return [ref for _, ref in self._best]


def key_generator(seed: int, file: Path) -> np.random.Generator:
    """A generator of the random keys of a file's rows, in order."""
    seed_bytes = hashlib.blake2b(f"{seed}/{file.as_posix()}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(seed_bytes, "big")))


def draw(
    corpus: Corpus,
    count: int,
    seed: int,
    *,
    fates: Sequence[str],
    sources: Sequence[str],
    rules: Sequence[str],
    scores: Sequence[Condition],
) -> tuple[int, list[RowRef]]:
    """How many documents meet all conditions (none given: any), and `count` of them at random."""
    sample = Draw(count)
    files = corpus.kept_files() if KEPT in fates and not rules else []
    for file in [*files, *([corpus.dropped] if DROPPED in fates else ())]:
        # The folder of a training file names its source: others need not be opened.
        if sources and file.parent.parent == CLEAN / "train" and file.parent.name not in sources:
            continue
        generator = key_generator(seed, file)
        for first, batch in corpus.batches(file, ("source", "rule", *SCORES)):
            sample.add(
                file, first, generator.random(len(batch)), np.flatnonzero(_mask(batch, file, sources, rules, scores))
            )
    return sample.seen, sample.refs


def twins_of(corpus: Corpus, entries: Sequence[Entry]) -> dict[str, Entry]:
    """The documents that dropped duplicates among `entries` repeat, by id; kept ones where there are several."""
    refs = corpus.find(entry.twin for entry in entries if entry.twin)
    chosen = {document_id: copies[0] for document_id, copies in refs.items()}
    return dict(zip(chosen, corpus.entries(list(chosen.values())), strict=True))


class Clusters:
    """Clusters of dropped duplicates: each belongs to the document at which the chain of its twins ends.

    Memory: some 300 bytes for each duplicate that was dropped.
    """

    def __init__(self, corpus: Corpus) -> None:
        twins: dict[str, str] = {}
        pairs: list[tuple[int, str, str]] = []  # row of dropped.parquet, id, twin
        for first, batch in corpus.batches(corpus.dropped, ("id", "twin")):
            for row, (own_id, twin) in enumerate(zip(batch["id"].to_pylist(), batch["twin"].to_pylist(), strict=True)):
                if twin is not None:
                    pairs.append((first + row, own_id, twin))
                    # An exact copy has the same id; the one that stayed may be a near copy of a third.
                    if own_id != twin:
                        twins[own_id] = twin

        def root(document_id: str) -> str:
            seen = {document_id}
            while (next_twin := twins.get(document_id)) is not None and next_twin not in seen:
                seen.add(document_id := next_twin)
            return document_id

        self.roots = {document_id: root(document_id) for _, *pair in pairs for document_id in pair}
        members: dict[str, list[int]] = {}
        for row, own_id, _ in pairs:
            members.setdefault(self.roots[own_id], []).append(row)
        # Root to the rows of dropped.parquet that belong to it; the largest cluster first, then by id.
        self.members = dict(sorted(members.items(), key=lambda pair: (-len(pair[1]), pair[0])))

    def choose(self, start: str) -> str:
        """The root of the one cluster that a document whose id begins with `start` is in."""
        hits = sorted({root for document_id, root in self.roots.items() if document_id.startswith(start.lower())})
        if len(hits) == 1:
            return hits[0]
        largest = ", ".join(document_id[:12] for document_id in (hits or list(self.members))[:5])
        what = f"{len(hits)} clusters of duplicates have a document whose id begins with '{start}'"
        fix = f"try one of: {largest}" if largest else "no duplicate was dropped"
        raise InputError(what, where="--cluster", fix=fix)

"""What happened to a document, from the download to the token files that hold it.

athanor data trace 1f8d8810                 an id, of the raw or of the clean text, or its beginning
athanor data trace --text 'some words'      a document that holds this
"""

from __future__ import annotations

import argparse
import heapq
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from athanor.base.artifacts import read_json
from athanor.base.errors import InputError
from athanor.cleaning import minhash, rules
from athanor.cleaning.dedup import shingle_sets
from athanor.cleaning.params import CleanParams
from athanor.cleaning.table import EXACT, EXACT_VAL, ITEM
from athanor.cli import render
from athanor.cli.data import show, where
from athanor.cli.data.choose import DUPLICATES
from athanor.cli.data.read import (
    ITEMS,
    KEPT,
    RAW,
    TEXT_BATCH,
    Corpus,
    Entry,
    Place,
    clean_params,
    weak_labels,
)
from athanor.text.conversations import read_items

MOST = 8  # documents named in an error


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", metavar="ID", help="or the beginning of one")
    parser.add_argument("--text", help="a piece of the document's text, instead of its id")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    if bool(args.id) == bool(args.text):
        raise InputError(
            "one of the two is needed", where="athanor data trace", fix="give an ID, or --text 'some words'"
        )
    corpus = Corpus(Path.cwd())
    places = by_text(corpus, args.text) if args.text else by_id(corpus, args.id)
    histories = [trace(corpus, entry) for entry in corpus.entries(places)]
    if args.json:
        print(json.dumps(histories, indent=2))
    else:
        print("\n".join(render.fill_template("trace.txt.j2", cut=show.cut, **history) for history in histories), end="")
    return 0


# -- which document ----------------------------------------------------------------------------------------------------


def by_id(corpus: Corpus, start: str) -> list[Place]:
    """Every copy of the one text whose id begins with `start`, the one that stayed first."""
    start = start.lower()
    hits: dict[str, list[Place]] = {}  # the id that fits -> where; a text that came twice has one id and two places
    for place, raw, clean in corpus.ids():
        for found in {raw, clean}:
            if found.startswith(start):
                hits.setdefault(found, []).append(place)
    if start in hits:  # whole ids win over beginnings
        hits = {start: hits[start]}
    if len(hits) > 1:
        names = ", ".join(sorted(hits)[:MOST]) + (" …" if len(hits) > MOST else "")
        what = f"{len(hits):,} documents have an id that begins with '{start}'"
        raise InputError(what, where="trace", fix=f"one of {names}")
    if not hits:
        ids = (found for _, raw, clean in corpus.ids() for found in {raw, clean} if found[:1] == start[:1])
        near = heapq.nlargest(MOST, ids, key=lambda found: show.common(found, start))
        near = [found for found in near if show.common(found, start) == show.common(near[0], start)]
        fix = f"the nearest are: {', '.join(near)}" if near else "athanor data peek shows documents with their ids"
        raise InputError(f"no document has an id that begins with '{start}'", where="trace", fix=fix)
    ((_, places),) = hits.items()
    return _with_copies(corpus, places)


def by_text(corpus: Corpus, piece: str) -> list[Place]:
    """Every copy of the one text that holds `piece`, as it was downloaded or as it was left."""
    raw = [file for source in corpus.sources for file in corpus.raw_files(source)]
    found: dict[str, str] = {}
    for files in (raw, corpus.kept_files()):
        for file in files:
            for first, batch in corpus.batches(file, ("id", "text"), TEXT_BATCH):
                mask = pc.match_substring(batch["text"], piece).to_numpy(zero_copy_only=False)
                for row in np.flatnonzero(mask).tolist():
                    found.setdefault(batch["id"][row].as_py(), f"{file.as_posix()} row {first + row}")
        if found:
            break
    if not found:
        raise InputError("no document holds this text", where="--text", fix="give a shorter piece, within one line")
    if len(found) > 1:
        names = ", ".join(f"{one[:12]} ({place})" for one, place in list(found.items())[:MOST])
        more = " …" if len(found) > MOST else ""
        raise InputError(f"{len(found):,} documents hold this text", where="--text", fix=f"trace one of: {names}{more}")
    return by_id(corpus, next(iter(found)))


def _with_copies(corpus: Corpus, places: list[Place]) -> list[Place]:
    """The places of a text, and those of further documents that had the same text when they came."""
    raw = {entry.id for entry in corpus.entries(places)}
    found = [place for copies in corpus.find(raw).values() for place in copies]
    return sorted({*places, *found}, key=lambda place: (place.file == corpus.dropped, place.file.as_posix(), place.row))


# -- what happened -----------------------------------------------------------------------------------------------------


def trace(corpus: Corpus, entry: Entry) -> dict[str, Any]:
    """All that can be told of one document, as plain JSON types."""
    params = clean_params(corpus.root)
    raw = raw_text(corpus, entry)
    facts: dict[str, Any] = {
        "id": entry.id,
        "clean_id": entry.clean_id,
        "downloaded": {
            "source": entry.source,
            "kind": entry.kind,
            "license": entry.license,
            "split": entry.split,
            "meta": entry.meta,
            "file": None if raw is None else raw[0].file.as_posix(),
            "row": None if raw is None else raw[0].row,
            "bytes": None if raw is None else len(raw[1].encode()),
            "source_facts": _source_facts(corpus, entry.source),
        },
        "changed": _changed(entry, raw, params),
        "scores": entry.scores,
        "weak_labels": weak_labels(corpus.root),
        "fate": entry.fate,
        "verdict": _verdict(corpus, entry, params),
    }
    if entry.fate == KEPT:
        place = Place(Path(entry.file), entry.row)
        sampled, why = where.in_tokenizer_sample(corpus, place)
        facts["clean"] = {"file": entry.file, "row": entry.row, "bytes": entry.bytes}
        facts["tokenizer"] = {"in_sample": sampled, "note": why or None}
        facts["token_files"] = where.in_token_files(corpus.root, entry.source, entry.split, entry.text)
    return facts


def raw_text(corpus: Corpus, entry: Entry) -> tuple[Place, str] | None:
    """Where a document is in data/raw, and its text there; None where data/raw is not here."""
    if entry.raw is not None:
        return entry.raw, entry.text
    gone = set(_dropped_places(corpus, entry.id))
    file = Path(entry.file)
    files = corpus.raw_files(entry.source)
    # A training shard is what is left of the raw shard of its number; validation comes from any.
    near = [path for path in files if entry.split == "train" and path.name == file.name]
    for path in [*near, *(path for path in files if path not in near)]:
        for first, batch in corpus.batches(path, ("id", "split")):
            same = pc.equal(batch["id"], entry.id).to_numpy(zero_copy_only=False).nonzero()[0].tolist()
            for row in same:
                place = Place(path, first + row)
                if place not in gone and batch["split"][row].as_py() == entry.split:
                    return place, corpus.rows(path, [place.row], ["text"])[place.row]["text"]
    return None


def _dropped_places(corpus: Corpus, found: str) -> list[Place]:
    """Places in data/raw of the dropped documents with this id."""
    places = []
    for _, batch in corpus.batches(corpus.dropped, ("id", "source", "shard", "row")):
        mask = pc.equal(batch["id"], found)
        places += [
            Place(RAW / r["source"] / f"{r['shard']:05d}.parquet", r["row"]) for r in batch.filter(mask).to_pylist()
        ]
    return places


def _source_facts(corpus: Corpus, source: str) -> dict[str, Any]:
    path = corpus.root / RAW / "manifest.json"
    return read_json(path).get("sources", {}).get(source, {}) if path.is_file() else {}


def _changed(entry: Entry, raw: tuple[Place, str] | None, params: CleanParams | None) -> dict[str, Any]:
    """What normalisation and redaction did to the text; of a dropped one, what they would do."""
    if raw is None:
        return {"note": "data/raw is not here, so what changed cannot be told: dvc checkout data/raw"}
    normal, redacted, counts = show.prepared(raw[1], entry.kind, params)
    now = entry.text if entry.fate == KEPT else redacted
    changes: dict[str, Any] = {
        "normalised": show.differences(raw[1], normal),
        "redacted": show.differences(normal, now),
        "redactions": counts,
    }
    if now != redacted:
        changes |= {"redactions": {}, "note": "other code or parameters than those here redacted this text"}
    return changes


def _verdict(corpus: Corpus, entry: Entry, params: CleanParams | None) -> dict[str, Any]:
    """Why a document stayed or went."""
    if entry.fate == KEPT:
        return {"text": "kept"}
    verdict: dict[str, Any] = {"rule": entry.rule, "detail": entry.detail}
    if entry.rule in DUPLICATES:
        verdict |= _twin(corpus, entry, params)
    elif entry.rule == ITEM:
        verdict |= _item(corpus, entry.detail or "")
    elif params is not None:
        name = (
            "max_bytes" if entry.rule == rules.TOO_LONG else next(c.param for c in rules.CHECKS if c.rule == entry.rule)
        )
        limit = getattr(getattr(params.rules, entry.kind), name)
        verdict |= {"param": f"clean.rules.{entry.kind}.{name}", "limit": limit}
    return verdict


def _twin(corpus: Corpus, entry: Entry, params: CleanParams | None) -> dict[str, Any]:
    """The document that a duplicate repeats, what became of it, and how the two differ."""
    places = corpus.find([entry.twin or ""]).get(entry.twin or "", [])
    places = [place for place in places if place != Place(corpus.dropped, entry.row)]
    if not places:
        return {"twin": {"id": entry.twin, "fate": "unknown"}}
    (twin,) = corpus.entries(places[:1])
    about_twin = {
        name: getattr(twin, name) for name in ("id", "fate", "source", "split", "file", "row", "rule", "meta")
    }
    ours = show.prepared(entry.text, entry.kind, params)[1]
    theirs = twin.text if twin.fate == KEPT else show.prepared(twin.text, twin.kind, params)[1]
    if entry.rule in (EXACT, EXACT_VAL):
        return {"twin": about_twin, "differs": show.differences(theirs, ours)}
    (_, a), (_, b) = shingle_sets([(0, ours), (1, theirs)])
    limit = None if params is None else params.dedup.near_duplicate_jaccard
    return {
        "twin": about_twin,
        "differs": show.differences(theirs, ours),
        "jaccard": round(float(minhash.jaccard(a, b)), 4),
        "param": "clean.dedup.near_duplicate_jaccard",
        "limit": limit,
    }


def _item(corpus: Corpus, found: str) -> dict[str, Any]:
    """The evaluation item that a document holds."""
    path = corpus.root / ITEMS
    for item in read_items(path) if path.is_file() else ():
        if item.id == found:
            return {"item": {"id": found, "category": item.category, "prompt": item.prompt[-1].content}}
    return {"item": {"id": found, "note": "data/battery is not here, or another one"}}

"""What happened to a document, from the download to the token files that hold it.

athanor data trace 1f8d8810                 an id, of the raw or of the clean text, or its beginning
athanor data trace --text 'some words'      a document that holds this
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from athanor.base.artifacts import manifest_digest, read_json, read_manifest
from athanor.base.errors import AthanorError, InputError
from athanor.base.strict import build
from athanor.cleaning import minhash, pii, rules
from athanor.cleaning.dedup import shingle_sets
from athanor.cleaning.normalise import normalise
from athanor.cleaning.params import CleanParams
from athanor.cleaning.reasons import EXACT, EXACT_VAL, ITEM, NEAR, NEAR_VAL
from athanor.cli import render
from athanor.cli.data.read import (
    CLEAN,
    ITEMS,
    KEPT,
    RAW,
    SHARDS,
    TEXT_BATCH,
    TOKENIZER,
    Corpus,
    Entry,
    RowRef,
    clean_params,
    raw_row_ref,
    weak_labels,
)
from athanor.cli.render import differences
from athanor.data.mixture import mix_sources, plan_mixture
from athanor.data.mixture_params import MixtureParams
from athanor.data.shards import COOLDOWN, KIND, TRAIN, VERSION
from athanor.runtime.dvc_lock import built_params
from athanor.text.conversations import searched_items
from athanor.text.documents import shard_files
from athanor.tokenizer_training.params import TokenizerParams

MAX_NAMES = 8  # documents named in an error


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", metavar="ID", help="or the beginning of one")
    parser.add_argument("--text", help="a piece of the document's text, instead of its id")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    if bool(args.id) == bool(args.text):
        fix = "give an ID, or --text 'some words'"
        raise InputError("one of the two is needed", where="athanor data trace", fix=fix)
    corpus = Corpus(Path.cwd())
    refs = by_text(corpus, args.text) if args.text else by_id(corpus, args.id)
    histories = [trace(corpus, entry) for entry in corpus.entries(refs)]
    if args.json:
        print(json.dumps(histories, indent=2))
    else:
        texts = [render.fill_template("trace.txt.j2", cut=render.cut, **history) for history in histories]
        print("\n".join(texts), end="")
    return 0


# -- which document ----------------------------------------------------------------------------------------------------


def by_id(corpus: Corpus, start: str) -> list[RowRef]:
    """Every copy of the one text whose id begins with `start`, the one that stayed first."""
    start = start.lower()
    hits: dict[str, list[RowRef]] = {}  # matching id -> its rows; a text that came twice has one id and two rows
    near: dict[str, int] = {}  # id with the same first digit -> how many digits it shares
    for ref, *ids in corpus.ids():
        for document_id in set(ids):
            if document_id.startswith(start):
                hits.setdefault(document_id, []).append(ref)
            elif not hits and (shared := render.common_prefix_length(document_id, start)) >= max(
                near.values(), default=1
            ):
                near = {**(near if shared == max(near.values(), default=1) else {}), document_id: shared}
    if start in hits:  # whole ids win over beginnings
        hits = {start: hits[start]}
    if len(hits) > 1:
        what = f"{len(hits):,} documents have an id that begins with '{start}'"
        raise InputError(what, where="trace", fix=f"one of {_name_list(sorted(hits))}")
    if not hits:
        fix = (
            f"the nearest are: {_name_list(sorted(near))}"
            if near
            else "athanor data peek shows documents with their ids"
        )
        raise InputError(f"no document has an id that begins with '{start}'", where="trace", fix=fix)
    ((_, refs),) = hits.items()
    # And those of further documents that had the same text when they came.
    copies = corpus.find(entry.id for entry in corpus.entries(refs)).values()
    return sorted(
        {*refs, *(ref for copy_refs in copies for ref in copy_refs)},
        key=lambda ref: (ref.file == corpus.dropped, ref.file.as_posix(), ref.row),
    )


def by_text(corpus: Corpus, piece: str) -> list[RowRef]:
    """Every copy of the one text that holds `piece`, as it was downloaded or as it was left."""
    raw = [file for source in corpus.sources for file in corpus.raw_files(source)]
    matches: dict[str, str] = {}
    for files in (raw, corpus.kept_files()):
        for file in files:
            for first, batch in corpus.batches(file, ("id", "text"), TEXT_BATCH):
                mask = pc.match_substring(batch["text"], piece).to_numpy(zero_copy_only=False)
                for row in np.flatnonzero(mask).tolist():
                    matches.setdefault(batch["id"][row].as_py(), f"{file.as_posix()} row {first + row}")
        if matches:
            break
    if not matches:
        raise InputError("no document holds this text", where="--text", fix="give a shorter piece, within one line")
    if len(matches) > 1:
        names = _name_list([f"{document_id[:12]} ({location})" for document_id, location in matches.items()])
        raise InputError(f"{len(matches):,} documents hold this text", where="--text", fix=f"trace one of: {names}")
    return by_id(corpus, next(iter(matches)))


def _name_list(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (" …" if len(names) > MAX_NAMES else "")


# -- what happened -----------------------------------------------------------------------------------------------------


def trace(corpus: Corpus, entry: Entry) -> dict[str, Any]:
    """All that is known about one document, as plain JSON types."""
    params, raw = clean_params(corpus.root), raw_text(corpus, entry)
    manifest = corpus.root / RAW / "manifest.json"
    sources = read_json(manifest).get("sources", {}) if manifest.is_file() else {}
    facts: dict[str, Any] = {
        "id": entry.id,
        "clean_id": entry.clean_id,
        "downloaded": {
            **{name: getattr(entry, name) for name in ("source", "kind", "license", "split", "meta")},
            "file": None if raw is None else raw[0].file.as_posix(),
            "row": None if raw is None else raw[0].row,
            "bytes": None if raw is None else len(raw[1].encode()),
            "source_facts": sources.get(entry.source, {}),
        },
        "changed": _changes(entry, raw, params),
        "scores": entry.scores,
        "weak_labels": weak_labels(corpus.root),
        "fate": entry.fate,
        "verdict": _verdict(corpus, entry, params),
    }
    if entry.fate == KEPT:
        sampled, reason = in_tokenizer_sample(corpus, RowRef(Path(entry.file), entry.row))
        facts["clean"] = {"file": entry.file, "row": entry.row, "bytes": entry.bytes}
        facts["tokenizer"] = {"in_sample": sampled, "note": reason or None}
        facts["token_files"] = in_token_files(corpus.root, entry.source, entry.split, entry.text)
    return facts


def raw_text(corpus: Corpus, entry: Entry) -> tuple[RowRef, str] | None:
    """Where a document is in data/raw, and its text there; None where data/raw is not here."""
    if entry.raw is not None:
        return entry.raw, entry.text
    files = corpus.raw_files(entry.source)
    copies = corpus.find([entry.id]).get(entry.id, []) if files else []
    dropped_refs = {raw_row_ref(row) for ref, row in corpus.rows_at(copies).items() if ref.file == corpus.dropped}
    # A training shard is what is left of the raw shard of its number; validation comes from any.
    for path in sorted(files, key=lambda path: path.name != Path(entry.file).name):
        for first, batch in corpus.batches(path, ("id", "split")):
            rows = pc.equal(batch["id"], entry.id).to_numpy(zero_copy_only=False).nonzero()[0].tolist()
            for row in rows:
                ref = RowRef(path, first + row)
                if ref not in dropped_refs and batch["split"][row].as_py() == entry.split:
                    return ref, corpus.rows(path, [ref.row])[ref.row]["text"]
    return None


def prepared(text: str, kind: str, params: CleanParams | None) -> tuple[str, str, dict[str, int]]:
    """A raw text normalised, that text redacted, and the redactions counted by kind (none without params)."""
    normalised = normalise(text, kind)
    if params is None:
        return normalised, normalised, {}
    redacted, counts = pii.redact(normalised, getattr(params.pii, kind))
    return normalised, redacted, dict(sorted(counts.items()))


def _changes(entry: Entry, raw: tuple[RowRef, str] | None, params: CleanParams | None) -> dict[str, Any]:
    """What normalisation and redaction changed in the text, or would change in a dropped one."""
    if raw is None:
        return {"note": "data/raw is not here, so what changed cannot be told: dvc checkout data/raw"}
    normal, redacted, counts = prepared(raw[1], entry.kind, params)
    final = entry.text if entry.fate == KEPT else redacted
    changes = {"normalised": differences(raw[1], normal), "redacted": differences(normal, final), "redactions": counts}
    if final != redacted:
        changes |= {"redactions": {}, "note": "other code or parameters than those here redacted this text"}
    return changes


def _verdict(corpus: Corpus, entry: Entry, params: CleanParams | None) -> dict[str, Any]:
    """Why a document stayed or went."""
    if entry.fate == KEPT:
        return {"text": "kept"}
    verdict: dict[str, Any] = {"rule": entry.rule, "detail": entry.detail}
    if entry.rule in (EXACT, NEAR, EXACT_VAL, NEAR_VAL):
        return verdict | _twin_verdict(corpus, entry, params)
    if entry.rule == ITEM:
        return verdict | {"item": {"id": entry.detail, **_item(corpus, entry.detail or "")}}
    if params is not None:
        names = {check.rule: check.param for check in rules.CHECKS} | {rules.TOO_LONG: "max_bytes"}
        limit = getattr(getattr(params.rules, entry.kind), names[entry.rule])
        verdict |= {"param": f"clean.rules.{entry.kind}.{names[entry.rule]}", "limit": limit}
    return verdict


def _twin_verdict(corpus: Corpus, entry: Entry, params: CleanParams | None) -> dict[str, Any]:
    """The document that a duplicate repeats, what became of it, and how the two differ."""
    refs = corpus.find([entry.twin or ""]).get(entry.twin or "", [])
    refs = [ref for ref in refs if ref != RowRef(corpus.dropped, entry.row)]
    if not refs:
        return {"twin": {"id": entry.twin, "fate": "unknown"}}
    (twin,) = corpus.entries(refs[:1])
    own_text, twin_text = (
        each.text if each.fate == KEPT else prepared(each.text, each.kind, params)[1] for each in (entry, twin)
    )
    facts = {name: getattr(twin, name) for name in ("id", "fate", "source", "split", "file", "row", "rule", "meta")}
    verdict: dict[str, Any] = {"twin": facts, "differs": differences(twin_text, own_text)}
    if entry.rule in (NEAR, NEAR_VAL):
        (_, a), (_, b) = shingle_sets([(0, own_text), (1, twin_text)])
        limit = None if params is None else params.dedup.near_duplicate_jaccard
        verdict |= {"jaccard": round(float(minhash.jaccard(a, b)), 4)}
        verdict |= {"param": "clean.dedup.near_duplicate_jaccard", "limit": limit}
    return verdict


def _item(corpus: Corpus, item_id: str) -> dict[str, Any]:
    """The evaluation item that a document holds."""
    path = corpus.root / ITEMS
    for item in searched_items(path) if path.is_file() else ():
        if item.id == item_id:
            return {"category": item.category, "prompt": item.prompt[-1].content}
    return {"note": "data/battery is not here, or another one"}


# -- where in the token files it is, and whether the tokenizer learned from it --------------------------------------------

# The token files name no documents. They are found by their ids: equal ids are equal text, and most documents are ruled
# out by their length and source alone.

SAMPLE_BYTES = 2_000_000_000  # of text: the tokenizer's sample of a larger corpus takes minutes to tell


def in_token_files(root: Path, source: str, split: str, text: str) -> dict[str, Any]:
    """Tokens of a text and its places in the streams, or a note why they are not known."""
    if not (root / TOKENIZER / "manifest.json").is_file():
        return {"note": "no tokenizer is here yet: dvc repro train-tokenizer"}
    from athanor.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(root / TOKENIZER)
    ids = np.concatenate([[tokenizer.bos], tokenizer.encode_arrays([text])[0], [tokenizer.eos]])
    known: dict[str, Any] = {"tokens": len(ids), "bytes_per_token": round(len(text.encode()) / max(1, len(ids) - 2), 3)}
    if not (root / SHARDS / "manifest.json").is_file():
        return {**known, "note": "no token files are here yet: dvc repro shard"}
    manifest = read_manifest(root / SHARDS, KIND, VERSION)
    if manifest["tokenizer"] != tokenizer.digest:
        return {**known, "note": "data/shards was made with another tokenizer: dvc repro shard"}
    if manifest["parents"]["clean"] != manifest_digest(root / CLEAN):
        known["note"] = "data/shards was made of another data/clean: dvc repro shard"
    dtype, streams = np.dtype(manifest["dtype"]), {}
    if split == "val":
        streams["val"] = _occurrences(root, SHARDS / "val" / source, ids.astype(dtype), None)
    else:
        for stream, facts in ((TRAIN, manifest), (COOLDOWN, manifest.get(COOLDOWN))):
            if facts is not None:
                names = sorted(facts["sources"])
                streams[stream] = {"source_epochs": 0.0, "places": []}
                if source in names:
                    occurrences = _occurrences(root, SHARDS / stream, ids.astype(dtype), names.index(source))
                    streams[stream] = {"source_epochs": facts["sources"][source]["epochs"], "places": occurrences}
    return {**known, "streams": streams}


def _occurrences(root: Path, folder: Path, ids: np.ndarray, source: int | None) -> list[dict[str, Any]]:
    """Every document of a folder's token files that equals `ids`: file, number in it, first token in the stream."""
    occurrences, tokens_before, documents_before = [], 0, 0
    for path in sorted((root / folder).glob("*.bin")):
        starts = np.load(path.with_suffix(".idx.npy")).astype(np.int64)
        fits = np.diff(starts) == len(ids)
        if source is not None:
            fits &= np.load(path.with_suffix(".src.npy")) == source
        tokens = np.memmap(path, dtype=ids.dtype, mode="r") if fits.any() else ids
        for number in np.flatnonzero(fits).tolist():
            if np.array_equal(tokens[starts[number] : starts[number + 1]], ids):
                occurrences.append(
                    {
                        "file": path.relative_to(root).as_posix(),
                        "document": number,
                        "token": int(starts[number]),
                        "stream_document": documents_before + number,
                        "stream_token": tokens_before + int(starts[number]),
                    }
                )
        tokens_before, documents_before = tokens_before + int(starts[-1]), documents_before + len(starts) - 1
    return occurrences


def in_tokenizer_sample(corpus: Corpus, ref: RowRef) -> tuple[int | None, str]:
    """How often a training document is in the sample that the tokenizer was trained on, or None and why not."""
    if ref.file.parent.parent != CLEAN / "train":
        return 0, "the tokenizer is trained on training documents"
    if sum(row["bytes"] for row in corpus.manifest["counts"]["train"].values()) > SAMPLE_BYTES:
        return None, f"not looked up in a corpus of more than {SAMPLE_BYTES / 1e9:.0f} GB"
    values = built_params(corpus.root, "train-tokenizer")
    try:
        params = build(TokenizerParams, values["tokenizer"], "tokenizer")
        return _sampled(corpus, ref, params, build(MixtureParams, values["mixture"], "mixture")), ""
    except (KeyError, AthanorError) as error:
        return None, f"the tokenizer's sample cannot be told ({error})"


def _sampled(corpus: Corpus, ref: RowRef, params: TokenizerParams, mixture: MixtureParams) -> int:
    document_number = -1
    lengths: dict[str, np.ndarray] = {}  # int64 [documents]: UTF-8 bytes of each text
    for source, files in shard_files(corpus.root / CLEAN / "train").items():
        if mixture.sources[source].share > 0:
            batch_lengths = [np.zeros(0, np.int64)]
            for file in (path.relative_to(corpus.root) for path in files):
                if file == ref.file:
                    document_number = sum(map(len, batch_lengths)) + ref.row
                for _, batch in corpus.batches(file, ("text",), TEXT_BATCH):
                    batch_lengths.append(pc.binary_length(batch["text"]).to_numpy(zero_copy_only=False))
            lengths[source] = np.concatenate(batch_lengths).astype(np.int64)
    if document_number < 0:
        return 0
    sources = mix_sources({name: mixture.sources[name] for name in lengths}, lengths)
    plan = plan_mixture(sources, params.sample_bytes, mixture.seed)
    source_index = [source.name for source in sources].index(ref.file.parent.name)
    return int(((plan.sources == source_index) & (plan.documents == document_number)).sum())

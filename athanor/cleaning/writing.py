"""The last work on a measured shard: write the kept and the dropped documents, then read them back and check them.

The checks use the files alone, and nothing that the cleaning remembers of them:
`check_documents` shard by shard, `run_gates` on what was observed in all of
them together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from athanor.base.artifacts import read_json
from athanor.base.errors import GateError
from athanor.base.work import Facts
from athanor.cleaning import dedup, minhash, rules, validation
from athanor.cleaning.deciding import read_decisions
from athanor.cleaning.groups import hex_id, ids_of, read_measures
from athanor.cleaning.measuring import DOCUMENTS, SCORES, load_tools, read_hits, save_hits
from athanor.cleaning.normalise import AS_FOUND, misread_count
from athanor.cleaning.params import CleanParams, RuleParams
from athanor.cleaning.reasons import ITEM, KEPT, REASONS
from athanor.text.documents import ROW_GROUP_DOCUMENTS, Document, in_batches, read_documents
from athanor.words.decontaminate import Hits, ItemIndex
from athanor.words.words import Columns, Tokens, shingles, tokenise

SPLITS = ("train", "val")
DROPPED_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "source", "kind")),
        ("shard", pa.int32()),  # of data/raw
        ("row", pa.int32()),  # in that shard
        *((name, pa.string()) for name in ("rule", "detail", "twin")),
        ("bytes", pa.int64()),
        *((name, pa.float32()) for name in SCORES),
    ]
)
BINS = 20  # of a score's histogram, 0 to 1
MAX_CONSECUTIVE_REPEATS = 31
BATCH_CHARS = 1_000_000
HITS, IDS = "hits.npz", "ids.npy"
BUG = "this is a bug in the clean stage; report it with the document"

Numbered = tuple[int, Document]  # a document with its row of the table


def write_shard(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: train.parquet, val.parquet (where there is anything) and dropped.parquet of one measured shard."""
    folder = task["shard"]
    params, index, _ = load_tools(task["tools"])
    measures, (reason, marks) = read_measures(folder), read_decisions(task)
    kept_mask = reason == KEPT
    written: list[tuple[str, Path, np.ndarray]] = []
    if len(kept_mask):
        table = pq.read_table(folder / DOCUMENTS)
        for name in SCORES:
            table = table.append_column(pa.field(name, pa.float32()), pa.array(measures[name].astype(np.float32)))
        for split in SPLITS:
            mask = kept_mask & (measures["val"] == (split == "val"))
            if mask.any():
                path = out / f"{split}.parquet"
                write_table(path, table.filter(pa.array(mask)))
                written.append((split, path, task["start"] + np.flatnonzero(mask)))
        del table
    details = _details(measures, params.rules, reason, marks, index)
    write_table(out / "dropped.parquet", _dropped_table(task, folder, measures, reason, details))
    counts: Facts = {}
    sample, threshold = validation.load(tuple(task["sample"])), params.dedup.near_duplicate_jaccard
    limits = asdict(params.rules)
    unlimited = {kind for kind in limits if limits[kind]["max_consecutive_repeats"] is None}
    observed = check_documents(_read_and_count(written, counts), index, sample, threshold, unlimited)
    return {"counts": counts, "scores": _histograms(measures, kept_mask), "observed": observed.save(out)}


def write_table(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, row_group_size=ROW_GROUP_DOCUMENTS, compression="zstd", compression_level=3)


def _read_and_count(written: Sequence[tuple[str, Path, np.ndarray]], counts: Facts) -> Iterator[Numbered]:
    """Documents of the written files with their table rows, counted: the funnel describes files, not intentions."""
    for split, path, numbers in written:
        row = counts.setdefault(split, {"documents": 0, "bytes": 0})
        for document in read_documents(path):
            if document.split != split:
                what = f"a {document.split} document is in {split}"
                raise GateError("splits stay apart", what, where=f"document {document.id}")
            yield int(numbers[min(row["documents"], len(numbers) - 1)]), document
            row["documents"] += 1
            row["bytes"] += len(document.text.encode())


def _details(
    measures: Columns,
    params: RuleParams,
    reason: np.ndarray,
    marks: Mapping[int, tuple[int, np.ndarray]],
    index: ItemIndex,
) -> dict[int, tuple[str, str | None]]:
    """For each dropped document of a shard the item, copy or value that it was dropped for, and the id of the copy."""
    _, values = rules.verdicts(measures, measures["kind"], params)
    details: dict[int, tuple[str, str | None]] = {}
    for row in np.flatnonzero(reason != KEPT).tolist():
        mark, repeated = marks.get(row, (-1, None))
        if mark < 0:
            details[row] = f"{values[row]:.6g}", None
        elif reason[row] == REASONS.index(ITEM):
            details[row] = index.items[mark].id, None
        else:
            details[row] = hex_id(repeated), hex_id(repeated)
    return details


def _dropped_table(
    task: Mapping[str, Any],
    folder: Path,
    measures: Columns,
    reason: np.ndarray,
    details: Mapping[int, tuple[str, str | None]],
) -> pa.Table:
    origin = {"source": task["source"], "shard": task["number"]}
    rows = [
        {
            **origin,
            "id": hex_id(measures["raw_id"][row]),
            "kind": measures["kind"][row],
            "row": int(measures["place"][row]),
            "rule": REASONS[reason[row]],
            "detail": detail,
            "twin": twin,
            "bytes": int(measures["bytes"][row]),
            **{name: float(measures[name][row]) for name in SCORES},
        }
        for row, (detail, twin) in details.items()
    ]
    for long_document in read_json(folder / "facts.json")["too_long"]:
        rows.append({**origin, **long_document, "rule": rules.TOO_LONG, "detail": str(long_document["bytes"])})
    return pa.Table.from_pylist(sorted(rows, key=lambda row: row["row"]), schema=DROPPED_SCHEMA)


def _histograms(measures: Columns, kept_mask: np.ndarray) -> dict[str, dict[str, list[int]]]:
    """Score -> kept or dropped -> documents in each of BINS equal bins from 0 to 1."""
    histograms: dict[str, dict[str, list[int]]] = {}
    for name in SCORES:
        values = np.asarray(measures.get(name, np.zeros(0)), np.float64)
        bins = np.clip((values * BINS).astype(int), 0, BINS - 1)
        histograms[name] = {
            outcome: np.bincount(bins[mask], minlength=BINS).tolist()
            for outcome, mask in (("kept", kept_mask), ("dropped", ~kept_mask))
        }
    return histograms


@dataclass
class Observed:
    """What reading some documents back showed: the most repeats in a row, battery hits, ids and near copies."""

    repeats: int = 0
    misread: int = 0
    copies: dict[int, int] = field(default_factory=dict)  # document that nearly equals a sampled one -> that one
    hits: list[tuple[str, Hits]] = field(default_factory=list)  # which document, what it holds of evaluation items
    ids: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), np.uint64))  # [2, documents], sorted

    def save(self, folder: Path) -> Facts:
        """Write the arrays; returns the rest as JSON types."""
        save_hits(folder / HITS, [(number, hit) for number, (_, hit) in enumerate(self.hits)])
        np.save(folder / IDS, self.ids)
        copies = [[int(number), int(twin)] for number, twin in sorted(self.copies.items())]
        locations = [location for location, _ in self.hits]
        return {"repeats": self.repeats, "misread": self.misread, "copies": copies, "where": locations}

    @staticmethod
    def load(folder: Path, facts: Mapping[str, Any]) -> Observed:
        """What `save` wrote, without the ids: `repeats.count_repeats` reads those."""
        hits = list(zip(facts["where"], read_hits(folder / HITS)[1], strict=True))
        return Observed(facts["repeats"], facts["misread"], dict(facts["copies"]), hits)


def check_documents(
    documents: Iterable[Numbered],
    index: ItemIndex,
    sample: Sequence[dedup.Index],
    threshold: float,
    unlimited: Collection[str] = (),
) -> Observed:
    """Read numbered documents; GateError for one that repeats itself too often, except of the kinds that are `unlimited`."""
    observed = Observed()
    ids: list[bytes] = []
    for batch in in_batches(documents, lambda item: len(item[1].text), BATCH_CHARS):
        texts = [document.text for _, document in batch]
        tokens = tokenise(texts)
        _check_repeats(batch, tokens, observed, unlimited)
        for (_, document), hit in zip(batch, index.scan(texts, tokens, prompts_alone=False), strict=True):
            if hit:
                observed.hits.append((f"document {document.id} of source {document.source}", hit))
        grams = shingles(tokens.words, minhash.SHINGLE_WORDS)
        sets = ((number, np.unique(grams.of(row))) for row, (number, _) in enumerate(batch))
        observed.copies |= dict(validation.near_ones(sets, sample, threshold).T.tolist())
        ids += [bytes.fromhex(document.id) for _, document in batch]
        observed.misread += sum(misread_count(document.text) for _, document in batch if document.kind not in AS_FOUND)
    found = ids_of(ids).T
    observed.ids = found[:, np.lexsort((found[1], found[0]))]
    return observed


def _check_repeats(batch: Sequence[Numbered], tokens: Tokens, observed: Observed, unlimited: Collection[str]) -> None:
    limited = [document.kind not in unlimited for _, document in batch]
    repeats = np.where(limited, rules.consecutive(tokens), 0)
    observed.repeats = max(observed.repeats, int(repeats.max()))
    if observed.repeats > MAX_CONSECUTIVE_REPEATS:
        worst = batch[int(repeats.argmax())][1]
        what = f"an n-gram occurs {observed.repeats} times in a row, {MAX_CONSECUTIVE_REPEATS} are allowed"
        where = f"document {worst.id} of source {worst.source}"
        raise GateError("no long repetition", what, where=where, fix=BUG)


def run_gates(
    observations: Iterable[Observed], duplicates: int, sampled: Iterable[int], params: CleanParams, index: ItemIndex
) -> Facts:
    """Facts for the metrics; GateError when the documents break a promise of the clean stage.

    `observations` are read once and not kept. `duplicates` is how many of all ids occur again, `sampled` the numbers of
    the documents in the sample's index.
    """
    total = Observed()

    def hits() -> Iterator[tuple[str, Hits]]:
        for observed in observations:
            total.repeats = max(total.repeats, observed.repeats)
            total.misread += observed.misread
            total.copies |= observed.copies
            yield from observed.hits

    limit = params.decontamination.max_ngram_documents
    for where, item in sorted(index.resolve(hits(), max_ngram_documents=limit).items()):
        what = f"item {index.items[item].id} of category {index.items[item].category} is still in the text"
        raise GateError("no evaluation item", what, where=where, fix=BUG)
    if duplicates:
        raise GateError("no duplicates", f"{duplicates} documents equal another one", where="data/clean")
    return {
        "consecutive_repeats_max": total.repeats,
        "misread_characters": total.misread,
        "duplicates": _check_duplicate_fraction(total.copies, set(sampled), params.dedup.max_duplicate_fraction),
    }


def _check_duplicate_fraction(copies: dict[int, int], sample: set[int], limit: float) -> Facts:
    """`copies` name documents that resemble a sampled one; what counts is how many sampled ones are resembled."""
    twins = set(copies.values()) | (set(copies) & sample)
    share = len(twins) / len(sample) if sample else 0.0
    if share > limit:
        what = f"{len(twins)} of {len(sample)} sampled documents have a near copy, {limit:.2%} are allowed"
        fix = "look at the copies; raise clean.dedup.max_duplicate_fraction if you accept them"
        raise GateError("duplicate rate", what, where="data/clean", fix=fix)
    return {"checked": len(sample), "found": len(twins), "fraction": share}

"""The last work on a swept shard: write what stays and what goes, then read it back and check it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from athanor.artifacts import read_json
from athanor.corpus import audit, rules
from athanor.corpus.documents import ROW_GROUP_DOCUMENTS, Document, read_documents
from athanor.corpus.settle import load_index
from athanor.corpus.sweep import DOCUMENTS, SCORES, HitWriter, cached_tools, read_hits
from athanor.corpus.table import KEPT, REASONS, hex_id, read_measures
from athanor.errors import GateError

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


def write_shard(task: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Work: train.parquet, val.parquet (where there is anything) and dropped.parquet of one swept shard.

    `task["fates"]` is a .npz: `reason`, `value` and `twin` (ids of 32 hex digits, or empty) of each document.
    """
    folder = Path(task["shard"])
    with np.load(task["fates"], allow_pickle=False) as stored:
        fates = {name: stored[name] for name in stored.files}
    measures = read_measures(folder)
    facts: dict[str, Any] = {"counts": {}, "scores": _histograms(measures, fates["reason"] == KEPT)}
    written: list[tuple[str, Path, np.ndarray]] = []
    if len(fates["reason"]):
        table = pq.read_table(folder / DOCUMENTS)
        for name in SCORES:
            table = table.append_column(pa.field(name, pa.float32()), pa.array(measures[name].astype(np.float32)))
        for split in SPLITS:
            mask = (fates["reason"] == KEPT) & (measures["val"] == (split == "val"))
            if mask.any():
                write_table(out / f"{split}.parquet", table.filter(pa.array(mask)))
                written.append((split, out / f"{split}.parquet", np.flatnonzero(mask)))
        del table
    write_table(out / "dropped.parquet", _dropped(task, folder, measures, fates))
    _, index, _ = cached_tools(task["tools"])
    with_numbers = _counted(written, task["start"], facts["counts"])
    seen = audit.look(with_numbers, index, load_index(task["sample"]), task["threshold"])
    store_seen(out, seen)
    return facts


def write_table(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, row_group_size=ROW_GROUP_DOCUMENTS, compression="zstd", compression_level=3)


def _counted(
    written: Sequence[tuple[str, Path, np.ndarray]], start: int, counts: dict[str, Any]
) -> Iterator[tuple[int, Document]]:
    """Documents of the written files with their table rows, counted: the funnel describes files, not intentions."""
    for split, path, numbers in written:
        row = counts.setdefault(split, {"documents": 0, "bytes": 0})
        for document in read_documents(path):
            if document.split != split:
                what = f"a {document.split} document is in {split}"
                raise GateError("splits stay apart", what, where=f"document {document.id}")
            yield start + int(numbers[min(row["documents"], len(numbers) - 1)]), document
            row["documents"] += 1
            row["bytes"] += len(document.text.encode())


def _dropped(
    task: Mapping[str, Any], folder: Path, measures: Mapping[str, np.ndarray], fates: Mapping[str, np.ndarray]
) -> pa.Table:
    gone = np.flatnonzero(fates["reason"] != KEPT)
    rows = [
        {
            "id": hex_id(measures["raw_id"][row]),
            "kind": measures["kind"][row],
            "row": int(measures["place"][row]),
            "rule": REASONS[fates["reason"][row]],
            "detail": str(fates["detail"][row]) or f"{fates['value'][row]:.6g}",
            "twin": str(fates["twin"][row]) or None,
            "bytes": int(measures["bytes"][row]),
            **{name: float(measures[name][row]) for name in SCORES},
        }
        for row in gone.tolist()
    ]
    for early in read_json(folder / "facts.json")["too_long"]:
        rows.append({**early, "rule": rules.TOO_LONG, "detail": str(early["bytes"])})
    place = {"source": task["source"], "shard": task["number"]}
    rows = [{**place, **row} for row in sorted(rows, key=lambda row: row["row"])]
    return pa.Table.from_pylist(rows, schema=DROPPED_SCHEMA)


def _histograms(measures: Mapping[str, np.ndarray], kept: np.ndarray) -> dict[str, dict[str, list[int]]]:
    """Score -> kept or dropped -> documents in each of BINS equal bins from 0 to 1."""
    found: dict[str, dict[str, list[int]]] = {}
    for name in SCORES:
        values = np.asarray(measures.get(name, np.zeros(0)), np.float64)
        bins = np.clip((values * BINS).astype(int), 0, BINS - 1)
        for fate, mask in (("kept", kept), ("dropped", ~kept)):
            found.setdefault(name, {})[fate] = np.bincount(bins[mask], minlength=BINS).tolist()
    return found


def store_seen(out: Path, seen: audit.Seen) -> None:
    hits = HitWriter()
    hits.add([hit for _, hit in seen.hits])
    hits.save(out / "hits.npz")
    np.save(out / "ids.npy", seen.ids)
    copies = [[int(number), int(twin)] for number, twin in sorted(seen.copies.items())]
    told = {"repeats": seen.repeats, "misread": seen.misread, "copies": copies, "held": [where for where, _ in seen.hits]}
    (out / "seen.json").write_text(json.dumps(told), encoding="utf-8")


def load_seen(folder: Path) -> audit.Seen:
    told = read_json(folder / "seen.json")
    _, hits = read_hits(folder / "hits.npz")
    held = list(zip(told["held"], hits, strict=True))
    return audit.Seen(told["repeats"], held, np.load(folder / "ids.npy"), dict(told["copies"]), told["misread"])


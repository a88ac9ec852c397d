"""Normalise, filter, deduplicate and decontaminate the documents of data/raw into data/clean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from athanor.artifacts import manifest_digest, new_dir, read_manifest, write_manifest
from athanor.corpus.cleaning import Cleaned, Drop, clean
from athanor.corpus.conversations import read_items
from athanor.corpus.documents import read_documents, write_documents
from athanor.corpus.funnel import IN, OUT
from athanor.errors import GateError, InputError
from athanor.params.clean import CleanParams
from athanor.pipeline.run import Run, stage_main

RAW, BATTERY, CLEAN = Path("data/raw"), Path("data/battery"), Path("data/clean")
DROPPED_SCHEMA = pa.schema(
    [*((name, pa.string()) for name in ("id", "source", "rule", "detail")), ("bytes", pa.int64())]
)


def run(run: Run) -> None:
    params = run.params("clean", CleanParams)
    read_manifest(RAW, "raw", 1)
    read_manifest(BATTERY, "battery", 1)
    files = sorted(RAW.glob("*.parquet"))
    if not files:
        raise InputError("no source file is there", where=str(RAW), fix="run dvc repro download")
    items = list(read_items(BATTERY / "items.jsonl"))
    if not items:
        raise InputError("the battery is empty", where=str(BATTERY / "items.jsonl"), fix="run dvc repro download")
    with run.progress(None, "clean", "B") as bar:
        cleaned = clean({file.stem: read_documents(file) for file in files}, items, params, bar.update)
    with new_dir(CLEAN) as folder:
        write_documents(folder / "train.parquet", cleaned.train)
        write_documents(folder / "val.parquet", cleaned.val)
        _write_dropped(folder / "dropped.parquet", cleaned.drops)
        _check_written(folder, cleaned)
        write_manifest(
            folder,
            kind="clean",
            version=1,
            counts=_counts(cleaned),
            parents={"raw": manifest_digest(RAW), "battery": manifest_digest(BATTERY)},
            funnel=cleaned.funnel.rows(),
        )
    run.metrics({"sources": _summary(cleaned), **cleaned.report})
    # Without what came in and went out: next to them no rule would be seen.
    run.plot("clean_funnel", [row for row in cleaned.funnel.rows() if row["step"] not in (IN, OUT)])
    for source in cleaned.funnel.sources:
        kept, total = cleaned.funnel.bytes(source, OUT), cleaned.funnel.bytes(source, IN)
        worst = ", ".join(f"{rule} {documents}" for rule, documents, _ in cleaned.funnel.dropped(source)[:3])
        run.note(f"{source}: {kept / total:.1%} of {total / 1e6:.2f} MB kept; documents dropped: {worst or 'none'}")


def _write_dropped(path: Path, drops: Sequence[Drop]) -> None:
    rows = [{name: getattr(drop, name) for name in DROPPED_SCHEMA.names} for drop in drops]
    pq.write_table(pa.Table.from_pylist(rows, schema=DROPPED_SCHEMA), path, compression="zstd", compression_level=3)


def _check_written(folder: Path, cleaned: Cleaned) -> None:
    """Count what is on disk: the funnel must describe the files and not the intention."""
    found: dict[str, list[int]] = {}
    for name in ("train", "val"):
        for document in read_documents(folder / f"{name}.parquet"):
            if document.split != name:
                what = f"a {document.split} document is in {name}"
                raise GateError("splits stay apart", what, where=f"document {document.id}")
            row = found.setdefault(document.source, [0, 0])
            row[0] += 1
            row[1] += len(document.text.encode())
    for source in cleaned.funnel.sources:
        expected = [cleaned.funnel.documents(source, OUT), cleaned.funnel.bytes(source, OUT)]
        if found.get(source) != expected:
            raise GateError(
                "funnel describes the files",
                f"{found.get(source)} documents and bytes on disk, {expected} in the funnel",
                where=f"source {source}",
                fix="check the disk and run dvc repro clean again",
            )


def _counts(cleaned: Cleaned) -> dict[str, dict[str, dict[str, int]]]:
    """Split -> source -> documents and bytes."""
    counts: dict[str, dict[str, dict[str, int]]] = {"train": {}, "val": {}}
    for split, documents in (("train", cleaned.train), ("val", cleaned.val)):
        for document in documents:
            row = counts[split].setdefault(document.source, {"documents": 0, "bytes": 0})
            row["documents"] += 1
            row["bytes"] += len(document.text.encode())
    return counts


def _summary(cleaned: Cleaned) -> dict[str, dict[str, object]]:
    """What came in, went out and was dropped by which rule, for each source."""
    funnel = cleaned.funnel
    return {
        source: {
            "documents_in": funnel.documents(source, IN),
            "documents_out": funnel.documents(source, OUT),
            "bytes_in": funnel.bytes(source, IN),
            "bytes_out": funnel.bytes(source, OUT),
            "kept_bytes_fraction": funnel.bytes(source, OUT) / funnel.bytes(source, IN),
            "dropped_documents": {rule: documents for rule, documents, _ in funnel.dropped(source)},
        }
        for source in funnel.sources
    }


if __name__ == "__main__":
    stage_main("clean", run)

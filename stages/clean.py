"""Normalise, redact, score, filter, deduplicate and decontaminate the documents of data/raw into data/clean."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from athanor.base.artifacts import link, manifest_digest, new_dir, read_manifest, write_manifest
from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.cleaning.cleaning import Cleaned, clean
from athanor.cleaning.funnel import IN, OUT
from athanor.cleaning.measuring import settings_of
from athanor.cleaning.params import CleanParams
from athanor.cleaning.writing import BINS
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.text.conversations import read_items
from athanor.text.documents import ROW_GROUP_DOCUMENTS, in_batches, shard_files

RAW, BATTERY, CLASSIFIERS, CLEAN = (Path(p) for p in ("data/raw", "data/battery", "models/classifiers", "data/clean"))
ITEMS = BATTERY / "items.jsonl"


def run(run: Run) -> None:
    params = run.params("clean", CleanParams)
    sources, text_bytes = read_inputs()
    # Without the battery: one that drops the same text lets the cache stop here. A taught question leaves the battery.
    parents = {"raw": manifest_digest(RAW), "classifiers": manifest_digest(CLASSIFIERS)}
    inputs = {**parents, "battery": manifest_digest(BATTERY)}
    # What is measured depends on no threshold: another threshold finds it done.
    measures = run.sub_slot("measures", "athanor.cleaning.measuring", settings_of(params), inputs)
    with measures, run.slot({"clean": asdict(params)}, inputs) as slot:
        work = slot.path / "work"
        cleaned = clean(sources, ITEMS, CLASSIFIERS, params, measures.path / "shards", work, run.map_shards, text_bytes)
        with new_dir(CLEAN) as folder:
            write_outputs(folder, cleaned)
            funnel = cleaned.funnel.rows()
            write_manifest(
                folder,
                kind="clean",
                version=1,
                counts=cleaned.counts,
                parents=parents,
                funnel=funnel,
                contaminated_items=cleaned.items,
                **run.codes(),
            )
        shutil.rmtree(work)
        measures.mark_done()
        slot.mark_done()
    run.metrics({"sources": _summary(cleaned), **cleaned.report})
    # Without the totals in and out: next to them the bars of the rules would be too small to see.
    run.plot("clean_funnel", [row for row in funnel if row["step"] not in (IN, OUT)])
    run.plot("clean_scores", score_rows(cleaned))
    for source in cleaned.funnel.sources:
        kept, total = (cleaned.funnel.of(source, step)[1] for step in (OUT, IN))
        worst = ", ".join(f"{rule} {documents}" for rule, documents, _ in cleaned.funnel.dropped(source)[:3])
        run.note(f"{source}: {kept / total:.1%} of {total / 1e6:.2f} MB kept; documents dropped: {worst or 'none'}")


def read_inputs() -> tuple[dict[str, list[Path]], dict[str, int]]:
    """The shards of each source, and its bytes of text; InputError without any source or without battery items."""
    source_counts = read_manifest(RAW, "raw", 1)["counts"]
    read_manifest(BATTERY, "battery", 1)
    sources = shard_files(RAW)
    missing = sorted(set(source_counts) - set(sources))
    if missing or not sources:
        what = f"no shard of source {missing[0]} is there" if missing else "no source is there"
        raise InputError(what, where=RAW, fix="run dvc repro download")
    if not any(True for _ in read_items(ITEMS)):
        raise InputError("the battery is empty", where=ITEMS, fix="run dvc repro download")
    return sources, {name: count.get("bytes", 0) for name, count in source_counts.items()}


def write_outputs(folder: Path, cleaned: Cleaned) -> None:
    """Write the outputs: training documents by source and shard, validation and dropped ones in one file each."""
    for source, shard_folders in cleaned.shard_folders.items():
        for number, shard_folder in enumerate(shard_folders):
            if (shard_folder / "train.parquet").is_file():
                target = folder / "train" / source / f"{number:05d}.parquet"
                target.parent.mkdir(parents=True, exist_ok=True)
                link(shard_folder / "train.parquet", target)
    all_folders = [shard_folder for shard_folders in cleaned.shard_folders.values() for shard_folder in shard_folders]
    for name in ("val.parquet", "dropped.parquet"):
        join(folder / name, [shard_folder / name for shard_folder in all_folders if (shard_folder / name).is_file()])


def join(path: Path, files: Iterable[Path]) -> None:
    """Join Parquet files that have the same columns into one, in the given order.

    Row groups are full: the writer remembers each of them, and there may be as many files as shards.
    """
    writer: pq.ParquetWriter | None = None
    batches = in_batches((pq.read_table(file) for file in files), len, ROW_GROUP_DOCUMENTS)
    for table in map(pa.concat_tables, batches):
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd", compression_level=3)
        if len(table):
            writer.write_table(table, row_group_size=ROW_GROUP_DOCUMENTS)
    if writer is None:
        raise InputError("no validation document is left in any source", where=CLEAN, fix="raise download.val_fraction")
    writer.close()


def score_rows(cleaned: Cleaned) -> list[Facts]:
    """One row for each source and bin of quality; the other scores are in the data report."""
    return [
        {"kept": kept, "dropped": dropped, "score": f"{source} {number / BINS:.2f}"}
        for source, scores in sorted(cleaned.scores.items())
        for number, (kept, dropped) in enumerate(zip(*map(scores["quality"].get, ("kept", "dropped")), strict=True))
    ]


def _summary(cleaned: Cleaned) -> dict[str, dict[str, object]]:
    """What came in, went out and was dropped by which rule, for each source."""
    summary = {}
    for source in cleaned.funnel.sources:
        (documents_in, bytes_in), (documents_out, bytes_out) = (cleaned.funnel.of(source, step) for step in (IN, OUT))
        summary[source] = {
            "documents_in": documents_in,
            "documents_out": documents_out,
            "bytes_in": bytes_in,
            "bytes_out": bytes_out,
            "kept_bytes_fraction": bytes_out / bytes_in,
            "dropped_documents": {rule: documents for rule, documents, _ in cleaned.funnel.dropped(source)},
        }
    return summary


if __name__ == "__main__":
    stage_main("clean", run)

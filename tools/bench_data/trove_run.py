"""The equivalent of the clean stage with datatrove, in the benchmark's own environment; imports nothing of ours.

    python trove_run.py RAW OUT [--every | --minhash]

RAW is a folder of Parquet files with columns `text` and `id`. The filters are
those of datatrove's FineWeb recipe in its order, then MinHash with its
defaults (word 5-grams, 14 buckets of 8 hashes), then the PII formatter. As
there, a document dropped by one filter is not seen by the next; with --every
each document goes through all of them and through MinHash, as in ours; with
--minhash there are no filters, and no document is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.pipeline.writers import JsonlWriter


def main(raw: Path, out: Path, mode: str) -> None:
    filters = [
        GopherRepetitionFilter(),
        GopherQualityFilter(),
        C4QualityFilter(filter_no_terminal_punct=False),
        FineWebQualityFilter(),
    ]
    if mode == "--every":
        for step in filters:
            step.filter = _all_pass(step.filter)
    config = MinhashConfig()
    reader = documents = ParquetReader(str(raw), glob_pattern="**/*.parquet", read_metadata=False)
    if mode != "--minhash":
        _run([reader, *filters, JsonlWriter(str(out / "filtered"), compression=None)], out / "logs" / "1", 1)
        documents = JsonlReader(str(out / "filtered"))
    _run([documents, MinhashDedupSignature(str(out / "signatures"), config=config)], out / "logs" / "2", 1)
    buckets = MinhashDedupBuckets(str(out / "signatures"), str(out / "buckets"), config=config)
    _run([buckets], out / "logs" / "3", config.num_buckets)
    _run([MinhashDedupCluster(str(out / "buckets"), str(out / "remove"), config=config)], out / "logs" / "4", 1)
    kept = [documents, MinhashDedupFilter(str(out / "remove"))]
    if mode != "--minhash":
        kept += [PIIFormatter(), JsonlWriter(str(out / "clean"), compression=None)]
    _run(kept, out / "logs" / "5", 1)
    (out / "counts.json").write_text(json.dumps({"clean": _lines(out / "clean")}))


def _all_pass(decide):
    def passes(doc):
        decide(doc)
        return True

    return passes


def _run(pipeline: list, logs: Path, tasks: int) -> None:
    """In this process: one worker and no pool."""
    LocalPipelineExecutor(pipeline=pipeline, tasks=tasks, workers=1, logging_dir=str(logs)).run()


def _lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), "".join(sys.argv[3:4]))

"""Runs the cleaning on lists of documents and gives back lists of documents."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from athanor.base.artifacts import write_manifest
from athanor.cleaning import cleaning
from athanor.cleaning.params import CleanParams
from athanor.quality.model import BUCKETS, KIND, NAMES, VERSION, Linear, save
from athanor.runtime.executor import Executor
from athanor.text.conversations import Item, write_rows
from athanor.text.documents import Document, read_documents, shard_files, write_shards


@dataclass
class Result:
    """`train` and `val` by source and order, `dropped` as rows of dropped.parquet."""

    cleaned: cleaning.Cleaned
    train: list[Document]
    val: list[Document]
    dropped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reasons(self) -> dict[str, str]:
        return {row["id"]: row["rule"] for row in self.dropped}

    @property
    def report(self) -> dict[str, Any]:
        return self.cleaned.report

    @property
    def funnel(self):
        return self.cleaned.funnel


def clean(
    sources: Mapping[str, Sequence[Document]],
    items: Sequence[Item],
    params: CleanParams,
    *,
    shard_bytes: int = 32_000_000,
    workers: int = 1,
) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source, documents in sources.items():
            write_shards(folder / "raw" / source, documents, shard_bytes)
        write_rows(folder / "items.jsonl", items)
        scorer = write_scorer(folder / "classifiers")
        cleaned = cleaning.clean(
            shard_files(folder / "raw"),
            folder / "items.jsonl",
            scorer,
            params,
            folder / "sweeps",
            folder / "work",
            Executor(workers),
            {},
        )
        parts = [part for parts in cleaned.shard_folders.values() for part in parts]
        train, val = (
            [
                d
                for part in parts
                if (part / f"{split}.parquet").is_file()
                for d in read_documents(part / f"{split}.parquet")
            ]
            for split in ("train", "val")
        )
        dropped = [row for part in parts for row in pq.read_table(part / "dropped.parquet").to_pylist()]
    return Result(cleaned, train, val, dropped)


def write_scorer(folder: Path) -> Path:
    """Classifiers that know nothing: every document is as likely good as bad."""
    blank = Linear(np.zeros(BUCKETS, np.int64), 1.0, 0.0)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, dict.fromkeys(NAMES, blank), dict.fromkeys(NAMES, {}))
    write_manifest(folder, kind=KIND, version=VERSION, counts={})
    return folder

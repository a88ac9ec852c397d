"""Where the labels that are given come from: a number in a document's meta, or in a column of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.classifiers.params import ClassifiersParams, QualityLabels, ToxicityLabels
from athanor.classifiers.sample import Labeller, Sampled, sample_rows
from athanor.text import globs, rows
from athanor.text.documents import Document, read_documents, shard_files

MAX_ROW_BYTES = 16_000_000  # of a labelled text


def make_labeller(labels: QualityLabels) -> Labeller:
    def label(document: Document) -> bool | None:
        return judged(document.meta.get(labels.meta_key), labels.high_from, labels.low_below)

    return label


def judged(value: Any, high_from: float, low_below: float) -> bool | None:
    """True from `high_from` on, False below `low_below`, None between and for what is no number."""
    if isinstance(value, bool):
        value = float(value)
    if not isinstance(value, (int, float)):
        return None
    return True if value >= high_from else False if value < low_below else None


def toxicity_rows(
    labels: ToxicityLabels | None, folder: Path, params: ClassifiersParams
) -> tuple[list[Sampled], Facts]:
    """Labelled rows, and where they are from: files, or a source in `folder`; nothing without labels."""
    if labels is None:
        return [], {}
    if labels.source and labels.source not in shard_files(folder):
        fix = "name one of download.labels"
        raise InputError(f"no such labels: '{labels.source}'", where="classifiers.toxicity_labels.source", fix=fix)
    files, columns = globs.find(labels.globs) if labels.globs else [], [labels.text_column, labels.label_column]

    def read() -> Iterator[tuple[str, str, bool | None]]:
        for path in shard_files(folder)[labels.source] if labels.source else ():
            for document in read_documents(path):
                value = document.meta.get(labels.label_column)
                yield document.source, document.text, judged(value, labels.toxic_from, labels.clean_below)
        for name, path in files:
            for where, row in rows.read_rows(path, columns, MAX_ROW_BYTES):
                text = rows.check_text(row[labels.text_column], where, labels.text_column, MAX_ROW_BYTES)
                yield name, text, judged(row[labels.label_column], labels.toxic_from, labels.clean_below)

    labelled_rows = sample_rows(read(), params.sample_bytes, params.seed)
    if not labelled_rows:
        fix = "correct label_column and the limits, or set it to null for weak labels"
        raise InputError("no row has a usable label", where="classifiers.toxicity_labels", fix=fix)
    if labels.source:
        return labelled_rows, {"source": labels.source, "rows": len(labelled_rows)}
    return labelled_rows, {"files": len(files), "files_sha256": globs.digest_of(files), "rows": len(labelled_rows)}

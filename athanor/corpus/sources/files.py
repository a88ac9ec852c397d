"""Documents from data files, local or fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from athanor.corpus.documents import Document
from athanor.corpus.sources import rows, select
from athanor.params.download import FilesSource, HttpSource


def documents(
    source: FilesSource | HttpSource,
    files: list[tuple[str, Path]],
    val_fraction: float,
    tick: Callable[[int], None] = lambda file_bytes: None,
    leave_out: Callable[[str], None] = lambda reason: None,
) -> Iterator[Document]:
    """Every document of the files, given as (name for provenance, path), in their order.

    `tick` is called with the size of each finished file, `leave_out` with the
    reason why a row is not taken. Every row must be readable.
    """
    columns = select.columns(source)
    for name, path in files:
        for number, (where, row) in enumerate(rows.read_rows(path, columns, source.max_document_bytes)):
            found = select.document(source, row, where, {"file": name, "row": number}, val_fraction)
            if isinstance(found, str):
                leave_out(found)
            else:
                yield found
        tick(path.stat().st_size)

"""Documents from local files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from athanor.corpus.documents import Document, content_id, split_of
from athanor.corpus.sources import rows
from athanor.params.download import FilesSource


def documents(
    source: FilesSource,
    files: list[tuple[str, Path]],
    val_fraction: float,
    tick: Callable[[int], None] = lambda file_bytes: None,
) -> Iterator[Document]:
    """Every document of the files that `rows.find(source.globs)` returned, in their order.

    The split follows the content, so equal texts in two files fall on one
    side. `tick` is called with the size of each finished file.
    """
    for name, path in files:
        for number, (where, row) in enumerate(rows.read_rows(path, [source.text_column], source.max_document_bytes)):
            text = rows.check_text(row[source.text_column], where, source.text_column, source.max_document_bytes)
            split = split_of(content_id(text), val_fraction)
            meta = {"file": name, "row": number}
            yield Document(text, source.name, source.kind, source.license, split, meta)
        tick(path.stat().st_size)

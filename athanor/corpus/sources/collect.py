"""Write one source's documents and hold it to what was promised of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from athanor.corpus.documents import Document, write_documents
from athanor.errors import GateError


@dataclass
class Tally:
    """Counts of one source. `left_out` counts documents shorter than `min_chars`."""

    documents: int = 0
    bytes: int = 0
    left_out: int = 0
    train: dict[str, int] = field(default_factory=lambda: {"documents": 0, "bytes": 0})
    val: dict[str, int] = field(default_factory=lambda: {"documents": 0, "bytes": 0})

    def add(self, document: Document) -> None:
        size = len(document.text.encode())
        side = self.val if document.split == "val" else self.train
        self.documents += 1
        self.bytes += size
        side["documents"] += 1
        side["bytes"] += size


def write_source(
    path: Path, documents: Iterable[Document], *, min_chars: int, min_documents: int, min_bytes: int
) -> Tally:
    """Write the documents to `path` and count them; GateError when they are fewer than the source's minimum."""
    tally = Tally()
    write_documents(path, _counted(documents, tally, min_chars))
    for unit, found, least in (("documents", tally.documents, min_documents), ("bytes", tally.bytes, min_bytes)):
        if found < least:
            raise GateError(
                "source size",
                f"source '{path.stem}' gave {found:,} {unit}, its minimum is {least:,}",
                where=f"download.sources ({path.stem})",
                fix=f"find out why the source shrank, or lower its min_{unit} in params.yaml",
            )
    return tally


def _counted(documents: Iterable[Document], tally: Tally, min_chars: int) -> Iterator[Document]:
    for document in documents:
        if len(document.text) < min_chars or not document.text.strip():
            tally.left_out += 1
        else:
            tally.add(document)
            yield document

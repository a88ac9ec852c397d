"""Write a source's documents, count them, and hold it to what was promised of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from athanor.corpus.documents import Document, ShardWriter
from athanor.errors import GateError


@dataclass
class Tally:
    """Counts of one source. `left_out` counts rows and documents that were read and not taken, by reason."""

    documents: int = 0
    bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    train: dict[str, int] = field(default_factory=lambda: {"documents": 0, "bytes": 0})
    val: dict[str, int] = field(default_factory=lambda: {"documents": 0, "bytes": 0})

    def add(self, document: Document) -> None:
        size = len(document.text.encode())
        side = self.val if document.split == "val" else self.train
        self.documents += 1
        self.bytes += size
        side["documents"] += 1
        side["bytes"] += size

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


class SourceWriter:
    """The shards of one source below `raw`; leaving the block without an error checks the source's minimum."""

    def __init__(self, raw: Path, name: str, *, min_chars: int, min_documents: int, min_bytes: int) -> None:
        self.name, self.min_chars = name, min_chars
        self.minimum = {"documents": min_documents, "bytes": min_bytes}
        self.tally = Tally()
        self._shards = ShardWriter(raw / name)

    def add(self, document: Document) -> None:
        if len(document.text) < self.min_chars or not document.text.strip():
            self.tally.leave_out("short")
        else:
            self.tally.add(document)
            self._shards.add(document)

    def __enter__(self) -> SourceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._shards.close()
        if kind is None:
            self._check()

    def _check(self) -> None:
        for unit, least in self.minimum.items():
            if (found := getattr(self.tally, unit)) < least:
                reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.tally.left_out.items()))
                raise GateError(
                    "source size",
                    f"source '{self.name}' gave {found:,} {unit}, its minimum is {least:,}"
                    + (f" (left out: {reasons})" if reasons else ""),
                    where=f"download.sources ({self.name})",
                    fix=f"find out why the source shrank, or lower its min_{unit} in params.yaml",
                )


def write_source(
    raw: Path, name: str, documents: Iterable[Document], *, min_chars: int, min_documents: int, min_bytes: int
) -> Tally:
    """Write one source's documents below `raw`; GateError when they are fewer than its minimum."""
    limits = {"min_chars": min_chars, "min_documents": min_documents, "min_bytes": min_bytes}
    with SourceWriter(raw, name, **limits) as writer:
        for document in documents:
            writer.add(document)
    return writer.tally

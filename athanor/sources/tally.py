"""Counts of what a source gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from athanor.text.documents import Document


@dataclass
class Tally:
    """Counts of one source. `left_out` counts rows and documents that were read and not taken, by reason."""

    documents: int = 0
    bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    train: dict[str, int] = field(default_factory=lambda: {"documents": 0, "bytes": 0})
    val: dict[str, int] = field(default_factory=lambda: {"documents": 0, "bytes": 0})

    def add(self, document: Document) -> None:
        self.documents += 1
        self.bytes += len(document.text.encode())
        self.count(document, self.val if document.split == "val" else self.train, 1)

    @staticmethod
    def count(document: Document, side: dict[str, int], sign: int) -> None:
        side["documents"] += sign
        side["bytes"] += sign * len(document.text.encode())

    def leave_out(self, reason: str, count: int = 1) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + count

    def merge(self, counts: Mapping[str, Any]) -> None:
        self.documents += counts["documents"]
        self.bytes += counts["bytes"]
        for side in ("train", "val"):
            for unit, count in counts[side].items():
                getattr(self, side)[unit] += count

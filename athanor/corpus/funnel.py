"""The funnel: what came in, what each rule took, what went out, for each source, in documents and bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from athanor.corpus.rules import NOT_ENGLISH, SETTINGS
from athanor.errors import GateError

IN, NORMALISED, REDACTED, OUT = "in", "normalised", "redacted", "out"
NO_RULE = (IN, NORMALISED, REDACTED, OUT)


class Funnel:
    """Counts (documents, bytes) by source and step. Bytes are of the UTF-8 text.

    `normalised` and `redacted` hold the bytes that were removed inside
    documents (negative if some were added), so that `in` minus everything
    between is `out`.
    """

    def __init__(self) -> None:
        self._documents: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, source: str, step: str, documents: int, size: int) -> None:
        self._documents[source, step] += documents
        self._bytes[source, step] += size

    def merge(self, other: Funnel) -> None:
        self._documents.update(other._documents)
        self._bytes.update(other._bytes)

    def documents(self, source: str, step: str) -> int:
        return self._documents[source, step]

    def bytes(self, source: str, step: str) -> int:
        return self._bytes[source, step]

    def _inside(self, source: str) -> int:
        return self._bytes[source, NORMALISED] + self._bytes[source, REDACTED]

    @property
    def sources(self) -> list[str]:
        return sorted({source for source, step in self._documents if step == IN})

    def dropped(self, source: str) -> list[tuple[str, int, int]]:
        """(rule, documents, bytes) of each rule that dropped something, most bytes first."""
        steps = [step for name, step in self._documents if name == source and step not in NO_RULE]
        rows = [(step, self._documents[source, step], self._bytes[source, step]) for step in steps]
        return sorted(rows, key=lambda row: (-row[2], row[0]))

    def rows(self) -> list[dict[str, Any]]:
        """One row for each source and step with anything in it: in, normalised, the rules, out."""
        rows = []
        for source in self.sources:
            for step in (IN, NORMALISED, REDACTED, *(rule for rule, _, _ in self.dropped(source)), OUT):
                size = self._bytes[source, step]
                rows.append({"source": source, "step": step, "documents": self._documents[source, step], "bytes": size})
        return rows

    def check(self) -> None:
        """GateError unless the counts add up for every source, or when a source has nothing left."""
        for source in self.sources:
            dropped = self.dropped(source)
            documents = self._documents[source, IN] - sum(row[1] for row in dropped)
            size = self._bytes[source, IN] - self._inside(source) - sum(row[2] for row in dropped)
            found = (self._documents[source, OUT], self._bytes[source, OUT])
            if (documents, size) != found:
                raise GateError(
                    "funnel adds up",
                    f"{documents} documents of {size} bytes should be left, {found[0]} of {found[1]} bytes are",
                    where=f"source {source}",
                    fix="this is a bug in the clean stage; report it with the source",
                )
            if not documents:
                worst = max(dropped, key=lambda row: (row[1], row[0]), default=("nothing", 0, 0))
                fix = "look at the source; without duplicates and traces of the battery it has no text"
                if worst[0] == NOT_ENGLISH:
                    keys = "english_only: false and min_stop_word_fraction: null"
                    fix = f"for text in another language set {keys} in clean.rules for the source's kind of text"
                elif worst[0] in SETTINGS:
                    fix = f"relax {SETTINGS[worst[0]]} in clean.rules for the source's kind of text, or fix the source"
                raise GateError(
                    "every source survives",
                    f"no document is left of {self._documents[source, IN]}; rule '{worst[0]}' dropped {worst[1]}",
                    where=f"source {source}",
                    fix=fix,
                )

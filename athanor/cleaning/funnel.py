"""The funnel: what came in, what each step removed, and what went out, by source."""

from __future__ import annotations

from athanor.base.errors import GateError
from athanor.base.work import Facts
from athanor.cleaning import rules

IN, NORMALISED, REDACTED, OUT = "in", "normalised", "redacted", "out"
NO_RULE = (IN, NORMALISED, REDACTED, OUT)


class Funnel:
    """Counts (documents, bytes) by source and step. Bytes are of the UTF-8 text.

    `normalised` and `redacted` hold the bytes that were removed inside
    documents (negative if some were added), so that `in` minus everything
    between is `out`.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, tuple[int, int]]] = {}

    def add(self, source: str, step: str, documents: int, size: int) -> None:
        before = self._counts.setdefault(source, {}).get(step, (0, 0))
        self._counts[source][step] = (before[0] + documents, before[1] + size)

    def of(self, source: str, step: str) -> tuple[int, int]:
        return self._counts[source].get(step, (0, 0))

    @property
    def sources(self) -> list[str]:
        return sorted(self._counts)

    def dropped(self, source: str) -> list[tuple[str, int, int]]:
        """(rule, documents, bytes) of each rule that dropped something, most bytes first."""
        rows = [(step, *count) for step, count in self._counts[source].items() if step not in NO_RULE]
        return sorted(rows, key=lambda row: (-row[2], row[0]))

    def rows(self) -> list[Facts]:
        """One row for each source and step with anything in it: in, normalised, the rules, out."""
        steps = {s: (IN, NORMALISED, REDACTED, *(rule for rule, _, _ in self.dropped(s)), OUT) for s in self.sources}
        return [
            {"source": source, "step": step, **dict(zip(("documents", "bytes"), self.of(source, step), strict=True))}
            for source in steps
            for step in steps[source]
        ]

    def check(self) -> None:
        """GateError unless the counts add up for every source, or when a source has nothing left."""
        for source in self.sources:
            dropped, incoming, remaining = self.dropped(source), self.of(source, IN), self.of(source, OUT)
            removed = [*dropped, *((step, 0, self.of(source, step)[1]) for step in (NORMALISED, REDACTED))]
            documents, size = (incoming[unit] - sum(row[unit + 1] for row in removed) for unit in (0, 1))
            if (documents, size) != remaining:
                raise GateError(
                    "funnel adds up",
                    f"{documents} documents of {size} bytes should be left, {remaining[0]} of {remaining[1]} bytes are",
                    where=f"source {source}",
                    fix="this is a bug in the clean stage; report it with the source",
                )
            if not documents:
                worst = max(dropped, key=lambda row: (row[1], row[0]), default=("nothing", 0, 0))
                fix = "look at the source; without duplicates and traces of the battery it has no text"
                if worst[0] == rules.NOT_ENGLISH:
                    keys = "english_only: false and min_stop_word_fraction: null"
                    fix = f"for text in another language set {keys} in clean.rules for the source's kind of text"
                elif worst[0] in rules.SETTINGS:
                    fix = f"relax {rules.SETTINGS[worst[0]]} in clean.rules for the source's kind of text, or fix the source"
                raise GateError(
                    "every source survives",
                    f"no document is left of {incoming[0]}; rule '{worst[0]}' dropped {worst[1]}",
                    where=f"source {source}",
                    fix=fix,
                )

"""The mixture: which document of which source comes next, by integer deficit interleave.

At every step the source that is furthest behind its share gives its next
document, so the shares hold in every stretch of the stream and not only in
the end. Integers throughout: the same inputs give the same plan everywhere.
Pure functions of lengths; no text and no files here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from athanor.data.order import permutation
from athanor.errors import InputError, ParamsError

WEIGHT_SCALE = 10**9


@dataclass(frozen=True)
class MixSource:
    """One source: `lengths` int64 [documents], in tokens or bytes; relative share above 0; epoch cap."""

    name: str
    lengths: np.ndarray
    share: float
    max_epochs: float

    @property
    def total(self) -> int:
        return int(self.lengths.sum())

    @property
    def cap(self) -> int:
        """Most units that may be taken, repeats counted."""
        return int(Fraction(str(self.max_epochs)) * self.total)


@dataclass(frozen=True)
class Plan:
    """The stream: `sources` uint8 [n] and `documents` int64 [n] number each entry's source and document.

    `taken` is units per source. `allowed` is the longest stream that the caps
    allow at these shares and `limited_by` the source that sets it; the stream
    ends at `allowed` or at what was asked, whichever is shorter.
    """

    sources: np.ndarray
    documents: np.ndarray
    taken: tuple[int, ...]
    allowed: int
    limited_by: str

    @property
    def total(self) -> int:
        return sum(self.taken)


class Share(Protocol):
    """A source's entry in the mixture parameters."""

    share: float
    max_epochs: float


def mix_sources(shares: Mapping[str, Share], lengths: Mapping[str, Sequence[int] | np.ndarray]) -> list[MixSource]:
    """The sources of a mixture in order of name, without those whose share is 0.

    ParamsError for a source that has documents and no share, InputError for a
    share without documents: a mixture that names other sources than the data
    holds is never what was meant.
    """
    for name in sorted(lengths):
        if name not in shares:
            raise ParamsError(
                f"source '{name}' has documents but no share",
                where="mixture.sources",
                fix=f"add '{name}', with share 0 to leave it out",
            )
    return [
        MixSource(name, np.asarray(lengths.get(name, ()), dtype=np.int64), entry.share, entry.max_epochs)
        for name, entry in sorted(shares.items())
        if entry.share > 0
    ]


def weights(sources: Sequence[MixSource]) -> list[int]:
    """Shares as integers that sum to about WEIGHT_SCALE."""
    total = sum(Fraction(str(source.share)) for source in sources)
    return [round(Fraction(str(source.share)) / total * WEIGHT_SCALE) for source in sources]


def plan_mixture(sources: Sequence[MixSource], target: int | None, seed: int) -> Plan:
    """Order documents so that each source holds its share; stop at `target` units or when a cap is reached.

    A source's documents come in a seeded order, a new one for each repeat; the
    order depends on the source's name, so adding another source leaves it alone.
    InputError for a source without documents.
    """
    for source in sources:
        if source.total == 0:
            raise InputError(
                "no training text", where=f"mixture source '{source.name}'", fix="add text, or set its share to 0"
            )
    weight = weights(sources)
    scale = sum(weight)
    caps = [source.cap for source in sources]
    limits = [cap * scale // w for cap, w in zip(caps, weight, strict=True)]
    allowed = min(limits)
    limited_by = sources[limits.index(allowed)].name
    end = allowed if target is None else min(target, allowed)

    queues = [_Queue(source, seed) for source in sources]
    taken, total = [0] * len(sources), 0
    out_sources: list[int] = []
    out_documents: list[int] = []
    while total < end:
        behind = [w * total - scale * t for w, t in zip(weight, taken, strict=True)]
        best = behind.index(max(behind))
        document, length = queues[best].peek()
        if taken[best] + length > caps[best]:
            break
        queues[best].advance()
        out_sources.append(best)
        out_documents.append(document)
        taken[best] += length
        total += length
    return Plan(
        sources=np.array(out_sources, dtype=np.uint8),
        documents=np.array(out_documents, dtype=np.int64),
        taken=tuple(taken),
        allowed=allowed,
        limited_by=limited_by,
    )


class _Queue:
    """The documents of one source, epoch after epoch, each epoch in its own order."""

    def __init__(self, source: MixSource, seed: int) -> None:
        self._source, self._seed = source, seed
        self._lengths = source.lengths.tolist()
        self._epoch = -1
        self._order: list[int] = []
        self._at = 0

    def peek(self) -> tuple[int, int]:
        if self._at == len(self._order):
            self._epoch, self._at = self._epoch + 1, 0
            self._order = permutation(len(self._lengths), self._seed, self._source.name, self._epoch).tolist()
        document = self._order[self._at]
        return document, self._lengths[document]

    def advance(self) -> None:
        self._at += 1

"""The mixture: which document of which source comes next, by integer deficit interleave.

At every step the source that is furthest behind its share gives its next
document, so the shares hold in every stretch of the stream and not only in
the end. Integers throughout: the same inputs give the same plan everywhere.
Pure functions of lengths; no text and no files here.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from athanor.base.errors import InputError, ParamsError
from athanor.data.order import permutation

WEIGHT_SCALE = 10**9
BLOCK_DOCUMENTS = 1 << 12


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


def check_sources(shares: Mapping[str, Share], names: Collection[str]) -> None:
    """The sources that have documents, in `names`, are those that have a share, which may be 0.

    A mixture that names other sources than the data holds is never what was
    meant: ParamsError for documents without a share, InputError for a share
    without documents.
    """
    for name in sorted(names):
        if name not in shares:
            raise ParamsError(
                f"source '{name}' has documents but no share",
                where="mixture.sources",
                fix=f"add '{name}', with share 0 to leave it out",
            )
    for name, entry in sorted(shares.items()):
        if entry.share > 0 and name not in names:
            raise _no_text(name)


def _no_text(name: str) -> InputError:
    return InputError("no training text", where=f"mixture source '{name}'", fix="add text, or set its share to 0")


def mix_sources(shares: Mapping[str, Share], lengths: Mapping[str, Sequence[int] | np.ndarray]) -> list[MixSource]:
    """The sources of a mixture in order of name, without those whose share is 0; errors as of `check_sources`."""
    check_sources(shares, lengths)
    return [
        MixSource(name, np.asarray(lengths[name], dtype=np.int64), entry.share, entry.max_epochs)
        for name, entry in sorted(shares.items())
        if entry.share > 0
    ]


def weights(sources: Sequence[MixSource]) -> list[int]:
    """Shares as integers that sum to about WEIGHT_SCALE."""
    total = sum(Fraction(str(source.share)) for source in sources)
    return [round(Fraction(str(source.share)) / total * WEIGHT_SCALE) for source in sources]


def plan_mixture(sources: Sequence[MixSource], target: int | None, seed: int, *, backwards: bool = False) -> Plan:
    """Order documents so that each source holds its share; stop at `target` units or when a cap is reached.

    A source's documents come in a seeded order, a new one for each repeat; the
    order depends on the source's name, so adding another source leaves it alone.
    `backwards` reads each order from its end: after a stream of less than one
    epoch of a source, that gives the documents which it did not come to.
    InputError for a source without documents.

    Memory: 8 bytes for each document of a source and 9 for each of the stream;
    24 more for each document of one source while its order is drawn.
    """
    for source in sources:
        if source.total == 0:
            raise _no_text(source.name)
    weight = weights(sources)
    scale = sum(weight)
    caps = [source.cap for source in sources]
    limits = [cap * scale // w for cap, w in zip(caps, weight, strict=True)]
    allowed = min(limits)
    limited_by = sources[limits.index(allowed)].name
    end = allowed if target is None else min(target, allowed)

    queues = [_Queue(source, seed, backwards) for source in sources]
    taken, deficits, total = [0] * len(sources), [0] * len(sources), 0
    out_sources, out_documents = array("B"), array("q")
    while total < end:
        neediest = deficits.index(max(deficits))
        document, length = queues[neediest].peek()
        if taken[neediest] + length > caps[neediest]:
            break
        queues[neediest].advance()
        out_sources.append(neediest)
        out_documents.append(document)
        taken[neediest] += length
        total += length
        # How far each is behind its share, times `scale`: whole numbers of any size, so nothing is ever rounded.
        deficits = [deficit + w * length for deficit, w in zip(deficits, weight, strict=True)]
        deficits[neediest] -= scale * length
    return Plan(
        sources=np.frombuffer(out_sources, dtype=np.uint8),
        documents=np.frombuffer(out_documents, dtype=np.int64),
        taken=tuple(taken),
        allowed=allowed,
        limited_by=limited_by,
    )


class _Queue:
    """The documents of one source, epoch after epoch, each epoch in its own order."""

    def __init__(self, source: MixSource, seed: int, backwards: bool) -> None:
        self._source, self._seed, self._backwards = source, seed, backwards
        self._epoch = -1
        self._order = np.zeros(0, dtype=np.int64)
        self._next = 0  # place in the order where the part after this one begins
        self._documents: list[int] = []  # a part of the order as Python numbers, which are quick and large
        self._lengths: list[int] = []
        self._at = 0

    def peek(self) -> tuple[int, int]:
        if self._at == len(self._documents):
            self._refill()
        return self._documents[self._at], self._lengths[self._at]

    def _refill(self) -> None:
        if self._next == len(self._order):
            self._epoch, self._next = self._epoch + 1, 0
            self._order = permutation(len(self._source.lengths), self._seed, self._source.name, self._epoch)
            if self._backwards:
                self._order = self._order[::-1]
        block = self._order[self._next : self._next + BLOCK_DOCUMENTS]
        self._documents, self._lengths = block.tolist(), self._source.lengths[block].tolist()
        self._next, self._at = self._next + len(block), 0

    def advance(self) -> None:
        self._at += 1

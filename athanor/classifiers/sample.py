"""The documents that the classifiers are made from: a seeded sample of each source, in bounded memory.

A document is chosen by the hash of its content, so the sample does not depend
on the order of documents, files or shards. Documents of the split val are
left alone: what is measured on them later must not have been trained on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from athanor.base.errors import InputError
from athanor.base.work import Tick, ignore
from athanor.text.documents import NEIGHBOURHOOD, Document, content_id, hash64, read_documents, shard_files

MAX_CHARS = 32_000  # of a document that are kept; more would say nothing new and cost other documents their place
TRAIN, CALIBRATION, TEST = "train", "calibration", "test"
TEST_SHARE, CALIBRATION_SHARE = 0.2, 0.1
ROWS = "labelled rows"  # the kind of texts that are no documents of the corpus
Labeller = Callable[[Document], bool | None]


@dataclass(frozen=True, order=True)
class Sampled:
    """One text of the sample; `positive` is its label, if it has one."""

    key: int  # 64-bit hash of the seed and the content id: the order of the sample
    id: str
    source: str
    kind: str
    side: str  # TRAIN, CALIBRATION or TEST: one for all documents of a module, or of a neighbourhood of a long text
    text: str = field(compare=False)
    positive: bool | None = None

    @property
    def size(self) -> int:
        return len(self.text.encode())


def hashed(*parts: object) -> int:
    """A 64-bit hash of the parts."""
    return hash64("\0".join(map(str, parts)))


def side_of(group: str, seed: int) -> str:
    """The side of a group of documents that belong together; it does not depend on which other documents there are."""
    share = hashed("side", seed, group) / 2**64
    return TEST if share < TEST_SHARE else CALIBRATION if share < TEST_SHARE + CALIBRATION_SHARE else TRAIN


class Reservoir:
    """Keeps the texts with the smallest keys that fit into `max_bytes`, one of equal texts."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self._bytes = max_bytes, 0
        self._heap: list[tuple[int, str]] = []  # minus the key, id: the largest key comes first
        self._items: dict[str, Sampled] = {}

    def accepts(self, key: int) -> bool:
        return self._bytes < self.max_bytes or key <= -self._heap[0][0]

    def add(self, item: Sampled) -> None:
        existing = self._items.get(item.id)
        if existing is not None:  # the same text twice: kept is the one that sorts first, whichever came first
            self._items[item.id] = min(existing, item)
            return
        heapq.heappush(self._heap, (-item.key, item.id))
        self._items[item.id] = item
        self._bytes += item.size
        while len(self._heap) > 1 and self._bytes - self._items[self._heap[0][1]].size >= self.max_bytes:
            self._bytes -= self._items.pop(heapq.heappop(self._heap)[1]).size

    def items(self) -> list[Sampled]:
        return sorted(self._items.values())


@dataclass(frozen=True)
class Sample:
    """`natural` are documents as they come, `labelled` those with a label; both by source and key."""

    natural: list[Sampled]
    labelled: list[Sampled]


def sample_rows(rows: Iterable[tuple[str, str, bool | None]], max_bytes: int, seed: int) -> list[Sampled]:
    """From (file, text, label) rows: `max_bytes` of text, half of each label. The label None is no label."""
    label_reservoirs = {True: Reservoir(max_bytes // 2), False: Reservoir(max_bytes // 2)}
    for name, text, positive in rows:
        if positive is not None:
            identity = content_id(text)
            key, side = hashed("rows", seed, identity), side_of(identity, seed)
            if label_reservoirs[positive].accepts(key):
                label_reservoirs[positive].add(Sampled(key, identity, name, ROWS, side, text[:MAX_CHARS], positive))
    return _distinct(label_reservoirs[True].items() + label_reservoirs[False].items())


def sample(
    folder: str | Path,
    max_bytes: int,
    seed: int,
    labels: tuple[str, Labeller] | None = None,
    tick: Tick = ignore,
) -> Sample:
    """Draw from a folder of sources. `labels` are the name of a source and what tells the label of its documents.

    Each source gets the same number of bytes; good and bad documents of the
    labelled source as many again, half each. Held in memory are those and one
    batch of documents.
    """
    sources = shard_files(folder)
    if not sources:
        raise InputError("no documents", where=folder, fix="run dvc repro download")
    if labels and labels[0] not in sources:
        what = f"no source is named '{labels[0]}'; found: {', '.join(sources)}"
        fix = "name one that is there, or set quality_labels to null"
        raise InputError(what, where="classifiers.quality_labels.source", fix=fix)
    share = max(max_bytes // len(sources), 1)
    natural, labelled = [], []
    for name, paths in sources.items():
        natural_reservoir, label_reservoirs = (
            Reservoir(share),
            {True: Reservoir(share // 2), False: Reservoir(share // 2)},
        )
        for path in paths:
            for document in read_documents(path):
                tick(len(document.text))
                if document.split != "train":
                    continue
                key = hashed("sample", seed, document.id)
                label = labels[1](document) if labels and name == labels[0] else None
                accepting = [
                    reservoir
                    for reservoir in (natural_reservoir, label_reservoirs.get(label))
                    if reservoir is not None and reservoir.accepts(key)
                ]
                if accepting:
                    group = str(document.meta.get("module") or document.meta.get(NEIGHBOURHOOD, document.id))
                    text = document.text[:MAX_CHARS]
                    side = side_of(group, seed)
                    for reservoir in accepting:
                        positive = None if reservoir is natural_reservoir else label
                        reservoir.add(Sampled(key, document.id, name, document.kind, side, text, positive))
        natural += natural_reservoir.items()
        labelled += [item for reservoir in label_reservoirs.values() for item in reservoir.items()]
    return Sample(_distinct(natural), _distinct(labelled))


def _distinct(items: list[Sampled]) -> list[Sampled]:
    """The items without repeats of a text; two sources may hold the same text on two sides."""
    first: dict[str, Sampled] = {}
    for item in items:
        first.setdefault(item.id, item)
    return list(first.values())

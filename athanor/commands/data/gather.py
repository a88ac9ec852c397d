"""What the report tells, counted in one pass over data/clean.

Memory: a batch of text (256 documents), the documents that are shown, and what
`Clusters` needs for duplicates; nothing grows with the number of documents kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from athanor.artifacts import read_json, read_manifest
from athanor.commands.data.choose import Clusters, Draw, keys_of
from athanor.commands.data.peek import twins_of
from athanor.commands.data.read import DROPPED, ITEMS, KEPT, SHARDS, TEXT_BATCH, Corpus, Entry, Place
from athanor.corpus.conversations import read_items
from athanor.corpus.emit import BINS
from athanor.corpus.sweep import SCORES
from athanor.data.shards import KIND, VERSION

SEED = 0  # of the examples: the same corpus gives the same page
KEPT_EXAMPLES, RULE_EXAMPLES, SHOWN_CLUSTERS = 3, 2, 5
LENGTH_FROM, LENGTH_TO = 4, 26  # powers of two, bytes: 16 B to 64 MB
LENGTH_BINS = 2 * (LENGTH_TO - LENGTH_FROM)


@dataclass
class Source:
    """One source: its funnel, and histograms by fate (`lengths`) and by score and fate (`scores`)."""

    name: str
    kinds: Counter[str] = field(default_factory=Counter)
    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    inside: dict[str, int] = field(default_factory=dict)  # bytes that normalisation and redaction took
    drops: list[tuple[str, int, int]] = field(default_factory=list)  # rule, documents, bytes; most documents first
    lengths: dict[str, np.ndarray] = field(
        default_factory=lambda: {f: np.zeros(LENGTH_BINS, np.int64) for f in (KEPT, DROPPED)}
    )
    scores: dict[str, dict[str, np.ndarray]] = field(
        default_factory=lambda: {s: {f: np.zeros(BINS, np.int64) for f in (KEPT, DROPPED)} for s in SCORES}
    )
    licences: dict[str, list[int]] = field(default_factory=dict)  # of kept documents: documents, bytes
    left_out: dict[str, int] = field(default_factory=dict)  # at download, by reason

    @property
    def kind(self) -> str:
        """The kind of most of its documents."""
        return min(self.kinds, key=lambda kind: (-self.kinds[kind], kind), default="")


@dataclass
class Facts:
    """Everything that the sections of the report draw on."""

    corpus: Corpus
    sources: dict[str, Source]
    examples: dict[tuple[str, str], list[Entry]]  # (source, rule, or "" for kept) -> documents
    twins: dict[str, Entry]
    cluster_sizes: Counter[int]  # documents in a cluster, the one that stayed counted -> clusters
    clusters: list[tuple[int, Entry | None, list[Entry]]]  # the largest: size, the one that stayed, some of the others
    shards: dict[str, Any] | None
    metrics: dict[str, Any]
    cards: dict[str, Any]
    items: dict[str, tuple[str, str]]  # evaluation item -> category, question


def gather(corpus: Corpus) -> Facts:
    root = corpus.root
    sources = {name: Source(name) for name in corpus.sources}
    _funnel(corpus, sources)
    draws: dict[tuple[str, str], Draw] = {}
    for file in corpus.kept_files():
        _kept(corpus, file, sources, draws)
    _dropped(corpus, sources, draws)
    shown = {key: draw.places for key, draw in sorted(draws.items())}
    wanted = [place for places in shown.values() for place in places]
    found = dict(zip(wanted, corpus.entries(wanted), strict=True))
    examples = {key: [found[place] for place in places] for key, places in shown.items()}
    clusters = Clusters(corpus)
    members = clusters.members()
    largest = list(members.items())[:SHOWN_CLUSTERS]
    twins = twins_of(corpus, list(found.values()))
    shards = read_manifest(root / SHARDS, KIND, VERSION) if (root / SHARDS / "manifest.json").is_file() else None
    sizes = Counter(1 + len(rows) for rows in members.values())
    metrics, cards = (_json(root / path) for path in ("metrics/clean.json", "models/classifiers/card.json"))
    shown_clusters = [_cluster(corpus, root_id, rows) for root_id, rows in largest]
    return Facts(corpus, sources, examples, twins, sizes, shown_clusters, shards, metrics, cards, _items(corpus))


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _funnel(corpus: Corpus, sources: dict[str, Source]) -> None:
    for row in corpus.manifest["funnel"]:
        source, step = sources[row["source"]], row["step"]
        if step == "in":
            source.documents_in, source.bytes_in = row["documents"], row["bytes"]
        elif step == "out":
            source.documents_out, source.bytes_out = row["documents"], row["bytes"]
        elif step in ("normalised", "redacted"):
            source.inside[step] = row["bytes"]
        else:
            source.drops.append((step, row["documents"], row["bytes"]))
    counts = _json(corpus.root / "data/raw/manifest.json").get("counts", {})
    for source in sources.values():
        source.drops.sort(key=lambda drop: (-drop[1], drop[0]))
        source.left_out = counts.get(source.name, {}).get("left_out") or {}


def _kept(corpus: Corpus, file: Path, sources: dict[str, Source], draws: dict[tuple[str, str], Draw]) -> None:
    random = keys_of(SEED, file)
    for first, batch in corpus.batches(file, ("source", "kind", "license", "text", *SCORES), TEXT_BATCH):
        keys = random.random(len(batch))
        sizes = pc.binary_length(batch["text"]).to_numpy(zero_copy_only=False).astype(np.int64)
        licences = np.array(batch["license"].to_pylist(), object)
        for name, rows in _rows_by(batch, "source"):
            source = sources[name]
            _count(source, batch, rows, sizes, KEPT)
            for licence in sorted(set(licences[rows].tolist())):
                mine = rows[licences[rows] == licence]
                found = source.licences.setdefault(licence, [0, 0])
                found[0], found[1] = found[0] + len(mine), found[1] + int(sizes[mine].sum())
            draw = draws.setdefault((name, ""), Draw(KEPT_EXAMPLES))
            draw.show(keys[rows], [Place(file, first + row) for row in rows.tolist()])


def _dropped(corpus: Corpus, sources: dict[str, Source], draws: dict[tuple[str, str], Draw]) -> None:
    random = keys_of(SEED, corpus.dropped)
    for first, batch in corpus.batches(corpus.dropped, ("source", "kind", "rule", "bytes", *SCORES)):
        keys = random.random(len(batch))
        sizes = batch["bytes"].to_numpy(zero_copy_only=False).astype(np.int64)
        rules = np.array(batch["rule"].to_pylist(), object)
        for name, rows in _rows_by(batch, "source"):
            _count(sources[name], batch, rows, sizes, DROPPED)
            for rule in sorted(set(rules[rows].tolist())):
                mine = rows[rules[rows] == rule]
                draw = draws.setdefault((name, rule), Draw(RULE_EXAMPLES))
                draw.show(keys[mine], [Place(corpus.dropped, first + row) for row in mine.tolist()])


def _rows_by(batch: pa.RecordBatch, name: str) -> list[tuple[str, np.ndarray]]:
    values = np.array(batch[name].to_pylist(), object)
    return [(value, np.flatnonzero(values == value)) for value in sorted(set(values.tolist()))]


def _count(source: Source, batch: pa.RecordBatch, rows: np.ndarray, sizes: np.ndarray, fate: str) -> None:
    source.kinds.update(batch["kind"].take(pa.array(rows)).to_pylist())
    bins = np.floor(2 * (np.log2(np.maximum(sizes[rows], 1)) - LENGTH_FROM)).astype(int)
    source.lengths[fate] += np.bincount(np.clip(bins, 0, LENGTH_BINS - 1), minlength=LENGTH_BINS)
    for score in SCORES:
        if score in batch.schema.names:
            values = batch[score].to_numpy(zero_copy_only=False).astype(np.float64)[rows]
            values = values[~np.isnan(values)]
            source.scores[score][fate] += np.bincount(np.clip((values * BINS).astype(int), 0, BINS - 1), minlength=BINS)


def _cluster(corpus: Corpus, found: str, rows: list[int]) -> tuple[int, Entry | None, list[Entry]]:
    mine = {Place(corpus.dropped, row) for row in rows}
    first = [place for place in corpus.find([found]).get(found, []) if place not in mine][:1]
    shown = corpus.entries([*first, *(Place(corpus.dropped, row) for row in rows[:2])])
    return 1 + len(rows), shown[0] if first else None, shown[len(first) :]


def _items(corpus: Corpus) -> dict[str, tuple[str, str]]:
    """The evaluation items that were found in documents."""
    touched, path = corpus.manifest.get("contaminated_items", {}), corpus.root / ITEMS
    if not touched or not path.is_file():
        return {}
    return {item.id: (item.category, item.prompt[-1].content) for item in read_items(path) if item.id in touched}

"""The facts of the data report, counted in one pass over data/clean.

Memory: a batch of text (256 documents), the documents that are shown, and what `Clusters` needs for duplicates.
Nothing grows with the number of documents kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from athanor.base.artifacts import manifest_digest, read_json, read_manifest
from athanor.cleaning.measuring import SCORES
from athanor.cleaning.writing import BINS
from athanor.cli import render
from athanor.cli.data.choose import Clusters, Draw, keys_of, twins_of
from athanor.cli.data.read import (
    CLASSIFIERS,
    CLEAN,
    DROPPED,
    ITEMS,
    KEPT,
    RAW,
    SHARDS,
    TEXT_BATCH,
    TOKENIZER,
    Corpus,
    Entry,
    Place,
    built_params,
    clean_params,
)
from athanor.data.shards import KIND, VERSION
from athanor.runtime import dvc_lock
from athanor.runtime.facts import params_digest
from athanor.text.conversations import read_items

SEED = 0  # of the examples: the same corpus gives the same page
KEPT_EXAMPLES, RULE_EXAMPLES, SHOWN_CLUSTERS = 3, 2, 5
LENGTH_FROM, LENGTH_TO = 4, 26  # powers of two, bytes: 16 B to 64 MB
LENGTH_BINS = 2 * (LENGTH_TO - LENGTH_FROM)
LIMITS = {"quality": "min_quality", "toxicity": "max_toxicity"}  # score to the rule that goes by it
COLOURS = 7  # --c0 to --c6 in the style; --c7 is for all the rest


def _by_fate(bins: int) -> dict[str, np.ndarray]:
    return {fate: np.zeros(bins, np.int64) for fate in (KEPT, DROPPED)}


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
    lengths: dict[str, np.ndarray] = field(default_factory=lambda: _by_fate(LENGTH_BINS))
    scores: dict[str, dict[str, np.ndarray]] = field(default_factory=lambda: {s: _by_fate(BINS) for s in SCORES})
    licences: dict[str, list[int]] = field(
        default_factory=dict
    )  # of kept documents: documents, bytes; most bytes first
    left_out: dict[str, int] = field(default_factory=dict)  # at download, by reason
    limits: dict[str, float | None] = field(default_factory=dict)  # of scores
    english_only: bool | None = None  # None: not known

    @property
    def kind(self) -> str:
        """The kind of most of its documents."""
        return min(self.kinds, key=lambda kind: (-self.kinds[kind], kind), default="")

    def dropped_by(self, rule: str) -> int:
        return sum(documents for name, documents, _ in self.drops if name == rule)


@dataclass
class Facts:
    """Everything that the template of the report shows."""

    sources: dict[str, Source]
    totals: dict[str, str]
    digests: list[tuple[str, str, str]]
    rule_colours: dict[str, str]  # the rule that took most documents first
    licences: dict[str, list[int]]
    examples: dict[tuple[str, str], list[Entry]]  # (source, rule, or "" for kept) -> documents
    twins: dict[str, Entry]
    cluster_sizes: Counter[int]  # documents in a cluster, the one that stayed counted -> clusters
    repeated: int  # documents that were dropped as duplicates
    clusters: list[tuple[int, Entry | None, list[Entry]]]  # the largest: size, the one that stayed, some of the others
    shards: dict[str, Any] | None
    other_clean: bool  # whether the shards were made of another data/clean
    metrics: dict[str, Any]
    cards: dict[str, Any]
    card_rows: list[tuple[str, ...]]
    weak: list[str]  # classifiers with weak labels
    length_range: tuple[int, int]
    length_ends: list[str]
    contaminated: dict[str, int]  # evaluation item -> documents dropped for it
    items: dict[str, tuple[str, str]]  # evaluation item -> category, question


def gather(corpus: Corpus) -> Facts:
    root = corpus.root
    sources = {name: Source(name) for name in corpus.sources}
    rules = _funnel(corpus, sources)
    draws: dict[tuple[str, str], Draw] = {}
    for file in [*corpus.kept_files(), corpus.dropped]:
        _count(corpus, file, sources, draws)
    licences = _finish(corpus, sources)
    shown = {key: draw.places for key, draw in sorted(draws.items())}
    entries = corpus.entries([place for places in shown.values() for place in places])
    in_order = iter(entries)
    clusters = Clusters(corpus).members()
    sizes = Counter(1 + len(rows) for rows in clusters.values())
    shards = read_manifest(root / SHARDS, KIND, VERSION) if (root / SHARDS / "manifest.json").is_file() else None
    cards = _json(root / CLASSIFIERS / "card.json")
    first, last = _length_range(sources)
    contaminated = corpus.manifest.get("contaminated_items", {})
    return Facts(
        sources=sources,
        totals=_totals(corpus, sources, shards),
        digests=_digests(root),
        rule_colours={rule: f"var(--c{min(number, COLOURS)})" for number, rule in enumerate(rules)},
        licences=licences,
        examples={key: [next(in_order) for _ in places] for key, places in shown.items()},
        twins=twins_of(corpus, entries),
        cluster_sizes=sizes,
        repeated=sum((size - 1) * count for size, count in sizes.items()),
        clusters=[_cluster(corpus, *pair) for pair in list(clusters.items())[:SHOWN_CLUSTERS]],
        shards=shards,
        other_clean=shards is not None and shards["parents"].get("clean") != manifest_digest(root / CLEAN),
        metrics=_json(root / "metrics/clean.json"),
        cards=cards,
        card_rows=_card_rows(cards),
        weak=[name for name, card in sorted(cards.items()) if "weak" in card["labels"]],
        length_range=(first, last),
        length_ends=[_power_of_two(LENGTH_FROM + bin // 2) for bin in (first, (first + last) // 2, last)],
        contaminated=contaminated,
        items=_items(corpus, contaminated),
    )


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _funnel(corpus: Corpus, sources: dict[str, Source]) -> list[str]:
    """Fill in what came, went and stayed; returns the rules, the one that took most documents first."""
    totals: Counter[str] = Counter()
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
            totals[step] += row["documents"]
    counts = _json(corpus.root / RAW / "manifest.json").get("counts", {})
    for source in sources.values():
        source.drops.sort(key=lambda drop: (-drop[1], drop[0]))
        source.left_out = counts.get(source.name, {}).get("left_out") or {}
    return sorted(totals, key=lambda rule: (-totals[rule], rule))


def _count(corpus: Corpus, file: Path, sources: dict[str, Source], draws: dict[tuple[str, str], Draw]) -> None:
    """Add the documents of one file to the histograms and licences of their sources, and draw the examples."""
    random, kept = keys_of(SEED, file), file != corpus.dropped
    own, rows_read = (("license", "text"), TEXT_BATCH) if kept else (("rule", "bytes"), 4096)
    for first, batch in corpus.batches(file, ("source", "kind", *own, *SCORES), rows_read):
        keys = random.random(len(batch))
        sizes = pc.binary_length(batch["text"]) if kept else batch["bytes"]
        sizes = sizes.to_numpy(zero_copy_only=False).astype(np.int64)
        labels = np.array(batch[own[0]].to_pylist(), object)
        for name, rows in _groups(np.array(batch["source"].to_pylist(), object)):
            _histograms(sources[name], batch, rows, sizes, KEPT if kept else DROPPED)
            for label, within in _groups(labels[rows]):
                mine = rows[within]
                if kept:
                    row = sources[name].licences.setdefault(label, [0, 0])
                    row[:] = row[0] + len(mine), row[1] + int(sizes[mine].sum())
                else:
                    _show(draws, (name, label), RULE_EXAMPLES, keys, mine, file, first)
            if kept:
                _show(draws, (name, ""), KEPT_EXAMPLES, keys, rows, file, first)


def _show(
    draws: dict[tuple[str, str], Draw],
    key: tuple[str, str],
    count: int,
    keys: np.ndarray,
    rows: np.ndarray,
    file: Path,
    first: int,
) -> None:
    draws.setdefault(key, Draw(count)).show(keys[rows], [Place(file, first + row) for row in rows.tolist()])


def _groups(values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Every value, in order, with the rows that have it."""
    for value in sorted(set(values.tolist())):
        yield value, np.flatnonzero(values == value)


def _histograms(source: Source, batch: pa.RecordBatch, rows: np.ndarray, sizes: np.ndarray, fate: str) -> None:
    source.kinds.update(batch["kind"].take(pa.array(rows)).to_pylist())
    bins = np.floor(2 * (np.log2(np.maximum(sizes[rows], 1)) - LENGTH_FROM)).astype(int)
    source.lengths[fate] += np.bincount(np.clip(bins, 0, LENGTH_BINS - 1), minlength=LENGTH_BINS)
    for score in SCORES:
        if score in batch.schema.names:
            values = batch[score].to_numpy(zero_copy_only=False).astype(np.float64)[rows]
            values = values[~np.isnan(values)]
            source.scores[score][fate] += np.bincount(np.clip((values * BINS).astype(int), 0, BINS - 1), minlength=BINS)


def _finish(corpus: Corpus, sources: dict[str, Source]) -> dict[str, list[int]]:
    """Order the licences of each source and add its rules; returns the licences of all sources."""
    params, totals = clean_params(corpus.root), {}
    for source in sources.values():
        rules = getattr(params.rules, source.kind, None) if params else None
        if rules is not None:
            source.limits = {score: getattr(rules, name) for score, name in LIMITS.items()}
            source.english_only = rules.english_only
        source.licences = _most_bytes_first(source.licences)
        for licence, row in source.licences.items():
            totals[licence] = [a + b for a, b in zip(totals.get(licence, (0, 0)), row, strict=True)]
    return _most_bytes_first(totals)


def _most_bytes_first(licences: dict[str, list[int]]) -> dict[str, list[int]]:
    return dict(sorted(licences.items(), key=lambda pair: (-pair[1][1], pair[0])))


def _totals(corpus: Corpus, sources: dict[str, Source], shards: dict[str, Any] | None) -> dict[str, str]:
    def total(name: str) -> int:
        return sum(getattr(source, name) for source in sources.values())

    held_out = sum(row["documents"] for row in corpus.manifest["counts"]["val"].values())
    totals = {
        "sources": f"{len(sources)}",
        "documents came in": f"{total('documents_in'):,}",
        "of text came in": render.size(total("bytes_in")),
        "documents kept": f"{total('documents_out'):,}",
        "of text kept": render.size(total("bytes_out")),
        "of the text kept": render.share(total("bytes_out"), total("bytes_in")),
        "documents held out": f"{held_out:,}",
    }
    return totals | ({"tokens in the stream": f"{shards['counts']['tokens']:,}"} if shards else {})


def _digests(root: Path) -> list[tuple[str, str, str]]:
    """Which data the page is about: folder or section of params.yaml, our digest, DVC's."""
    outs = dvc_lock.outputs(root / dvc_lock.LOCK)
    rows = [
        (path.as_posix(), manifest_digest(root / path)[:12], str(outs.get(path.as_posix(), "–"))[:12])
        for path in (RAW, CLASSIFIERS, CLEAN, TOKENIZER, SHARDS)
        if (root / path / "manifest.json").is_file()
    ]
    for stage, section in (("download", "download"), ("clean", "clean"), ("shard", "mixture"), ("shard", "shard")):
        values = built_params(root, stage).get(section)
        if values is not None:
            rows.append((f"parameters: {section}", params_digest(values)[:12], "–"))
    return rows


def _card_rows(cards: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for each figure, one column for each classifier."""
    columns: list[tuple[str, ...]] = []
    for _, card in sorted(cards.items()):
        correlations = [abs(row["all"]) for row in card["length_correlation"].values() if row.get("all") is not None]
        numbers = (
            card["auroc"]["held_out"],
            min(card["auroc"].get("other_source", {}).values(), default=None),
            card["calibration"]["expected_calibration_error"],
            max(correlations, default=None),
        )
        labels = ", ".join(f"{kind} {origin}" for kind, origin in sorted(card["labels_by_kind"].items()))
        tested = f"{sum(card['examples']['test'].values()):,}"
        columns.append((labels, *("–" if value is None else f"{value:.3f}" for value in numbers), tested))
    names = (
        "labels",
        "AUROC, documents held out",
        "AUROC, worst source not trained on",
        "calibration error",
        "correlation with length, largest",
        "texts tested on",
    )
    return list(zip(names, *columns, strict=True))


def _length_range(sources: dict[str, Source]) -> tuple[int, int]:
    """The bins that hold a document, at least eight; both ends and the middle lie on whole powers of two."""
    filled = np.flatnonzero(sum(counts for source in sources.values() for counts in source.lengths.values()))
    first = int(filled.min(initial=LENGTH_BINS - 8)) // 4 * 4
    return first, min(LENGTH_BINS, max(first + 8, (int(filled.max(initial=0)) // 4 + 1) * 4))


def _power_of_two(power: int) -> str:
    unit, least = next((pair for pair in (("MiB", 20), ("KiB", 10)) if power >= pair[1]), ("B", 0))
    return f"{2 ** (power - least)} {unit}"


def _cluster(corpus: Corpus, root_id: str, rows: list[int]) -> tuple[int, Entry | None, list[Entry]]:
    mine = {Place(corpus.dropped, row) for row in rows}
    first = [place for place in corpus.find([root_id]).get(root_id, []) if place not in mine][:1]
    shown = corpus.entries([*first, *(Place(corpus.dropped, row) for row in rows[:2])])
    return 1 + len(rows), shown[0] if first else None, shown[len(first) :]


def _items(corpus: Corpus, touched: dict[str, int]) -> dict[str, tuple[str, str]]:
    """The evaluation items that documents held: category and question."""
    path = corpus.root / ITEMS
    if not touched or not path.is_file():
        return {}
    return {item.id: (item.category, item.prompt[-1].content) for item in read_items(path) if item.id in touched}

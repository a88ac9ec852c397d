"""One page about the corpus: funnel, mixture, scores, lengths, duplicates, licences, examples.

The page is one file that loads nothing, and the same corpus gives the same bytes. It is shown with the clean run
in MLflow as well, where this checkout has that run's journal.
"""

from __future__ import annotations

import argparse
import webbrowser
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from athanor.base.artifacts import manifest_digest, read_json, read_manifest, write_text
from athanor.base.errors import AthanorError
from athanor.cleaning import rules
from athanor.cleaning.measuring import SCORES
from athanor.cleaning.pii import CATEGORIES
from athanor.cleaning.writing import BINS
from athanor.cli import render
from athanor.cli.data.peek import Clusters, Draw, key_generator, twins_of
from athanor.cli.data.read import (
    BATCH,
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
    RowRef,
    clean_params,
    weak_labels,
)
from athanor.cli.summary import leaf
from athanor.data.shards import KIND, VERSION
from athanor.runtime import dvc_lock
from athanor.runtime.dvc_lock import built_params
from athanor.runtime.facts import params_digest
from athanor.runtime.machine import anchor
from athanor.runtime.ship import attach_later
from athanor.text.conversations import searched_items

OUT = Path(".athanor/data-report.html")
LANGUAGE = (rules.NOT_ENGLISH, "few_stop_words", "not_ascii")
WEAKENED = ("quality", "quality_classifier", "toxicity")  # scores that a classifier has a part in


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"default {OUT}, which Git ignores")
    parser.add_argument("--open", action="store_true", help="in the browser")
    parser.add_argument("--no-attach", action="store_true", help="do not show it with the clean run in MLflow")


def run(args: argparse.Namespace) -> int:
    text = render_page(gather(Corpus(Path.cwd())))
    write_text(args.out, text)
    link = args.out.resolve().as_uri()
    print(f"{link}  ({len(text.encode()) / 1e6:.1f} MB)")
    if not args.no_attach:
        print(attach(Path.cwd(), text))
    if args.open:
        webbrowser.open(link)
    return 0


def refresh(root: Path) -> Path | None:
    """Make the page anew when the corpus below `root` is younger than it; None where there is no corpus."""
    out = root / OUT
    leaf_files = [path for name in ("clean", "shard") if (path := root / "metrics" / "runs" / f"{name}.json").is_file()]
    if len(leaf_files) < 2:
        return None
    if not out.is_file() or out.stat().st_mtime < max(path.stat().st_mtime for path in leaf_files):
        try:
            text = render_page(gather(Corpus(root)))
            write_text(out, text)
            attach(root, text)
        except AthanorError:  # `athanor data report` says what is missing
            return None
    return out


def render_page(facts: dict[str, Any]) -> str:
    """The page about the facts that `gather` returns."""
    names = {
        "LIMITS": LIMITS,
        "WEAKENED": WEAKENED,
        "CATEGORIES": CATEGORIES,
        "LANGUAGE": LANGUAGE,
        "drift_of": drift_of,
    }
    return render.fill_template("report.html.j2", cut=render.cut, differences=render.differences, facts=facts, **names)


def drift_of(stream: dict[str, Any]) -> dict[str, Any]:
    """The share of each source in each token file, and how far the worst is from the target."""
    counts, worst = dict(sorted(stream["per_shard"].items())), []
    colours = {name: f"var(--c{number})" if number else "var(--kept)" for number, name in enumerate(counts)}
    totals = [sum(column) for column in zip(*counts.values(), strict=True)]
    shares = {name: [n / total for n, total in zip(row, totals, strict=True)] for name, row in counts.items()}
    for name, row in shares.items():
        drift = max(abs(share - stream["sources"][name]["target_share"]) for share in row)
        worst.append((name, f"{min(row):.2%}", f"{max(row):.2%}", f"{100 * drift:.2f}"))
    files = []
    for number in range(len(totals)):
        label = ", ".join(f"{name} {row[number]:.1%}" for name, row in shares.items())
        segments = [(name, row[number], colours[name]) for name, row in counts.items()]
        files.append((f"file {number:05d}: {label}", segments))
    return {"worst": worst, "files": files, "colours": colours}


def attach(root: Path, text: str) -> str:
    """Show the page with the run that made data/clean; says what was done."""
    run = (leaf(root, "clean") or {}).get("run", "")
    try:
        if run and attach_later(anchor(), run, OUT.name, text.encode()):
            return f"shown in MLflow with the run {run} (athanor ui)"
    except AthanorError as error:
        return f"the page is written; not yet shown in MLflow: {error}"
    return "not shown in MLflow: the journal of the run that made data/clean is not in this checkout"


# -- what the template shows, counted in one pass -------------------------------------------------------------------------

SEED = 0  # of the examples: the same corpus gives the same page
KEPT_EXAMPLES, RULE_EXAMPLES, SHOWN_CLUSTERS = 3, 2, 5
LENGTH_FROM, LENGTH_TO = 4, 26  # powers of two, bytes: 16 B to 64 MB
LENGTH_BINS = 2 * (LENGTH_TO - LENGTH_FROM)
LIMITS = {"quality": "min_quality", "toxicity": "max_toxicity"}  # score to the rule that goes by it
COLOURS = 7  # --c0 to --c6 in the style; --c7 is for all the rest
Sizes = list[int]  # documents, bytes


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
    licences: dict[str, Sizes] = field(default_factory=dict)  # of kept documents; most bytes first
    left_out: dict[str, int] = field(default_factory=dict)  # at download, by reason
    limits: dict[str, float | None] = field(default_factory=dict)  # of scores
    english_only: bool | None = None  # None: not known

    @property
    def kind(self) -> str:
        """The kind of most of its documents."""
        return min(self.kinds, key=lambda kind: (-self.kinds[kind], kind), default="")

    def dropped_by(self, rule: str) -> int:
        return sum(documents for name, documents, _ in self.drops if name == rule)


def gather(corpus: Corpus) -> dict[str, Any]:
    """Everything that the template of the report shows."""
    root = corpus.root
    sources = {name: Source(name) for name in corpus.sources}
    rule_names = _funnel(corpus, sources)
    draws: dict[tuple[str, str], Draw] = {}
    for file in [*corpus.kept_files(), corpus.dropped]:
        _count(corpus, file, sources, draws)
    entries = corpus.entries([ref for _, draw in sorted(draws.items()) for ref in draw.refs])
    remaining_entries = iter(entries)
    clusters = Clusters(corpus).members
    shards = read_manifest(root / SHARDS, KIND, VERSION) if (root / SHARDS / "manifest.json").is_file() else None
    first, last = _length_range(sources)
    documents_per_item = corpus.manifest.get("contaminated_items", {})
    items = searched_items(root / ITEMS) if documents_per_item and (root / ITEMS).is_file() else ()
    return {
        "sources": sources,
        "held_out": sum(row["documents"] for row in corpus.manifest["counts"]["val"].values()),
        "digests": _digests(root),  # which data the page is about: folder or section of params.yaml, our digest, DVC's
        "rule_colours": {rule: f"var(--c{min(number, COLOURS)})" for number, rule in enumerate(rule_names)},
        "licences": _licences(corpus, sources),
        # (source, rule, or "" for kept) -> documents
        "examples": {key: [next(remaining_entries) for _ in draw.refs] for key, draw in sorted(draws.items())},
        "twins": twins_of(corpus, entries),
        "cluster_sizes": Counter(1 + len(rows) for rows in clusters.values()),
        "repeated": sum(map(len, clusters.values())),  # documents that were dropped as duplicates
        "clusters": _clusters(corpus, dict(list(clusters.items())[:SHOWN_CLUSTERS])),
        "shards": shards,
        "other_clean": shards is not None and shards["parents"].get("clean") != manifest_digest(root / CLEAN),
        "metrics": _json(root / "metrics/clean.json"),
        "cards": _json(root / CLASSIFIERS / "card.json"),
        "weak": weak_labels(root),
        "length_range": (first, last),
        "length_ends": [_power_of_two(LENGTH_FROM + bin // 2) for bin in (first, (first + last) // 2, last)],
        "contaminated": documents_per_item,  # evaluation item -> documents dropped for it
        "questions": {
            item.id: (item.category, item.prompt[-1].content) for item in items if item.id in documents_per_item
        },
    }


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _funnel(corpus: Corpus, sources: dict[str, Source]) -> list[str]:
    """Fill in what came in, was dropped and stayed; returns the rules, that with the most documents first."""
    totals: Counter[str] = Counter()
    for row in corpus.manifest["funnel"]:
        source, step = sources[row["source"]], row["step"]
        if step in ("in", "out"):
            setattr(source, f"documents_{step}", row["documents"])
            setattr(source, f"bytes_{step}", row["bytes"])
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
    generator, kept = key_generator(SEED, file), file != corpus.dropped
    label, size = ("license", "text") if kept else ("rule", "bytes")
    for first, batch in corpus.batches(file, ("source", "kind", label, size, *SCORES), TEXT_BATCH if kept else BATCH):
        keys = generator.random(len(batch))
        lengths = (pc.binary_length(batch["text"]) if kept else batch["bytes"]).to_numpy(zero_copy_only=False)
        frame = batch.select([name for name in batch.schema.names if name != size]).to_pandas()
        for (name, reason), rows in frame.groupby(["source", label]).indices.items():
            source, group, sizes = sources[name], frame.iloc[rows], lengths[rows]
            if kept:
                so_far = source.licences.get(reason, [0, 0])
                source.licences[reason] = [so_far[0] + len(rows), so_far[1] + int(sizes.sum())]
            count = Draw(KEPT_EXAMPLES if kept else RULE_EXAMPLES)
            draws.setdefault((name, "" if kept else reason), count).add(file, first, keys, rows)
            source.kinds.update(group["kind"])
            fate, powers = KEPT if kept else DROPPED, np.clip(np.log2(np.maximum(sizes, 1)), LENGTH_FROM, LENGTH_TO)
            source.lengths[fate] += np.histogram(powers, LENGTH_BINS, (LENGTH_FROM, LENGTH_TO))[0]
            for score in frame.columns.intersection(SCORES):  # of what was never scored it is NaN, and in no bin
                source.scores[score][fate] += np.histogram(group[score].astype(float), BINS, (0, 1))[0]


def _licences(corpus: Corpus, sources: dict[str, Source]) -> dict[str, Sizes]:
    """Order the licences of each source and add its rules; returns the licences of all sources."""
    params, totals = clean_params(corpus.root), {}
    for source in sources.values():
        rule_params = getattr(params.rules, source.kind, None) if params else None
        if rule_params is not None:
            source.limits = {score: getattr(rule_params, name) for score, name in LIMITS.items()}
            source.english_only = rule_params.english_only
        source.licences = _most_bytes_first(source.licences)
        for licence, row in source.licences.items():
            totals[licence] = [a + b for a, b in zip(totals.get(licence, (0, 0)), row, strict=True)]
    return _most_bytes_first(totals)


def _most_bytes_first(licences: dict[str, Sizes]) -> dict[str, Sizes]:
    return dict(sorted(licences.items(), key=lambda pair: (-pair[1][1], pair[0])))


def _digests(root: Path) -> list[tuple[str, str, str]]:
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


def _length_range(sources: dict[str, Source]) -> tuple[int, int]:
    """The bins that hold a document, at least eight; both ends and the middle lie on whole powers of two."""
    filled = np.flatnonzero(sum(counts for source in sources.values() for counts in source.lengths.values()))
    first = int(filled.min(initial=LENGTH_BINS - 8)) // 4 * 4
    return first, min(LENGTH_BINS, max(first + 8, (int(filled.max(initial=0)) // 4 + 1) * 4))


def _power_of_two(power: int) -> str:
    return f"{2 ** (power % 10)} {('B', 'KiB', 'MiB')[power // 10]}"


def _clusters(corpus: Corpus, clusters: dict[str, list[int]]) -> list[tuple[int, list[Any], list[Any]]]:
    """For each cluster its size, the document that stayed (or none, if its row is not known), and two of the others."""
    refs_by_root, summaries = corpus.find(clusters), []
    for root, rows in clusters.items():
        copies = [RowRef(corpus.dropped, row) for row in rows]
        first = [ref for ref in refs_by_root.get(root, []) if ref not in copies][:1]
        summaries.append((1 + len(rows), corpus.entries(first), corpus.entries(copies[:2])))
    return summaries

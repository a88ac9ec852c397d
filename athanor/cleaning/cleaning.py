"""Cleaning a corpus: every document is measured on its own, then duplicates are found, then it is written and checked.

The work on documents is done shard by shard (`measuring`, `table`, `writing`), by
whatever runs such work. Between, the decisions that need all documents are
taken here, on a few numbers for each (`table`), and they are the same whatever
the order of the shards and of the documents in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.errors import GateError, ParamsError
from athanor.base.work import Facts, MapShards
from athanor.cleaning import dedup, minhash, rules, writing
from athanor.cleaning.measuring import Tools, load_tools, measure_shard
from athanor.cleaning.params import CleanParams
from athanor.cleaning.table import (
    EXACT,
    EXACT_VAL,
    ITEM,
    KEPT,
    NEAR,
    NEAR_VAL,
    REASONS,
    Shard,
    ShardSignatures,
    ShingleSets,
    Table,
    band_keys,
    find_near_copies,
    read_all_hits,
    read_table,
)
from athanor.words.decontaminate import ItemIndex

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


@dataclass(frozen=True)
class Cleaned:
    """`shard_folders` are the folders that `writing.write_shard` filled, by source, in the order of the shards."""

    shard_folders: dict[str, list[Path]]
    counts: dict[str, dict[str, dict[str, int]]]  # split -> source -> documents, bytes
    funnel: Funnel
    items: dict[str, int]  # evaluation item -> documents dropped for it
    scores: dict[str, dict[str, dict[str, list[int]]]]  # source -> score -> kept or dropped -> histogram
    report: Facts  # deterministic facts for the metrics


def clean(
    raw: Mapping[str, Sequence[Path]],
    items: Path,
    classifiers: Path,
    params: CleanParams,
    measures: Path,
    work: Path,
    map_shards: MapShards,
    text_bytes: Mapping[str, int],
) -> Cleaned:
    """Clean the sources of `raw` (name to shards); `text_bytes` of each are for the progress shown.

    `measures` keeps what measuring writes (it serves again when only thresholds
    change), `work` the rest. GateError when a check on the result fails,
    among them: a source with nothing left, counts that do not add up,
    duplicates above the limit.
    """
    ranks = source_ranks(raw, params)
    tools = Tools(params, items.absolute(), classifiers.absolute())
    names = {source: [f"{source}/{number:05d}" for number in range(len(raw[source]))] for source in sorted(raw)}
    tasks, sizes = {}, {}
    for source, shard_names in names.items():
        file_sizes = [path.stat().st_size for path in raw[source]]
        for name, path, size in zip(shard_names, raw[source], file_sizes, strict=True):
            tasks[name] = {"shard": path.absolute(), "tools": tools}
            sizes[name] = text_bytes.get(source, sum(file_sizes)) * size // sum(file_sizes)
    measured = map_shards(measure_shard, tasks, measures, desc="normalise and measure", sizes=sizes)
    table = read_table({s: [measures / name for name in shard_names] for s, shard_names in names.items()}, params.rules)
    _, index, _ = load_tools(tools)
    drop_duplicates(table, ranks, params, work, map_shards)
    item_of_row = drop_items(table, index, params)
    threshold = params.dedup.near_duplicate_jaccard
    sample = sample_of(table, params.dedup.duplicate_check_documents)
    sets = ShingleSets(table.shards, sample, work / "sample", map_shards, "sample")
    shared = {"tools": tools, "threshold": threshold, "sample": sets.write_index(work / "sample" / "index", sample)}
    tasks = {shard.name: {**write_task(table, shard, index, item_of_row, work), **shared} for shard in table.shards}
    sizes = {shard.name: int(table.bytes[shard.rows.start : shard.rows.stop].sum()) for shard in table.shards}
    written = map_shards(writing.write_shard, tasks, work / "written", desc="write and check", sizes=sizes)
    funnel = funnel_of(table, measured, written)
    funnel.check()
    observed = [
        writing.Observed.load(work / "written" / shard.name, written[shard.name]["observed"]) for shard in table.shards
    ]
    facts = writing.run_gates(observed, sample.tolist(), params, index)
    redactions = {
        source: dict(sorted(sum((Counter(measured[name]["redactions"]) for name in shard_names), Counter()).items()))
        for source, shard_names in names.items()
    }
    category_counts = Counter(index.items[item].category for item in item_of_row.values())
    contaminated_item_counts = Counter(index.items[item].id for item in item_of_row.values())
    report = {
        "contaminated": {
            "documents": len(item_of_row),
            "items": len(contaminated_item_counts),
            "by_category": {name: category_counts[name] for name in sorted({item.category for item in index.items})},
            "ngrams_shared_by_items": index.shared_ngrams,
        },
        "redactions": redactions,
        **facts,
    }
    folders = {source: [work / "written" / name for name in shard_names] for source, shard_names in names.items()}
    scores = {
        source: _summed([written[name]["scores"] for name in shard_names]) for source, shard_names in names.items()
    }
    return Cleaned(
        folders, _counts(written, names), funnel, dict(sorted(contaminated_item_counts.items())), scores, report
    )


def source_ranks(names: Mapping[str, Any], params: CleanParams) -> dict[str, int]:
    """Rank of each source, 0 the best: those of `source_priority`, then the rest by name."""
    for priority_source in params.source_priority:
        if priority_source not in names:
            fix = f"use some of: {', '.join(sorted(names))}"
            raise ParamsError(f"no source is named '{priority_source}'", where="clean.source_priority", fix=fix)
    ordered = [*params.source_priority, *(name for name in sorted(names) if name not in params.source_priority)]
    return {name: rank for rank, name in enumerate(ordered)}


def drop_duplicates(
    table: Table, ranks: Mapping[str, int], params: CleanParams, work: Path, map_shards: MapShards
) -> None:
    """Drop every document that repeats a better ranked one: validation ranks first, then source, length and id decide."""
    ranked = table.rank(ranks)
    ranked = ranked[table.reason[ranked] == KEPT]

    def drop_repeats(rows: np.ndarray, twins: np.ndarray, reason: str, reason_if_val: str) -> None:
        crossing = ~table.val[rows] & table.val[twins]
        table.drop(rows[crossing], reason_if_val, twins[crossing])
        table.drop(rows[~crossing], reason, twins[~crossing])

    drop_repeats(*dedup.exact_duplicates(table.id, ranked), EXACT, EXACT_VAL)
    ranked = ranked[table.reason[ranked] == KEPT]
    signatures = ShardSignatures(table.shards)
    eligible = (table.reason == KEPT) & ~signatures.empty()
    candidates = dedup.candidates(lambda band: band_keys(table.shards, band), eligible, minhash.BANDS)
    val = np.flatnonzero(table.val & (table.reason == KEPT))
    needed_rows = np.union1d(candidates[0], val)
    sets = ShingleSets(table.shards, needed_rows, work / "candidates", map_shards, "candidates")
    threshold = params.dedup.near_duplicate_jaccard
    drop_repeats(*_pair_arrays(dedup.near_duplicates(signatures, ranked, sets, threshold, candidates)), NEAR, NEAR_VAL)
    # Banding misses one pair in seventy at the threshold. Between training and validation none may be missed.
    ranked = ranked[table.reason[ranked] == KEPT]
    val = ranked[table.val[ranked]]
    if len(val):
        index = sets.write_index(work / "validation" / "index", val.tolist())
        train = np.sort(ranked[~table.val[ranked]])
        pairs = find_near_copies(table, train, index, threshold, work / "validation", map_shards)
        drop_repeats(pairs[:, 0], pairs[:, 1], NEAR, NEAR_VAL)


def _pair_arrays(twins: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(twins), np.int64), np.array(list(twins.values()), np.int64)


def drop_items(table: Table, index: ItemIndex, params: CleanParams) -> dict[int, int]:
    """Drop the documents that hold an evaluation item; returns the number of the item for each dropped row."""
    rows, hits = read_all_hits(table.shards)
    remaining = [(row, hit) for row, hit in zip(rows.tolist(), hits, strict=True) if table.reason[row] == KEPT]
    limit = params.decontamination.max_ngram_documents
    items = index.resolve([hit for _, hit in remaining], max_ngram_documents=limit)
    item_of_row = {row: item for (row, _), item in zip(remaining, items, strict=True) if item is not None}
    table.drop(np.array(list(item_of_row), np.int64), ITEM)
    return item_of_row


def sample_of(table: Table, count: int) -> np.ndarray:
    """Rows of the kept documents with the smallest content hashes: as good as random, and independent of order."""
    rows = table.kept
    return rows[np.lexsort((table.id[rows, 1], table.id[rows, 0]))][:count]


def write_task(table: Table, shard: Shard, index: ItemIndex, item_of_row: Mapping[int, int], work: Path) -> Facts:
    """The task of `writing.write_shard` for one shard; writes the decisions about its documents."""
    rows = slice(shard.rows.start, shard.rows.stop)
    twins = [table.hex(twin, raw=True) if twin >= 0 else "" for twin in table.twin[rows].tolist()]
    details = [
        index.items[item_of_row[row]].id if row in item_of_row else twin
        for row, twin in zip(shard.rows, twins, strict=True)
    ]
    path = work / "decisions" / f"{shard.name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    decisions = {"reason": table.reason[rows], "value": table.value[rows]}
    np.savez(path, **decisions, twin=np.array(twins, "U32"), detail=np.array(details, str))
    origin = {"source": shard.source, "number": shard.number, "start": shard.rows.start}
    return {"shard": shard.folder.absolute(), "decisions": path.absolute(), **origin}


def funnel_of(table: Table, measured: Mapping[str, Facts], written: Mapping[str, Facts]) -> Funnel:
    """Count what came in and was dropped from the decisions, and what went out from the written files."""
    funnel = Funnel()
    for shard in table.shards:
        facts, source = measured[shard.name], shard.source
        funnel.add(source, IN, facts["documents_in"], facts["bytes_in"])
        funnel.add(source, NORMALISED, 0, facts["bytes_normalised"])
        funnel.add(source, REDACTED, 0, facts["bytes_redacted"])
        for long_document in facts["too_long"]:
            funnel.add(source, rules.TOO_LONG, 1, long_document["bytes"])
        rows = slice(shard.rows.start, shard.rows.stop)
        reason, size = table.reason[rows], table.bytes[rows]
        for code in np.unique(reason[reason != KEPT]).tolist():
            funnel.add(source, REASONS[code], int((reason == code).sum()), int(size[reason == code].sum()))
        on_disk = [0, 0]
        for row in written[shard.name]["counts"].values():
            on_disk = [on_disk[0] + row["documents"], on_disk[1] + row["bytes"]]
        expected = [int((reason == KEPT).sum()), int(size[reason == KEPT].sum())]
        if on_disk != expected:
            raise GateError(
                "funnel describes the files",
                f"{on_disk} documents and bytes on disk, {expected} in the funnel",
                where=f"source {source}, shard {shard.number:05d}",
                fix="check the disk and run dvc repro clean again",
            )
        funnel.add(source, OUT, *on_disk)
    return funnel


def _counts(written: Mapping[str, Facts], names: Mapping[str, Sequence[str]]) -> Facts:
    counts: Facts = {split: {} for split in writing.SPLITS}
    for source, shard_names in names.items():
        for split in writing.SPLITS:
            rows = [written[name]["counts"][split] for name in shard_names if split in written[name]["counts"]]
            if rows:
                counts[split][source] = {key: sum(row[key] for row in rows) for key in ("documents", "bytes")}
    return counts


def _summed(histograms: Sequence[Mapping[str, Mapping[str, list[int]]]]) -> dict[str, dict[str, list[int]]]:
    return {
        score: {
            outcome: np.sum([histogram[score][outcome] for histogram in histograms], axis=0).tolist()
            for outcome in outcomes
        }
        for score, outcomes in histograms[0].items()
    }

"""Cleaning a corpus: every document is measured on its own, then duplicates are found, then it is written and checked.

All work is done by whatever runs it for `MapShards`: shard by shard where
documents are looked at one by one (`measuring`, `writing`), and by groups of
shards or ranges of hashes where they are compared (`groups`, `repeats`,
`near`, `validation`, `deciding`). What is decided is the same whatever the
order of the shards and of the documents in them. This module holds a few
numbers for each shard and none for a document, except those in which an
evaluation item was found (about 300 bytes each).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.errors import GateError, ParamsError
from athanor.base.work import Facts, MapShards
from athanor.cleaning import deciding, groups, near, repeats, rules, validation, writing
from athanor.cleaning.funnel import IN, NORMALISED, OUT, REDACTED, Funnel
from athanor.cleaning.groups import Group, Rows, Shard
from athanor.cleaning.measuring import Tools, load_tools, measure_shard
from athanor.cleaning.params import CleanParams
from athanor.words.decontaminate import ItemIndex


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
    work = work.absolute()
    search = Search(work, _groups(names, measured, measures), map_shards, sizes)
    _, index, _ = load_tools(tools)
    decided, contaminated = search.run(ranks, index, params)
    sample = deciding.sample_of(search.corpus, params.dedup.duplicate_check_documents)
    pieces = validation.sample_index(search.corpus, search.groups, sample, map_shards)
    tasks = {
        shard.name: {**_write_task(shard, group), "work": work, "tools": tools, "sample": pieces}
        for group in search.groups
        for shard in group.shards
    }
    written = map_shards(writing.write_shard, tasks, work / "written", desc="write and check", sizes=sizes)
    funnel = funnel_of(search.groups, measured, decided, written)
    funnel.check()
    observed = (writing.Observed.load(work / "written" / name, written[name]["observed"]) for name in tasks)
    duplicates = _duplicates(work, list(tasks), sum(funnel.of(source, OUT)[0] for source in names), map_shards)
    facts = writing.run_gates(observed, duplicates, sample.tolist(), params, index)
    categories = Counter(index.items[item].category for item in contaminated)
    contaminated_items = Counter(index.items[item].id for item in contaminated)
    report = {
        "contaminated": {
            "documents": len(contaminated),
            "items": len(contaminated_items),
            "by_category": {name: categories[name] for name in sorted({item.category for item in index.items})},
            "ngrams_shared_by_items": index.shared_ngrams,
        },
        "redactions": {
            source: dict(sorted(sum((Counter(measured[n]["redactions"]) for n in shard_names), Counter()).items()))
            for source, shard_names in names.items()
        },
        **facts,
    }
    folders = {source: [work / "written" / name for name in shard_names] for source, shard_names in names.items()}
    scores = {source: _summed(written[name]["scores"] for name in shard_names) for source, shard_names in names.items()}
    return Cleaned(folders, _counts(written, names), funnel, dict(sorted(contaminated_items.items())), scores, report)


def source_ranks(names: Mapping[str, Any], params: CleanParams) -> dict[str, int]:
    """Rank of each source, 0 the best: those of `source_priority`, then the rest by name."""
    for priority_source in params.source_priority:
        if priority_source not in names:
            fix = f"use some of: {', '.join(sorted(names))}"
            raise ParamsError(f"no source is named '{priority_source}'", where="clean.source_priority", fix=fix)
    ordered = [*params.source_priority, *(name for name in sorted(names) if name not in params.source_priority)]
    return {name: rank for rank, name in enumerate(ordered)}


def _groups(names: Mapping[str, Sequence[str]], measured: Mapping[str, Facts], measures: Path) -> list[Group]:
    shards, row = [], 0
    for source, shard_names in names.items():
        for number, name in enumerate(shard_names):
            documents = measured[name]["documents"]
            shards.append(Shard(source, number, measures / name, row, row + documents))
            row += documents
    return groups.grouped(shards)


@dataclass(frozen=True)
class Search:
    """The decisions that need more than one document, in the folder `work`. `sizes`: bytes of text by shard."""

    work: Path
    groups: Sequence[Group]
    map_shards: MapShards
    sizes: Mapping[str, int]

    @property
    def corpus(self) -> Rows:
        return Rows(self.work)

    def run(
        self, ranks: Mapping[str, int], index: ItemIndex, params: CleanParams
    ) -> tuple[Mapping[str, Facts], list[int]]:
        """Decide about every document; returns the facts of `deciding.decide`, and the item that each contaminated one holds.

        Validation ranks first among copies, then source, length and id decide. Items are searched for in what is left.
        """
        corpus = groups.save_starts(self.work, self.groups)
        sizes = groups.by_group(self.groups, self.sizes)
        judged = {group.name: groups.judge_task(group, ranks, params.rules) for group in self.groups}
        kept = self.map_shards(groups.judge, judged, self.work / groups.JUDGED, desc="apply the rules", sizes=sizes)
        bits = repeats.bits_for(sum(kept[name]["kept"] for name in judged), repeats.PART_IDS)
        parts = {f"{part:05d}": {"work": self.work, "part": part, "bits": bits} for part in range(1 << bits)}
        self.map_shards(repeats.drop_repeats, parts, self.work / repeats.EXACT_STEP, desc="equal texts")
        threshold = params.dedup.near_duplicate_jaccard
        state = near.find(corpus, self.groups, len(parts), threshold, self.map_shards, sizes)
        validated = validation.near_validation(corpus, self.groups, state, threshold, self.map_shards, self.sizes)
        hits = deciding.hits_of_kept(corpus, self.groups, state, validated)
        items = index.resolve(hits, max_ngram_documents=params.decontamination.max_ngram_documents)
        np.save(self.work / "items.npy", np.array(sorted(items.items()), np.int64).reshape(-1, 2).T)
        shared = {
            "work": self.work,
            "exact_parts": len(parts),
            "state": state,
            "validated": validated,
            "items": self.work / "items.npy",
            "sample": params.dedup.duplicate_check_documents,
        }
        tasks = {
            group.name: {**near.group_task(group), "names": [shard.name for shard in group.shards], **shared}
            for group in self.groups
        }
        decided = self.map_shards(deciding.decide, tasks, self.work / deciding.DECIDED, desc="decide", sizes=sizes)
        return decided, list(items.values())


def _write_task(shard: Shard, group: Group) -> Facts:
    origin = {"source": shard.source, "number": shard.number, "start": shard.start, "stop": shard.stop}
    return {"shard": shard.folder.absolute(), "group": group.number, **origin}


def _duplicates(work: Path, names: Sequence[str], documents: int, map_shards: MapShards) -> int:
    """How many of the written documents are equal to another one, by the files alone."""
    folders = work / "written.txt"
    folders.write_text("\n".join(names), encoding="utf-8")
    bits = repeats.bits_for(documents, repeats.PART_IDS)
    shared = {"folders": folders, "written": work / "written", "bits": bits}
    tasks = {f"{part:05d}": {**shared, "part": part} for part in range(1 << bits)}
    found = map_shards(repeats.count_repeats, tasks, work / "repeats", desc="compare ids")
    return sum(found[name]["repeats"] for name in tasks)


def funnel_of(
    groups: Sequence[Group], measured: Mapping[str, Facts], decided: Mapping[str, Facts], written: Mapping[str, Facts]
) -> Funnel:
    """Count what came in and was dropped from the decisions, and what went out from the written files."""
    funnel = Funnel()
    for group in groups:
        reasons = decided[group.name]["shards"]
        for shard in group.shards:
            facts, source = measured[shard.name], shard.source
            funnel.add(source, IN, facts["documents_in"], facts["bytes_in"])
            funnel.add(source, NORMALISED, 0, facts["bytes_normalised"])
            funnel.add(source, REDACTED, 0, facts["bytes_redacted"])
            for long_document in facts["too_long"]:
                funnel.add(source, rules.TOO_LONG, 1, long_document["bytes"])
            expected = reasons[shard.name].get("", [0, 0])
            for rule, (documents, size) in reasons[shard.name].items():
                if rule:
                    funnel.add(source, rule, documents, size)
            rows = written[shard.name]["counts"].values()
            on_disk = [sum(row["documents"] for row in rows), sum(row["bytes"] for row in rows)]
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
        for name in shard_names:
            for split, row in written[name]["counts"].items():
                before = counts[split].get(source, {})
                counts[split][source] = {key: before.get(key, 0) + row[key] for key in ("documents", "bytes")}
    return counts


def _summed(histograms: Iterator[Mapping[str, Mapping[str, list[int]]]]) -> dict[str, dict[str, list[int]]]:
    """The sums of histograms, each by score and outcome."""
    total: dict[str, dict[str, np.ndarray]] = {}
    for histogram in histograms:
        for score, outcomes in histogram.items():
            for outcome, counts in outcomes.items():
                by_outcome = total.setdefault(score, {})
                by_outcome[outcome] = by_outcome.get(outcome, 0) + np.array(counts)
    return {score: {outcome: counts.tolist() for outcome, counts in row.items()} for score, row in total.items()}

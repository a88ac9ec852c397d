"""Cleaning a corpus: every document is swept on its own, then duplicates and evaluation items are settled for all.

`sweep` is a pure function of one shard of documents, so shards can be swept
anywhere and in any order. `settle` is the one global step; it sees signatures,
hits and ranks and takes the same decisions whatever the order of the shards.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from athanor.corpus import dedup, minhash, rules
from athanor.corpus.audit import audit
from athanor.corpus.conversations import Item
from athanor.corpus.decontaminate import Hits, ItemIndex
from athanor.corpus.documents import Document
from athanor.corpus.funnel import IN, NORMALISED, OUT, Funnel
from athanor.corpus.normalise import indents, misread_count, normalise
from athanor.corpus.words import shingles, tokenise
from athanor.errors import GateError, ParamsError
from athanor.params.clean import CleanParams

BATCH_BYTES = 1_000_000

EXACT, NEAR = "exact_duplicate", "near_duplicate"
EXACT_VAL, NEAR_VAL = "exact_duplicate_of_val", "near_duplicate_of_val"
ITEM = "evaluation_item"


@dataclass(frozen=True)
class Drop:
    """A document that did not make it. `id` is its id in data/raw; `detail` what was measured, or the other's id."""

    id: str
    source: str
    rule: str
    detail: str
    bytes: int


@dataclass(frozen=True)
class Kept:
    """A document that passed the rules, with what the global step needs to know of it."""

    document: Document
    raw_id: str
    order: int  # place in its source
    bytes: int
    signature: np.ndarray  # uint32 [128]
    hits: Hits


@dataclass(frozen=True)
class Swept:
    kept: list[Kept]
    drops: list[Drop]
    funnel: Funnel


@dataclass(frozen=True)
class Cleaned:
    train: list[Document]
    val: list[Document]
    drops: list[Drop]  # sorted by source, rule, id
    funnel: Funnel
    report: dict[str, Any]  # deterministic facts for the metrics


def item_index(items: Iterable[Item], params: CleanParams) -> ItemIndex:
    settings = params.decontamination
    return ItemIndex.from_items(
        items,
        ngram_words=settings.ngram_words,
        max_ngram_items=settings.max_ngram_items,
        fact_categories=settings.fact_categories,
    )


def clean(
    sources: Mapping[str, Iterable[Document]], items: Iterable[Item], params: CleanParams,
    tick: Callable[[int], None] = lambda size: None,
) -> Cleaned:
    """Clean all sources; `tick` is called with the bytes of each batch as it is swept.

    GateError when a check on the result fails, among them: a source with
    nothing left, counts that do not add up, duplicates above the limit.
    """
    index = item_index(items, params)
    swept = {name: sweep(documents, params, index, tick) for name, documents in sorted(sources.items())}
    cleaned = settle(swept, params, index)
    cleaned.funnel.check()
    facts = audit(cleaned.train, cleaned.val, params, index)
    return replace(cleaned, report={**cleaned.report, **facts})


def sweep(
    documents: Iterable[Document], params: CleanParams, index: ItemIndex,
    tick: Callable[[int], None] = lambda size: None,
) -> Swept:
    """Normalise, apply the rules and compute what the global step needs, for one shard of one source.

    Memory is bounded by the documents themselves and one batch of about 60 MB,
    or 60 times the largest document that its kind's `max_bytes` allows.
    """
    result = Swept([], [], Funnel())
    for batch in _batches(_normalised(documents, params, result), tick):
        texts = [document.text for document, _, _, _ in batch]
        tokens = tokenise(texts)
        columns = rules.measure(texts, tokens)
        signatures = minhash.signatures(shingles(tokens.words, minhash.SHINGLE_WORDS))
        hits = index.scan(texts, tokens, prompts_alone=False)
        for number, (document, raw_id, order, size) in enumerate(batch):
            failed = rules.verdict(columns, number, getattr(params.rules, document.kind))
            if failed:
                _drop(result, raw_id, document.source, failed[0], f"{failed[1]:.6g}", size)
            else:
                result.kept.append(Kept(document, raw_id, order, size, signatures[number].copy(), hits[number]))
    return result


def _normalised(
    documents: Iterable[Document], params: CleanParams, result: Swept
) -> Iterator[tuple[Document, str, int, int]]:
    """(document, raw id, place, bytes) after normalisation; a document that is too long goes before any other work."""
    for order, raw in enumerate(documents):
        before = len(raw.text.encode())
        result.funnel.add(raw.source, IN, 1, before)
        if before > getattr(params.rules, raw.kind).max_bytes:
            _drop(result, raw.id, raw.source, rules.TOO_LONG, str(before), before)
            continue
        text = normalise(raw.text, raw.kind)
        size = before
        document, raw_id = raw, raw.id
        if text != raw.text:
            size = len(text.encode())
            document = replace(raw, text=text, meta={**raw.meta, "raw_id": raw_id})
            if raw.kind == "code":
                check_indents(raw.text, text, f"document {raw_id} of source {raw.source}")
        result.funnel.add(raw.source, NORMALISED, 0, before - size)
        yield document, raw_id, order, size


def check_indents(before: str, after: str, where: str) -> None:
    """GateError when a line of `after` begins with other white space than the line of `before` it came from."""
    lines = before.replace("\r\n", "\n").replace("\r", "\n")
    visible = "".join(char for char in lines if char in "\n\t" or unicodedata.category(char) != "Cc").lstrip("\ufeff")
    if indents(visible) != indents(after):
        raise GateError("code keeps its indents", "normalisation changed the beginning of a line", where=where)


def _drop(result: Swept, raw_id: str, source: str, rule: str, detail: str, size: int) -> None:
    result.drops.append(Drop(raw_id, source, rule, detail, size))
    result.funnel.add(source, rule, 1, size)


def _batches(
    documents: Iterable[tuple[Document, str, int, int]], tick: Callable[[int], None]
) -> Iterator[list[tuple[Document, str, int, int]]]:
    batch: list[tuple[Document, str, int, int]] = []
    size = 0
    for row in documents:
        if batch and size + row[3] > BATCH_BYTES:
            yield batch
            tick(size)
            batch, size = [], 0
        batch.append(row)
        size += row[3]
    if batch:
        yield batch
        tick(size)


def source_ranks(names: Iterable[str], params: CleanParams) -> dict[str, int]:
    """Rank of each source, 0 the best: those of `source_priority`, then the rest by name."""
    names = sorted(names)
    for wanted in params.source_priority:
        if wanted not in names:
            raise ParamsError(
                f"no source is named '{wanted}'", where="clean.source_priority", fix=f"use some of: {', '.join(names)}"
            )
    ordered = [*params.source_priority, *(name for name in names if name not in params.source_priority)]
    return {name: rank for rank, name in enumerate(ordered)}


def settle(swept: Mapping[str, Swept], params: CleanParams, index: ItemIndex) -> Cleaned:
    """Remove duplicates, then evaluation items, and put together what is left."""
    ranks = source_ranks(swept, params)
    everything = (row for shard in swept.values() for row in shard.kept)
    kept = sorted(everything, key=lambda row: (ranks[row.document.source], row.order))
    drops = [drop for shard in swept.values() for drop in shard.drops]
    funnel = Funnel()
    for shard in swept.values():
        funnel.merge(shard.funnel)
    shingle_sets = _ShingleSets(kept)
    gone: dict[int, tuple[str, str]] = {}
    _settle_duplicates(kept, ranks, shingle_sets, params, gone)
    left = [number for number in range(len(kept)) if number not in gone]
    found = index.resolve(
        [kept[number].hits for number in left], max_ngram_documents=params.decontamination.max_ngram_documents
    )
    leaked: Counter[str] = Counter()
    touched: set[int] = set()
    for number, item in zip(left, found, strict=True):
        if item is not None:
            gone[number] = (ITEM, index.items[item].id)
            leaked[index.items[item].category] += 1
            touched.add(item)
    for number, (rule, detail) in gone.items():
        row = kept[number]
        drops.append(Drop(row.raw_id, row.document.source, rule, detail, row.bytes))
        funnel.add(row.document.source, rule, 1, row.bytes)
    remaining = [kept[number] for number in range(len(kept)) if number not in gone]
    for row in remaining:
        funnel.add(row.document.source, OUT, 1, row.bytes)
    report = {
        "contaminated": {
            "documents": sum(leaked.values()),
            "items": len(touched),
            "by_category": {name: leaked[name] for name in sorted({item.category for item in index.items})},
            "ngrams_shared_by_items": index.shared_ngrams,
        },
        "misread_characters": sum(misread_count(row.document.text) for row in remaining if row.document.kind != "code"),
    }
    return Cleaned(
        [row.document for row in remaining if row.document.split == "train"],
        [row.document for row in remaining if row.document.split == "val"],
        sorted(drops, key=lambda drop: (drop.source, drop.rule, drop.id, drop.detail)),
        funnel,
        report,
    )


def _settle_duplicates(
    kept: Sequence[Kept], ranks: Mapping[str, int], shingle_sets: _ShingleSets, params: CleanParams,
    gone: dict[int, tuple[str, str]],
) -> None:
    """Add to `gone` every document that repeats a better one: validation first, then source, length, id."""

    def worth(number: int) -> tuple[Any, ...]:
        document = kept[number].document
        meta = json.dumps(document.meta, sort_keys=True)
        return document.split != "val", ranks[document.source], -kept[number].bytes, document.id, document.license, meta

    def repeats(found: Mapping[int, int], plain: str, of_val: str) -> None:
        for number, other in found.items():
            crossing = (kept[number].document.split, kept[other].document.split) == ("train", "val")
            gone[number] = (of_val if crossing else plain, kept[other].raw_id)

    threshold = params.dedup.near_duplicate_jaccard
    ranked = sorted(range(len(kept)), key=worth)
    repeats(dedup.exact_duplicates([row.document.id for row in kept], ranked), EXACT, EXACT_VAL)
    ranked = [number for number in ranked if number not in gone]
    if not ranked:
        return
    signatures = np.stack([row.signature for row in kept])
    repeats(dedup.near_duplicates(signatures, ranked, shingle_sets, threshold), NEAR, NEAR_VAL)
    # Banding misses one pair in twenty at the threshold. Between training and validation none may be missed.
    val = [number for number in ranked if number not in gone and kept[number].document.split == "val"]
    texts = ((n, kept[n].document.text) for n in ranked if n not in gone and kept[n].document.split == "train")
    found = dedup.resembling(val, [shingle_sets(n) for n in val], dedup.shingle_sets(texts), threshold)
    repeats(found, NEAR, NEAR_VAL)


class _ShingleSets:
    """The sorted shingle set of a document, made when asked for; the latest few thousand are remembered."""

    def __init__(self, kept: Sequence[Kept], remembered: int = 4096) -> None:
        self._kept, self._remembered = kept, remembered
        self._sets: dict[int, np.ndarray] = {}

    def __call__(self, number: int) -> np.ndarray:
        if number not in self._sets:
            if len(self._sets) >= self._remembered:
                self._sets.clear()
            self._sets |= dedup.shingle_sets([(number, self._kept[number].document.text)])
        return self._sets[number]

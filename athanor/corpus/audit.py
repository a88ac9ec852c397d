"""Checks on the cleaned documents as they were written, made without what the cleaning remembered of them.

`look` is done shard by shard on the files, `judge` takes what was seen of all
of them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from athanor.corpus import dedup, minhash
from athanor.corpus.decontaminate import Hits, ItemIndex
from athanor.corpus.documents import Document
from athanor.corpus.normalise import misread_count
from athanor.corpus.rules import consecutive
from athanor.corpus.words import Tokens, shingles, tokenise
from athanor.errors import GateError
from athanor.params.clean import CleanParams

MAX_CONSECUTIVE_REPEATS = 31
BATCH_CHARS = 1_000_000


@dataclass
class Seen:
    """What was seen of some documents: most repeats in a row, hits of each document with any, ids, near copies."""

    repeats: int
    hits: list[tuple[str, Hits]]  # which document, what it holds of evaluation items
    ids: np.ndarray  # uint64 [documents, 2]
    copies: dict[int, int]  # document that nearly equals a sampled one -> that one
    misread: int


def look(documents: Iterable[tuple[int, Document]], index: ItemIndex, sample: dedup.Index, threshold: float) -> Seen:
    """Read numbered documents; GateError for one that repeats itself too often."""
    seen = Seen(0, [], np.zeros((0, 2), np.uint64), {}, 0)
    ids: list[bytes] = []
    for batch in _batches(documents):
        texts = [document.text for _, document in batch]
        tokens = tokenise(texts)
        _check_repeats(batch, tokens, seen)
        for (_, document), hit in zip(batch, index.scan(texts, tokens, prompts_alone=False), strict=True):
            if hit.whole >= 0 or len(hit.ngrams) or len(hit.families):
                seen.hits.append((f"document {document.id} of source {document.source}", hit))
        grams = shingles(tokens.words, minhash.SHINGLE_WORDS)
        sets = ((number, np.unique(grams.of(place))) for place, (number, _) in enumerate(batch))
        seen.copies |= sample.find(sets, threshold)
        ids += [bytes.fromhex(document.id) for _, document in batch]
        seen.misread += sum(misread_count(document.text) for _, document in batch if document.kind != "code")
    seen.ids = np.frombuffer(b"".join(ids), np.uint64).reshape(-1, 2)  # compared only, so byte order does not matter
    return seen


def _check_repeats(batch: Sequence[tuple[int, Document]], tokens: Tokens, seen: Seen) -> None:
    repeats = consecutive(tokens)
    seen.repeats = max(seen.repeats, int(repeats.max()))
    if seen.repeats > MAX_CONSECUTIVE_REPEATS:
        worst = batch[int(repeats.argmax())][1]
        raise GateError(
            "no long repetition",
            f"an n-gram occurs {seen.repeats} times in a row, {MAX_CONSECUTIVE_REPEATS} are allowed",
            where=f"document {worst.id} of source {worst.source}",
            fix="this is a bug in the clean stage; report it with the document",
        )


def _batches(documents: Iterable[tuple[int, Document]]) -> Iterable[list[tuple[int, Document]]]:
    batch: list[tuple[int, Document]] = []
    size = 0
    for number, document in documents:
        batch.append((number, document))
        size += len(document.text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def judge(parts: Iterable[Seen], sampled: Iterable[int], params: CleanParams, index: ItemIndex) -> dict[str, Any]:
    """Facts for the metrics; GateError when the documents break a promise of the clean stage.

    `sampled` are the numbers of the documents in the sample's index.
    """
    parts = list(parts)
    held = [pair for part in parts for pair in part.hits]
    found = index.resolve([hit for _, hit in held], max_ngram_documents=params.decontamination.max_ngram_documents)
    for (where, _), item in zip(held, found, strict=True):
        if item is not None:
            raise GateError(
                "no evaluation item",
                f"item {index.items[item].id} of category {index.items[item].category} is still in the text",
                where=where,
                fix="this is a bug in the clean stage; report it with the document",
            )
    _check_distinct(np.concatenate([np.zeros((0, 2), np.uint64), *(part.ids for part in parts)]))
    copies = {number: twin for part in parts for number, twin in part.copies.items()}
    return {
        "consecutive_repeats_max": max((part.repeats for part in parts), default=0),
        "misread_characters": sum(part.misread for part in parts),
        "duplicates": _check_rate(copies, set(sampled), params),
    }


def _check_distinct(ids: np.ndarray) -> None:
    order = np.lexsort((ids[:, 1], ids[:, 0]))
    again = int((ids[order[1:]] == ids[order[:-1]]).all(axis=1).sum())
    if again:
        raise GateError("no duplicates", f"{again} documents equal another one", where="data/clean")


def _check_rate(copies: dict[int, int], sample: set[int], params: CleanParams) -> dict[str, Any]:
    """`copies` name documents that resemble a sampled one; what counts is how many sampled ones are resembled."""
    twins = set(copies.values()) | (set(copies) & sample)
    rate = len(twins) / len(sample) if sample else 0.0
    if rate > params.dedup.max_duplicate_fraction:
        raise GateError(
            "duplicate rate",
            f"{len(twins)} of {len(sample)} sampled documents have a near copy, "
            f"{params.dedup.max_duplicate_fraction:.2%} are allowed",
            where="data/clean",
            fix="look at the copies; raise clean.dedup.max_duplicate_fraction if you accept them",
        )
    return {"checked": len(sample), "found": len(twins), "fraction": rate}

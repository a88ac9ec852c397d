"""Checks on the cleaned documents themselves, made without what the cleaning remembered of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from athanor.corpus import dedup
from athanor.corpus.decontaminate import ItemIndex, batches
from athanor.corpus.documents import Document
from athanor.corpus.rules import consecutive
from athanor.corpus.words import tokenise
from athanor.errors import GateError
from athanor.params.clean import CleanParams

MAX_CONSECUTIVE_REPEATS = 31


def audit(train: Sequence[Document], val: Sequence[Document], params: CleanParams, index: ItemIndex) -> dict[str, Any]:
    """Facts for the metrics; GateError when the documents break a promise of the clean stage."""
    documents = [*train, *val]
    texts = [document.text for document in documents]
    most, hits = 0, []
    for batch in batches(texts):
        tokens = tokenise(batch)
        repeats = consecutive(tokens)
        if repeats.max() > MAX_CONSECUTIVE_REPEATS:
            worst = documents[len(hits) + int(repeats.argmax())]
            raise GateError(
                "no long repetition",
                f"an n-gram occurs {repeats.max()} times in a row, {MAX_CONSECUTIVE_REPEATS} are allowed",
                where=f"document {worst.id} of source {worst.source}",
                fix="this is a bug in the clean stage; report it with the document",
            )
        most = max(most, int(repeats.max()))
        hits += index.scan(batch, tokens, prompts_alone=False)
    _check_items(documents, hits, params, index)
    return {"consecutive_repeats_max": most, **measure_duplicates(documents, len(train), params)}


def _check_items(documents: Sequence[Document], hits: list[Any], params: CleanParams, index: ItemIndex) -> None:
    found = index.resolve(hits, max_ngram_documents=params.decontamination.max_ngram_documents)
    for document, item in zip(documents, found, strict=True):
        if item is not None:
            raise GateError(
                "no evaluation item",
                f"item {index.items[item].id} of category {index.items[item].category} is still in the text",
                where=f"document {document.id} of source {document.source}",
                fix="this is a bug in the clean stage; report it with the document",
            )


def measure_duplicates(documents: Sequence[Document], train: int, params: CleanParams) -> dict[str, Any]:
    """Duplicate rate of a sample against all documents, exhaustively; the first `train` documents are training.

    The sample is the documents with the smallest content hashes, which is as
    good as random and independent of order. GateError above the allowed rate,
    or when equal texts are left.
    """
    ids = [document.id for document in documents]
    settings = params.dedup
    if len(set(ids)) < len(ids):
        raise GateError("no duplicates", f"{len(ids) - len(set(ids))} documents equal another one", where="data/clean")
    sample = sorted(range(len(ids)), key=ids.__getitem__)[: settings.duplicate_check_documents]
    sets = dict(dedup.shingle_sets((number, documents[number].text) for number in sample))
    everything = dedup.shingle_sets((number, document.text) for number, document in enumerate(documents))
    found = dedup.resembling(sample, [sets[n] for n in sample], everything, settings.near_duplicate_jaccard)
    # `found` names documents that resemble a sampled one; what counts is how many sampled ones are resembled.
    twins = set(found.values()) | (set(found) & set(sample))
    rate = len(twins) / len(sample) if sample else 0.0
    if rate > settings.max_duplicate_fraction:
        raise GateError(
            "duplicate rate",
            f"{len(twins)} of {len(sample)} sampled documents have a near copy, "
            f"{settings.max_duplicate_fraction:.2%} are allowed",
            where="data/clean",
            fix="look at the copies; raise clean.dedup.max_duplicate_fraction if you accept them",
        )
    return {"duplicates": {"checked": len(sample), "found": len(twins), "fraction": rate}}

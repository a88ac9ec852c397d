"""Normalise, redact, measure and score the documents of one shard, each on its own.

What is written depends on no threshold and on no other document. So shards can
be measured anywhere and in any order, and a changed threshold finds the work
done. A measured shard is a folder:

    documents.parquet   the documents as they would leave the stage
    measures.parquet    one row for each of them: where it came from, every measure of `rules`, the scores
    signatures.npy      uint32 [documents, permutations]
    hits.npz            what of the evaluation items each holds
"""

from __future__ import annotations

import functools
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from athanor.base.errors import GateError
from athanor.base.work import Facts
from athanor.cleaning import minhash, pii, rules
from athanor.cleaning.normalise import indents, normalise
from athanor.cleaning.params import CleanParams
from athanor.quality.model import Scorer
from athanor.text.documents import Document, DocumentWriter, hash64, in_batches, read_documents
from athanor.words.decontaminate import Hits, ItemIndex
from athanor.words.words import Columns, concatenated, shingles, tokenise

BATCH_BYTES = 1_000_000
DOCUMENTS, MEASURES, SIGNATURES = "documents.parquet", "measures.parquet", "signatures.npy"
HITS = "hits.npz"
# Columns of measures.parquet that say which document it is.
PROVENANCE_COLUMNS = {
    "id": pa.binary(16), "raw_id": pa.binary(16), "tie": pa.uint64(), "place": pa.int32(), "bytes": pa.int64(),
    "val": pa.bool_(), "kind": pa.string(),
}  # fmt: skip
SCORES = ("quality", "quality_classifier", "quality_heuristics", "toxicity")


class Row(NamedTuple):
    """A normalised and redacted document, with its id and row number in data/raw and its size in bytes now."""

    document: Document
    raw_id: str
    row_number: int
    bytes: int


def settings_of(params: CleanParams) -> Facts:
    """The parameters that measuring reads, as JSON. Thresholds are not among them, except `max_bytes`."""
    decontamination = params.decontamination
    return {
        "max_bytes": {kind: kind_rules["max_bytes"] for kind, kind_rules in asdict(params.rules).items()},
        "pii": asdict(params.pii),
        "items": {
            "ngram_words": decontamination.ngram_words,
            "max_ngram_items": decontamination.max_ngram_items,
            "fact_categories": list(decontamination.fact_categories),
        },
    }


@dataclass(frozen=True)
class Tools:
    """What a shard is measured with: parameters, the battery's items, the folder of the classifiers; absolute paths."""

    params: CleanParams
    items: Path
    classifiers: Path


@functools.lru_cache(maxsize=1)
def load_tools(tools: Tools) -> tuple[CleanParams, ItemIndex, Scorer]:
    """Load what the tools name, once in each process."""
    index = ItemIndex.read(tools.items, tools.params.decontamination)
    return tools.params, index, Scorer.load(tools.classifiers)


def measure_shard(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: measure `task["shard"]`; facts: documents and bytes in and out, redactions, what was too long."""
    return measure_documents(read_documents(task["shard"]), *load_tools(task["tools"]), out)


def measure_documents(
    documents: Iterable[Document], params: CleanParams, index: ItemIndex, scorer: Scorer, out: Path
) -> Facts:
    """Measure documents into the folder `out`.

    Memory is bounded by one batch of about 100 MB, or 60 times the largest
    document that its kind's `max_bytes` allows, and 700 bytes for each
    document of the shard.
    """
    count_names = ("documents_in", "bytes_in", "bytes_normalised", "bytes_redacted")
    facts: Facts = {**dict.fromkeys(count_names, 0), "too_long": []}
    redactions: Counter[str] = Counter()
    measured_count = 0
    signatures: list[np.ndarray] = []
    measures: list[pa.Table] = []
    hits: list[tuple[int, Hits]] = []
    with DocumentWriter(out / DOCUMENTS) as writer:
        rows = _prepared(documents, params, facts, redactions)
        for batch in in_batches(rows, lambda row: row.bytes, BATCH_BYTES):
            texts = [row.document.text for row in batch]
            tokens = tokenise(texts)
            columns = rules.measure(texts, tokens)
            columns |= scorer.scores(texts, tokens, columns)
            hits += [
                (number, hit)
                for number, hit in enumerate(index.scan(texts, tokens, prompts_alone=False), measured_count)
                if hit
            ]
            signatures.append(minhash.signatures(shingles(tokens.words, minhash.SHINGLE_WORDS)))
            measures.append(_table(batch, columns))
            measured_count += len(batch)
            for row in batch:
                writer.add(row.document)
    measures_table = pa.concat_tables(measures or [_table([], {})])
    pq.write_table(measures_table, out / MEASURES, compression="zstd", compression_level=1)
    sketches = concatenated(signatures, np.uint32, minhash.PERMUTATIONS)
    np.save(out / SIGNATURES, sketches)
    save_hits(out / HITS, hits)
    return {**facts, "documents": len(sketches), "redactions": dict(sorted(redactions.items()))}


def _prepared(
    documents: Iterable[Document], params: CleanParams, facts: Facts, redactions: Counter[str]
) -> Iterator[Row]:
    """Normalise and redact the documents; those that are too long are left out first."""
    for row_number, raw in enumerate(documents):
        raw_id, raw_bytes = raw.id, len(raw.text.encode())
        facts["documents_in"] += 1
        facts["bytes_in"] += raw_bytes
        if raw_bytes > getattr(params.rules, raw.kind).max_bytes:
            facts["too_long"].append({"id": raw_id, "row": row_number, "bytes": raw_bytes, "kind": raw.kind})
            continue
        normal = normalise(raw.text, raw.kind)
        if normal != raw.text and raw.kind == "code":
            check_indents(raw.text, normal, f"document {raw_id} of source {raw.source}")
        text, replacements = pii.redact(normal, getattr(params.pii, raw.kind))
        redactions.update(replacements)
        document, size = raw, raw_bytes
        if text != raw.text:
            normalised_bytes, size = len(normal.encode()), len(text.encode())
            facts["bytes_normalised"] += raw_bytes - normalised_bytes
            facts["bytes_redacted"] += normalised_bytes - size
            document = replace(raw, text=text, meta={**raw.meta, "raw_id": raw_id})
        yield Row(document, raw_id, row_number, size)


def check_indents(before: str, after: str, where: str) -> None:
    """GateError when a line of `after` begins with other white space than the line of `before` it came from."""
    lines = before.replace("\r\n", "\n").replace("\r", "\n")
    visible = "".join(char for char in lines if char in "\n\t" or unicodedata.category(char) != "Cc").lstrip("\ufeff")
    if indents(visible) != indents(after):
        raise GateError("code keeps its indents", "normalisation changed the beginning of a line", where=where)


def _table(batch: Sequence[Row], columns: Columns) -> pa.Table:
    """Rows of measures.parquet: PROVENANCE_COLUMNS, then the measured columns."""
    rows = [
        (bytes.fromhex(d.id), bytes.fromhex(raw_id), _tie(d), row_number, size, d.split == "val", d.kind)
        for d, raw_id, row_number, size in batch
    ]
    provenance = {
        name: pa.array([row[number] for row in rows], kind)
        for number, (name, kind) in enumerate(PROVENANCE_COLUMNS.items())
    }
    measured = {name: pa.array(np.asarray(values, np.float64)) for name, values in sorted(columns.items())}
    return pa.table({**provenance, **measured})


def _tie(document: Document) -> int:
    """A hash that orders equal texts of one source in the same way, whatever order they came in."""
    return hash64(json.dumps([document.license, document.meta], sort_keys=True))


def save_hits(path: Path, numbered: Sequence[tuple[int, Hits]]) -> None:
    """hits.npz: number of each document with any hit, the item it contains from end to end, and lists of n-grams and families."""
    hits = [hit for _, hit in numbered]
    np.savez(
        path,
        number=np.array([number for number, _ in numbered], np.int64),
        whole=np.array([hit.full_match for hit in hits], np.int64),
        ngrams=concatenated((hit.ngrams for hit in hits), np.int64),
        ngram_ends=np.cumsum([len(hit.ngrams) for hit in hits], dtype=np.int64),
        families=concatenated((hit.families for hit in hits), np.int64),
        family_ends=np.cumsum([len(hit.families) for hit in hits], dtype=np.int64),
    )


def read_hits(path: Path) -> tuple[np.ndarray, list[Hits]]:
    """The numbers of the documents with hits, ascending, and the hits of each."""
    with np.load(path, allow_pickle=False) as stored:
        columns = dict(stored)
    ngrams = np.split(columns["ngrams"], columns["ngram_ends"][:-1])
    families = np.split(columns["families"], columns["family_ends"][:-1])
    # Without a document the lists hold one empty part.
    return columns["number"], [Hits(*row) for row in zip(ngrams, families, columns["whole"].tolist(), strict=False)]

"""Bits per byte of held-out documents: which ones, under which model, beside which compressor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from athanor.corpus.documents import Document
from athanor.errors import GateError, InputError
from athanor.evaluation.compression import ALL, Rate, pooled
from athanor.model.transformer import Transformer
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.training.validation import bits_per_byte

# The model has to beat the smaller of these on documents compressed one at a time.
XZ = ("xz", "xz_extreme")


@dataclass(frozen=True)
class HeldOut:
    """A document, or the start of one where the byte budget ended (`whole` False: its end is not scored)."""

    text: str
    whole: bool


def choose(documents: Iterable[Document], max_bytes_per_source: int, seed: int) -> dict[str, list[HeldOut]]:
    """Documents of each source in an order drawn from `seed`, until the budget of UTF-8 bytes is full.

    The draw depends on each document's content and the seed alone. The last
    document is cut to the budget, so that long documents are not left out.
    """
    ranked: dict[str, list[tuple[bytes, str]]] = {}
    for document in documents:
        rank = hashlib.blake2b(f"{seed}:{document.id}".encode(), digest_size=16).digest()
        ranked.setdefault(document.source, []).append((rank, document.text))
    if ALL in ranked:
        raise InputError(f"a source may not be called '{ALL}'", where="download.sources", fix="rename it")
    chosen: dict[str, list[HeldOut]] = {}
    for source in sorted(ranked):
        room, taken = max_bytes_per_source, []
        for _, text in sorted(ranked[source]):
            data = text.encode()
            part = data[:room].decode("utf-8", errors="ignore")  # drops a character that the cut went through
            if part:
                taken.append(HeldOut(part, len(data) <= room))
            room -= len(data)
            if room <= 0:
                break
        if taken:
            chosen[source] = taken
    if not chosen:
        raise InputError("no held-out document", where="data/clean/val.parquet", fix="raise download.val_fraction")
    return chosen


def encode(tokenizer: Tokenizer, held_out: Sequence[HeldOut]) -> list[np.ndarray]:
    """`<|bos|>` + ids (+ `<|eos|>`) of each document; GateError if the ids do not stand for the text's bytes."""
    ids = tokenizer.encode_arrays([document.text for document in held_out])
    rows = []
    for document, array in zip(held_out, ids, strict=True):
        size = len(document.text.encode())
        if int(tokenizer.token_bytes[array].sum()) != size:
            raise GateError(
                "bits per byte", f"ids stand for another number of bytes than the {size} of {document.text[:40]!r}"
            )
        ends = [tokenizer.eos] if document.whole else []
        rows.append(np.concatenate([[tokenizer.bos], array, ends]).astype(np.int64))
    return rows


def model_rates(
    model: Transformer, tokenizer: Tokenizer, documents: Mapping[str, Sequence[np.ndarray]], threads: int = 1
) -> dict[str, Rate]:
    """Rates of one model by source and for "all"; `documents` as made by `encode`."""
    rates = {}
    for source, rows in documents.items():
        found = bits_per_byte(model, rows, tokenizer.token_bytes, model.config.context_tokens, threads=threads)
        rates[source] = Rate(found.bits, found.bytes, found.documents, found.stderr)
    return {**rates, ALL: pooled(list(rates.values()))}


def bpb_facts(models: Mapping[str, Mapping[str, Rate]], tools: Mapping[str, Mapping[str, Rate]]) -> dict[str, Any]:
    """The `bpb` block of the metrics: {"sources": {name: row}, "all": row, "beats_xz": {model: bool}, ...}.

    A row holds every model's figure with its error, every compressor's
    figure, and how much text they are about.
    """
    first = next(iter(models.values()))

    def row(source: str) -> dict[str, Any]:
        return {
            "bytes": first[source].bytes,
            "documents": first[source].documents,
            **{name: {"bpb": rates[source].bpb, "stderr": rates[source].stderr} for name, rates in models.items()},
            **{name: rates[source].bpb for name, rates in tools.items()},
        }

    line = min(tools[name][ALL].bpb for name in XZ)
    return {
        "sources": {source: row(source) for source in first if source != ALL},
        "all": row(ALL),
        "beats_xz": {name: rates[ALL].bpb < line for name, rates in models.items()},
        "margin_to_xz": {name: line - rates[ALL].bpb for name, rates in models.items()},
    }

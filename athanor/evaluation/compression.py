"""Bits per byte of held-out documents: which ones, under which model, beside which compressor.

Each document is compressed on its own, because the model also sees one document at a time. Sizes include the container
(gzip 18 bytes, xz some 60), as the command-line tools write it; `xz_raw` leaves it out and is the harder line where
documents are short. Compressing all documents as one stream lets the compressor learn across documents, which the
model may not: that figure is for information.
"""

from __future__ import annotations

import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from athanor.base.errors import GateError, InputError
from athanor.model.precision import scoring_precision
from athanor.model.transformer import Transformer
from athanor.model.validation import BitsPerByte, bits_per_byte, pooled, ratio_and_error
from athanor.text.documents import Document
from athanor.tokenizer.tokenizer import Tokenizer

ALL = "all"  # the row for all sources together
GZIP_CONTAINER_BYTES = 12  # gzip's header and trailer (18) less zlib's (6), around the same deflate stream


def rate(bits: Sequence[float], sizes: Sequence[int]) -> BitsPerByte:
    """Bits per byte where document i of `sizes[i]` UTF-8 bytes cost `bits[i]`."""
    if not sum(sizes):
        raise InputError("no held-out text to measure", fix="raise val_fraction or add documents")
    ratio, stderr = ratio_and_error(np.array(bits, dtype=np.float64), np.array(sizes, dtype=np.float64))
    return BitsPerByte(float(sum(bits)), int(sum(sizes)), len(sizes), 0, ratio, stderr)


def gzip_bytes(data: bytes) -> int:
    """Size of `gzip -9n < data`."""
    return len(zlib.compress(data, 9)) + GZIP_CONTAINER_BYTES


def xz_bytes(data: bytes, preset: int = 9, *, container: bool = True) -> int:
    """Size of `xz -9 < data` (or another preset).

    The dictionary is no larger than the data needs: same bytes out, without
    the 700 MB and 30 ms that the full 64 MiB dictionary costs per document.
    """
    dictionary = max(4096, 1 << max(0, len(data) - 1).bit_length())
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": min(dictionary, 1 << 26)}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ if container else lzma.FORMAT_RAW, filters=filters))


def xz_extreme_bytes(data: bytes) -> int:
    """Size of `xz -9e < data`; searches longer, which now and then costs a byte."""
    return xz_bytes(data, 9 | lzma.PRESET_EXTREME)


def xz_raw_bytes(data: bytes) -> int:
    """The LZMA2 stream alone."""
    return xz_bytes(data, container=False)


COMPRESSORS: dict[str, Callable[[bytes], int]] = {
    "gzip": gzip_bytes,
    "xz": xz_bytes,
    "xz_extreme": xz_extreme_bytes,
    "xz_raw": xz_raw_bytes,
}


def compression_rates(texts: dict[str, list[str]]) -> dict[str, dict[str, BitsPerByte]]:
    """Rates of every compressor by source and for "all": {"gzip": {"prose": ..., "all": ...}, ...}.

    `texts` maps a source to its documents. The `*_joined` rows compress the
    documents of a source as one stream.
    """
    encoded = {source: [text.encode() for text in texts[source]] for source in sorted(texts)}
    table: dict[str, dict[str, BitsPerByte]] = {}
    for name, size in COMPRESSORS.items():
        by_source = {s: rate([8 * size(d) for d in docs], [len(d) for d in docs]) for s, docs in encoded.items()}
        table[name] = {**by_source, ALL: pooled(by_source)}
    for name, size in (("gzip_joined", gzip_bytes), ("xz_joined", xz_bytes)):
        streams = {source: b"".join(docs) for source, docs in encoded.items()}
        streams[ALL] = b"".join(streams[source] for source in sorted(encoded))
        table[name] = {s: rate([8 * size(data)], [len(data)]) for s, data in streams.items()}
    return table


# The model has to beat the smaller of these on documents compressed one at a time.
XZ = ("xz", "xz_extreme")


@dataclass(frozen=True)
class HeldOut:
    """A document, or the start of one where the byte budget ended (`complete` False: its end is not scored)."""

    text: str
    complete: bool


def choose(documents: Iterable[Document], max_bytes_per_source: int, seed: int) -> dict[str, list[HeldOut]]:
    """Documents of each source in an order drawn from `seed`, until the budget of UTF-8 bytes is full.

    The draw depends on each document's content and the seed alone. The last
    document is cut to the budget, so that long documents are not left out.
    """
    ranked: dict[str, list[tuple[bytes, str]]] = {}
    for document in documents:
        sort_key = hashlib.blake2b(f"{seed}:{document.id}".encode(), digest_size=16).digest()
        ranked.setdefault(document.source, []).append((sort_key, document.text))
    if ALL in ranked:
        raise InputError(f"a source may not be called '{ALL}'", where="download.sources", fix="rename it")
    chosen: dict[str, list[HeldOut]] = {}
    for source in sorted(ranked):
        remaining_bytes, excerpts = max_bytes_per_source, []
        for _, text in sorted(ranked[source]):
            data = text.encode()
            excerpt = data[:remaining_bytes].decode(
                "utf-8", errors="ignore"
            )  # drops a character that the cut went through
            if excerpt:
                excerpts.append(HeldOut(excerpt, len(data) <= remaining_bytes))
            remaining_bytes -= len(data)
            if remaining_bytes <= 0:
                break
        if excerpts:
            chosen[source] = excerpts
    if not chosen:
        raise InputError("no held-out document", where="data/clean/val.parquet", fix="raise download.val_fraction")
    return chosen


def encode(tokenizer: Tokenizer, held_out: Sequence[HeldOut]) -> list[np.ndarray]:
    """`<|bos|>` + ids (+ `<|eos|>`) of each document; GateError if the ids do not stand for the text's bytes."""
    ids = tokenizer.encode_arrays([document.text for document in held_out])
    rows = []
    for document, document_ids in zip(held_out, ids, strict=True):
        size = len(document.text.encode())
        if int(tokenizer.token_bytes[document_ids].sum()) != size:
            raise GateError(
                "bits per byte", f"ids stand for another number of bytes than the {size} of {document.text[:40]!r}"
            )
        end_ids = [tokenizer.eos] if document.complete else []
        rows.append(np.concatenate([[tokenizer.bos], document_ids, end_ids]).astype(np.int64))
    return rows


def model_rates(
    model: Transformer, tokenizer: Tokenizer, documents: Mapping[str, Sequence[np.ndarray]], threads: int = 1
) -> dict[str, BitsPerByte]:
    """Rates of one model by source and for "all"; `documents` as made by `encode`."""
    context, sizes = model.config.context_tokens, tokenizer.token_bytes
    options: dict[str, Any] = {"precision": scoring_precision(model.head_weight.device), "threads": threads}
    rates = {name: bits_per_byte(model, rows, sizes, context, **options) for name, rows in documents.items()}
    return {**rates, ALL: pooled(rates)}


def bpb_facts(
    models: Mapping[str, Mapping[str, BitsPerByte]], tools: Mapping[str, Mapping[str, BitsPerByte]]
) -> dict[str, Any]:
    """The `bpb` block of the metrics: {"sources": {name: row}, "all": row, "beats_xz": {model: bool}, ...}.

    A row holds every model's figure with its error, every compressor's
    figure, and how much text they are about.
    """
    first = next(iter(models.values()))

    def row(source: str) -> dict[str, Any]:
        return {
            "bytes": first[source].bytes,
            "documents": first[source].documents,
            **{
                name: {key: getattr(rates[source], key) for key in ("bpb", "stderr", "each")}
                for name, rates in models.items()
            },
            **{name: rates[source].bpb for name, rates in tools.items()},
        }

    xz_bpb = min(tools[name][ALL].bpb for name in XZ)
    return {
        "sources": {source: row(source) for source in first if source != ALL},
        "all": row(ALL),
        "beats_xz": {name: rates[ALL].bpb < xz_bpb for name, rates in models.items()},
        "margin_to_xz": {name: xz_bpb - rates[ALL].bpb for name, rates in models.items()},
    }

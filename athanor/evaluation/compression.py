"""Bits per byte of held-out documents: which ones, under which model, beside which compressor.

Each document is compressed on its own, because the model also sees one document at a time. Sizes include the container
(gzip 18 bytes, xz some 60), as the command-line tools write it; `xz_raw` leaves it out and is the harder line where
documents are short. Compressing all documents as one stream lets the compressor learn across documents, which the
model may not: that figure is for information.
"""

from __future__ import annotations

import hashlib
import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from athanor.corpus.documents import Document
from athanor.errors import GateError, InputError
from athanor.model.transformer import Transformer
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.training.validation import bits_per_byte

ALL = "all"  # the row for all sources together
GZIP_CONTAINER_BYTES = 12  # gzip's header and trailer (18) less zlib's (6), around the same deflate stream


@dataclass(frozen=True)
class Rate:
    """Bits spent on bytes of text, over documents: a ratio of sums with its standard error."""

    bits: float
    bytes: int
    documents: int
    stderr: float | None  # in bits per byte; None where a single document says nothing about spread

    @property
    def bpb(self) -> float:
        return self.bits / self.bytes


def rate(bits: Sequence[float], sizes: Sequence[int]) -> Rate:
    """Sum of bits over sum of bytes; the error is that of a ratio estimator over documents.

    `bits[i]` is what document i of `sizes[i]` UTF-8 bytes cost. With one
    document there is no estimate of the error.
    """
    if not sizes or sum(sizes) == 0:
        raise InputError("no held-out text to measure", fix="raise val_fraction or add documents")
    total_bits, total_bytes, count = math.fsum(bits), sum(sizes), len(sizes)
    ratio = total_bits / total_bytes
    squares = math.fsum((b - ratio * s) ** 2 for b, s in zip(bits, sizes, strict=True))
    stderr = math.sqrt(squares * count / (count - 1)) / total_bytes if count > 1 else None
    return Rate(total_bits, total_bytes, count, stderr)


def pooled(rates: Sequence[Rate]) -> Rate:
    """All strata together: sums of bits and bytes, errors added as variances."""
    size = sum(part.bytes for part in rates)
    errors = [part.bytes / size * part.stderr for part in rates if part.stderr is not None]
    stderr = math.hypot(*errors) if len(errors) == len(rates) else None
    return Rate(math.fsum(part.bits for part in rates), size, sum(part.documents for part in rates), stderr)


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


def compression_rates(texts: dict[str, list[str]]) -> dict[str, dict[str, Rate]]:
    """Rates of every compressor by source and for "all": {"gzip": {"prose": Rate, ..., "all": Rate}, ...}.

    `texts` maps a source to its documents. The `*_joined` rows compress the
    documents of a source as one stream.
    """
    encoded = {source: [text.encode() for text in texts[source]] for source in sorted(texts)}
    table: dict[str, dict[str, Rate]] = {}
    for name, size in COMPRESSORS.items():
        parts = {s: rate([8 * size(d) for d in docs], [len(d) for d in docs]) for s, docs in encoded.items()}
        table[name] = {**parts, ALL: pooled(list(parts.values()))}
    for name, size in (("gzip_joined", gzip_bytes), ("xz_joined", xz_bytes)):
        streams = {source: b"".join(docs) for source, docs in encoded.items()}
        streams[ALL] = b"".join(streams[source] for source in sorted(encoded))
        table[name] = {s: Rate(8 * size(data), len(data), 1, None) for s, data in streams.items()}
    return table


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

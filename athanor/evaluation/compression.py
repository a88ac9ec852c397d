"""Bits per byte of general-purpose compressors: the line a language model has to beat.

Each document is compressed on its own, because the model also sees one
document at a time. Sizes include the container (gzip 18 bytes, xz some 60),
as the command-line tools write it; `xz_raw` leaves it out and is the harder
line where documents are short. Compressing all documents as one stream lets the compressor
learn across documents, which the model may not: that figure is for information.
"""

from __future__ import annotations

import lzma
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from athanor.errors import InputError

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

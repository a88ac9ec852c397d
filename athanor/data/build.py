"""Build the shards artifact: tokenise by source, mix, write, check what was written, describe it.

Works on an iterable of (source, text) and on any tokenizer with the right
attributes, so that it needs neither Parquet nor SentencePiece.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from athanor.data import shard_gate
from athanor.data.mixture import MixSource, Plan, weights
from athanor.data.shards import ShardWriter, TokenStream, token_dtype

BATCH_CHARS = 1 << 20


class Encoder(Protocol):
    """What is used of a tokenizer."""

    vocab_size: int
    bos: int
    eos: int
    token_bytes: np.ndarray

    def encode_arrays(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]: ...


@dataclass
class Split:
    """What one split holds, by source: token length of each document and bytes of text; and all content hashes."""

    lengths: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    text_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    hashes: set[bytes] = field(default_factory=set)


def tokenise(
    documents: Iterable[tuple[str, str]],
    folder: Path,
    encoder: Encoder,
    shard_tokens: int,
    threads: int,
    progress: Callable[[int], None],
) -> Split:
    """Write (source, text) pairs as `<|bos|>` ids `<|eos|>` into a folder per source, in the given order.

    `progress` is called with characters done; `threads` changes the speed only.
    """
    found = Split()
    writers: dict[str, ShardWriter] = {}
    dtype = token_dtype(encoder.vocab_size)
    bos, eos = np.array([encoder.bos], dtype=np.int32), np.array([encoder.eos], dtype=np.int32)
    for batch in _batches(documents):
        encoded = encoder.encode_arrays([text for _, text in batch], threads)
        for (source, text), ids in zip(batch, encoded, strict=True):
            if source not in writers:
                writers[source] = ShardWriter(folder / source, dtype, shard_tokens, sources=False)
            data = text.encode()
            writers[source].add(np.concatenate([bos, ids, eos]))
            found.lengths[source].append(len(ids) + 2)
            found.text_bytes[source] += len(data)
            found.hashes.add(hashlib.blake2b(data, digest_size=16).digest())
        progress(sum(len(text) for _, text in batch))
    for writer in writers.values():
        writer.close()
    return found


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document[1])
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def write_train(
    folder: Path, spool: Path, sources: Sequence[MixSource], plan: Plan, dtype: np.dtype, shard_tokens: int
) -> None:
    """Gather the planned documents from the per-source folders into the training shards."""
    streams = [TokenStream(spool / source.name, dtype) for source in sources]
    writer = ShardWriter(folder, dtype, shard_tokens, sources=True)
    for source, document in zip(plan.sources.tolist(), plan.documents.tolist(), strict=True):
        writer.add(streams[source].document(document), source)
    writer.close()


def check(folder: Path, sources: Sequence[MixSource], encoder: Encoder, tolerance: float) -> dict[str, Any]:
    """Run the gates on the written files; returns what `shard_gate.check_files` counted in the training shards."""
    dtype = token_dtype(encoder.vocab_size)
    arguments = (dtype, encoder.vocab_size, encoder.bos, encoder.eos)
    facts = shard_gate.check_files(folder / "train", *arguments, len(sources))
    for source in sources:
        shard_gate.check_files(folder / "val" / source.name, *arguments, 1)
    names = [source.name for source in sources]
    shard_gate.check_shares(facts["shards"], names, _targets(sources), tolerance, facts["longest"])
    taken = dict(zip(names, facts["shards"].sum(axis=0).tolist(), strict=True))
    shard_gate.check_epochs(taken, {s.name: s.total for s in sources}, {s.name: s.max_epochs for s in sources})
    return facts


def describe(sources: Sequence[MixSource], train: Split, val: Split, facts: dict[str, Any]) -> dict[str, Any]:
    """Manifest facts of the written stream, counted in the files: totals, and a table per source and split."""
    tokens = facts["shards"].sum(axis=0).tolist()
    total = sum(tokens)
    by_source = {
        source.name: {
            "tokens": taken,
            "documents": int(documents),
            "unique_tokens": source.total,
            "unique_documents": len(source.lengths),
            "text_bytes": train.text_bytes[source.name],
            "bytes_per_token": train.text_bytes[source.name] / (source.total - 2 * len(source.lengths)),
            "epochs": taken / source.total,
            "target_share": target,
            "share": taken / total,
        }
        for source, taken, documents, target in zip(
            sources, tokens, facts["documents"].tolist(), _targets(sources), strict=True
        )
    }
    by_val = {
        source.name: {
            "tokens": sum(val.lengths[source.name]),
            "documents": len(val.lengths[source.name]),
            "text_bytes": val.text_bytes[source.name],
        }
        for source in sources
    }
    return {
        "counts": {
            "tokens": total,
            "documents": int(facts["documents"].sum()),
            "val_tokens": sum(entry["tokens"] for entry in by_val.values()),
            "val_documents": sum(entry["documents"] for entry in by_val.values()),
        },
        "sources": by_source,
        "val": by_val,
    }


def _targets(sources: Sequence[MixSource]) -> list[float]:
    weight = weights(sources)
    return [w / sum(weight) for w in weight]

"""Build the shards artifact from the spool: write a planned stream, check what was written, describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.artifacts import rounded
from athanor.base.files import OpenFiles
from athanor.base.work import Facts, Tick, ignore
from athanor.data.mixture import MixSource, Plan, weights
from athanor.data.shards import TRAIN, ShardWriter, token_dtype
from athanor.sharding import shard_gate
from athanor.sharding.tokenise import Tokens
from athanor.tokenizer.tokenizer import Tokenizer

GATHER_DOCUMENTS = 1 << 14  # documents between two looks at the outside world


@dataclass(frozen=True)
class Target:
    """The artifact's folder, and the settings of everything that is written there."""

    folder: Path
    tokenizer: Tokenizer
    shard_tokens: int
    tolerance: float

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.tokenizer.vocab_size)


@dataclass(frozen=True)
class Stream:
    """A written stream: facts for the manifest, metrics, and int64 [vocab] how often each id occurs in it."""

    facts: Facts
    metrics: Facts
    histogram: np.ndarray


def write_stream(
    target: Target,
    stream_name: str,
    sources: Sequence[MixSource],
    plan: Plan,
    tokens: Mapping[str, Tokens],
    advance: Tick = ignore,
) -> None:
    """Gather the planned documents from the spool into shards; `advance` gets the tokens written since its last call.

    Memory: 8 bytes for each document of the spool, and 50 for each of one shard and of a block.
    """
    files = OpenFiles()
    streams = [tokens[source.name].stream(target.dtype, files) for source in sources]
    writer = ShardWriter(target.folder / stream_name, target.dtype, target.shard_tokens, sources=True)
    for start in range(0, len(plan.sources), GATHER_DOCUMENTS):
        numbers, documents = (
            column[start : start + GATHER_DOCUMENTS].tolist() for column in (plan.sources, plan.documents)
        )
        written = 0
        for source, document in zip(numbers, documents, strict=True):
            ids = streams[source].document(document)
            writer.add(ids, source)
            written += len(ids)
        advance(written)
    writer.close()


def write_val(target: Target, tokens: Mapping[str, Tokens], names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Write and check each source's held-out documents in their own order; returns their counts by source, 0 for none."""
    rows = {}
    for name in names:
        source_tokens = tokens.get(name, Tokens((), np.zeros(0, np.int64), 0))
        total = int(source_tokens.lengths.sum())
        if source_tokens.documents:
            folder = target.folder / "val" / name
            stream = source_tokens.stream(target.dtype)
            writer = ShardWriter(folder, target.dtype, target.shard_tokens, sources=False)
            for number in range(stream.documents):
                writer.add(stream.document(number))
            writer.close()
            file_facts = _check_files(target, folder, 1)
            shard_gate.check_counts({name: int(file_facts["shards"].sum())}, {name: total}, f"val/{name}")
        rows[name] = {"tokens": total, "documents": source_tokens.documents, "text_bytes": source_tokens.text_bytes}
    return rows


def check_stream(
    target: Target,
    stream_name: str,
    sources: Sequence[MixSource],
    plan: Plan,
    tokens: Mapping[str, Tokens],
    requested_tokens: int | None,
) -> Stream:
    """Run the gates on the written files of a stream, and describe it by what is in them."""
    file_facts = _check_files(target, target.folder / stream_name, len(sources))
    names = [source.name for source in sources]
    tokens_by_source = dict(zip(names, file_facts["shards"].sum(axis=0).tolist(), strict=True))
    shard_gate.check_counts(tokens_by_source, dict(zip(names, plan.taken, strict=True)), stream_name)
    shard_gate.check_shares(file_facts["shards"], names, _targets(sources), target.tolerance, file_facts["longest"])
    shard_gate.check_epochs(
        tokens_by_source, {s.name: s.total for s in sources}, {s.name: s.max_epochs for s in sources}
    )
    facts = rounded(_describe(sources, tokens, file_facts))
    metrics = {
        **facts["counts"],
        "sources": facts["sources"],
        "shards": len(file_facts["shards"]),
        "asked_tokens": requested_tokens,
        "allowed_tokens": plan.allowed,
        "limited_by": plan.limited_by,
        "longest_document_tokens": file_facts["longest"],
    }
    return Stream(facts, metrics, file_facts["histogram"])


def _check_files(target: Target, folder: Path, sources: int) -> Facts:
    tokenizer = target.tokenizer
    return shard_gate.check_files(folder, target.dtype, tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, sources)


def _describe(sources: Sequence[MixSource], tokens: Mapping[str, Tokens], file_facts: Mapping[str, Any]) -> Facts:
    """Totals, a table by source, and the tokens of each source in each shard."""
    by_source = file_facts["shards"].sum(axis=0).tolist()
    total = sum(by_source)
    rows = {}
    for number, (source, share) in enumerate(zip(sources, _targets(sources), strict=True)):
        text_bytes = tokens[source.name].text_bytes
        rows[source.name] = {
            "tokens": by_source[number],
            "documents": int(file_facts["documents"][number]),
            "unique_tokens": source.total,
            "unique_documents": len(source.lengths),
            "text_bytes": text_bytes,
            "bytes_per_token": text_bytes / (source.total - 2 * len(source.lengths)),
            "epochs": by_source[number] / source.total,
            "target_share": share,
            "share": by_source[number] / total,
        }
    return {
        "counts": {"tokens": total, "documents": int(file_facts["documents"].sum())},
        "sources": rows,
        "per_shard": {s.name: file_facts["shards"][:, number].tolist() for number, s in enumerate(sources)},
    }


def id_statistics(tokenizer: Tokenizer, histogram: np.ndarray) -> Facts:
    """Learned ids the training stream never or hardly uses, and the share of tokens spelled as bytes."""
    is_byte = np.array([tokenizer.processor.is_byte(i) for i in range(tokenizer.vocab_size)])
    learned = (tokenizer.token_bytes > 0) & ~is_byte
    return {
        "dead_ids": int((learned & (histogram == 0)).sum()),
        "rare_ids": int((learned & (histogram < 100)).sum()),
        "byte_fallback_share": float(histogram[is_byte].sum() / histogram.sum()),
    }


# The rows of plots, from streams by name (the main one first). Each bar and each shard has a name of its own.


def shares_by_source(streams: Mapping[str, Mapping[str, Any]]) -> list[Facts]:
    return [
        {
            "source": name if stream == TRAIN else f"{name} ({stream})",
            **{key: row[key] for key in ("tokens", "share", "target_share", "epochs")},
        }
        for stream, facts in streams.items()
        for name, row in sorted(facts["sources"].items())
    ]


def mixture_table(sources: Sequence[MixSource], plan: Plan, requested_tokens: int | None) -> str:
    """A plan as a table for people: one line for each source, and what ends the stream."""
    header = f"{'source':<20} {'documents':>12} {'tokens':>15} {'share':>7} {'cap':>7} {'epochs':>7} {'in stream':>15}"
    lines = [header]
    for source, share, planned_tokens in zip(sources, _targets(sources), plan.taken, strict=True):
        lines.append(
            f"{source.name:<20} {len(source.lengths):>12,} {source.total:>15,} {share:>7.3f} {source.max_epochs:>7g}"
            f" {planned_tokens / source.total:>7.2f} {planned_tokens:>15,}"
        )
    if requested_tokens is None or requested_tokens > plan.allowed:
        end = f"the epoch cap of source '{plan.limited_by}' ends the stream"
    else:
        end = f"{requested_tokens:,} asked; the caps allow {plan.allowed:,}, by source '{plan.limited_by}'"
    return "\n".join([*lines, f"{plan.total:,} tokens: {end}"])


def _targets(sources: Sequence[MixSource]) -> list[float]:
    source_weights = weights(sources)
    return [source_weight / sum(source_weights) for source_weight in source_weights]

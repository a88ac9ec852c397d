"""The shards' gate: properties of the files as they were written, read back from disk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from athanor.base.errors import GateError
from athanor.base.work import Facts
from athanor.sharding.tokenise import Tokens

# Whole documents are indivisible, so a stretch of the stream may miss its share
# by a few of them; three of the longest is above every case seen in simulation.
SLACK_DOCUMENTS = 3
COUNT_TOKENS = 1 << 20
FIX = "run dvc repro --force shard; if it fails again, this is a bug"


def check_disjoint(train: Iterable[np.ndarray], val: Iterable[np.ndarray]) -> None:
    """GateError when a document's content is in both splits.

    Both are given as arrays uint64 [documents, 2] of content hashes; only `val` is kept in memory.

    Equal texts only: near duplicates of held-out documents are the gate of clean, which has the words.
    """
    held_out = np.concatenate([np.zeros((0, 2), dtype=np.uint64), *val])
    held_out = held_out[np.argsort(held_out[:, 0])]
    shared_hashes: set[tuple[int, ...]] = set()
    for hashes in train:
        # By the first half, in one go; those that agree in it are next to nothing.
        suspects = hashes[np.isin(hashes[:, 0], held_out[:, 0])]
        twins = held_out[np.isin(held_out[:, 0], suspects[:, 0])]
        shared_hashes |= {tuple(pair) for pair in suspects.tolist()} & {tuple(pair) for pair in twins.tolist()}
    if shared_hashes:
        example = "".join(f"{half:016x}" for half in min(shared_hashes))
        raise GateError(
            "split",
            f"{len(shared_hashes)} documents are in both train and val, for example {example}",
            where="data/clean",
            fix="deduplicate across the split in clean",
        )


def check_complete(
    tokenised: Mapping[str, Tokens], clean_counts: Mapping[str, Mapping[str, int]], names: Collection[str], split: str
) -> None:
    """GateError unless the documents and bytes tokenised of each source in `names` are those that clean counted."""
    for name in sorted(names):
        expected = tuple(clean_counts[name][key] for key in ("documents", "bytes")) if name in clean_counts else (0, 0)
        actual = (tokenised[name].documents, tokenised[name].text_bytes) if name in tokenised else (0, 0)
        if actual != expected:
            raise GateError(
                "complete",
                f"{actual[0]:,} documents of {actual[1]:,} bytes of source '{name}' in {split},"
                f" clean counted {expected[0]:,} of {expected[1]:,}",
                where="data/clean",
                fix="run dvc checkout --force, or dvc repro --force clean",
            )


def check_counts(written: Mapping[str, int], planned: Mapping[str, int], where: str) -> None:
    """GateError unless the files have as many tokens of each source as were planned."""
    for name, tokens in planned.items():
        if written[name] != tokens:
            raise GateError("counts", f"{written[name]:,} tokens of '{name}', not {tokens:,}", where=where, fix=FIX)


def check_files(folder: Path, dtype: np.dtype, vocab_size: int, bos: int, eos: int, sources: int) -> Facts:
    """Check every shard below `folder` and count what is in it.

    Returns `shards`: int64 [shards, sources] tokens, `documents`: int64 [sources], `longest` document in
    tokens, and `histogram`: int64 [vocab] of ids. Without source files everything counts as source 0.
    """
    by_shard, documents, longest = [], np.zeros(sources, dtype=np.int64), 0
    histogram = np.zeros(vocab_size, dtype=np.int64)
    for path in sorted(folder.glob("*.bin")):
        where = f"{path.parent.name}/{path.name}"
        tokens = np.memmap(path, dtype=dtype, mode="r")
        starts = np.load(path.with_suffix(".idx.npy")).astype(np.int64)
        lengths = np.diff(starts)
        if starts[0] != 0 or starts[-1] != len(tokens) or (lengths < 2).any():
            raise GateError("counts", "document offsets do not add up to the tokens", where=where, fix=FIX)
        if int(tokens.max()) >= vocab_size:
            raise GateError("ids", f"id {int(tokens.max())} with a vocabulary of {vocab_size}", where=where, fix=FIX)
        counts = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, len(tokens), COUNT_TOKENS):  # bincount needs 8 bytes for each token
            counts += np.bincount(tokens[start : start + COUNT_TOKENS], minlength=vocab_size)
        delimited = (tokens[starts[:-1]] == bos).all() and (tokens[starts[1:] - 1] == eos).all()
        if not delimited or counts[bos] != len(lengths) or counts[eos] != len(lengths):
            raise GateError("boundaries", "documents are not each one <|bos|>, text, one <|eos|>", where=where, fix=FIX)
        source_path = path.with_suffix(".src.npy")
        numbers = np.load(source_path) if source_path.is_file() else np.zeros(len(lengths), dtype=np.uint8)
        by_shard.append(np.bincount(numbers, weights=lengths, minlength=sources).astype(np.int64))
        documents += np.bincount(numbers, minlength=sources)
        longest = max(longest, int(lengths.max()))
        histogram += counts
    return {"shards": np.array(by_shard), "documents": documents, "longest": longest, "histogram": histogram}


def check_shares(
    shards: np.ndarray, names: Sequence[str], targets: Sequence[float], tolerance: float, longest: int
) -> None:
    """GateError unless each source's share is its target within `tolerance`, in all shards together and in each.

    `shards` is int64 [shards, sources]. The tolerance widens by what indivisible documents can do to a stretch.
    """
    for label, row in [("all shards", shards.sum(axis=0)), *((f"shard {i:05d}", row) for i, row in enumerate(shards))]:
        total = int(row.sum())
        allowed = tolerance + SLACK_DOCUMENTS * longest / total
        for name, tokens, target in zip(names, row.tolist(), targets, strict=True):
            if abs(tokens / total - target) > allowed:
                raise GateError(
                    "shares",
                    f"source '{name}' makes up {tokens / total:.4f}, target {target:.4f} ± {allowed:.4f}",
                    where=label,
                    fix="raise shard.shard_tokens or shard.share_tolerance",
                )


def check_epochs(used: Mapping[str, int], unique: Mapping[str, int], max_epochs: Mapping[str, float]) -> None:
    """GateError when a source is repeated more often than its cap; `used` and `unique` are tokens with and without repeats."""
    for name, tokens in used.items():
        epochs = tokens / unique[name]
        if epochs > max_epochs[name] * (1 + 1e-9):
            raise GateError("epochs", f"source '{name}' is seen {epochs:.3f} times, cap {max_epochs[name]}", fix=FIX)

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from athanor.base.artifacts import read_json, write_manifest
from athanor.data import rows, shards

BOS, EOS, PAD, STOP = 2, 3, 0, 7


def documents(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return [
        np.concatenate([[BOS], rng.integers(10, 300, int(rng.integers(1, 60))), [EOS]]).astype(np.int64)
        for _ in range(count)
    ]


@pytest.fixture
def shard_documents() -> list[np.ndarray]:
    return documents(80)


@pytest.fixture
def shard_folder(tmp_path: Path, shard_documents: list[np.ndarray]) -> Path:
    """A data/shards folder of several small shards with two sources."""
    folder = tmp_path / "shards"
    dtype = shards.token_dtype(320)
    writer = shards.ShardWriter(folder / "train", dtype, 500, sources=True)
    for number, ids in enumerate(shard_documents):
        writer.add(ids, number % 2)
    writer.close()
    val = shards.ShardWriter(folder / "val" / "a", dtype, 500, sources=False)
    for ids in documents(5, seed=1):
        val.add(ids)
    val.close()
    write_manifest(
        folder,
        kind=shards.KIND,
        version=shards.VERSION,
        counts={},
        dtype=dtype.name,
        val={"a": {"documents": 5}, "none": {"documents": 0}},
        sources={"even": {}, "odd": {}},
    )
    return folder


@pytest.fixture
def cooldown_folder(tmp_path: Path, shard_folder: Path) -> Path:
    """`shard_folder` as it would be with a mixture for the cooldown: other documents, all of one source."""
    folder = tmp_path / "with cooldown"
    shutil.copytree(shard_folder, folder)
    manifest = read_json(folder / "manifest.json")
    writer = shards.ShardWriter(folder / "cooldown", shards.token_dtype(320), 300, sources=True)
    for ids in documents(30, seed=2):
        writer.add(ids)
    writer.close()
    (folder / "manifest.json").unlink()
    facts = {key: manifest[key] for key in ("dtype", "val", "sources")}
    write_manifest(folder, kind=shards.KIND, version=shards.VERSION, counts={}, **facts, cooldown={"counts": {}})
    return folder


@pytest.fixture
def sft_folder(tmp_path: Path) -> Path:
    """A data/sft folder packed for a context of 31 tokens; the last conversation appears twice."""
    folder = tmp_path / "sft"
    folder.mkdir()
    talks = []
    for number in range(30):
        answer = 3 + number % 8
        ids = [BOS, 5, 20 + number, STOP, 6, *range(100, 100 + answer), STOP]
        talks.append((ids, [0] * 5 + [1] * (answer + 1)))
    packed = [[0, 1], *([number, number + 1] for number in range(2, 30, 2)), [29]]
    for split in ("train", "val"):
        rows.write_split(folder, split, talks, packed, 320)
    write_manifest(
        folder,
        kind=rows.KIND,
        version=rows.VERSION,
        counts={},
        dtype="uint16",
        pad_id=PAD,
        stop_id=STOP,
        context_tokens=31,
    )
    return folder

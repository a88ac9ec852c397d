"""Tokenise the clean corpus into the spool, one Parquet file at a time, with as many processes as there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.work import MapShards
from athanor.data.shards import token_dtype
from athanor.sharding.spool import SpoolWriter, Tokens, read_spool
from athanor.text.documents import in_batches, read_documents
from athanor.tokenizer.tokenizer import Tokenizer

BATCH_CHARS = 1 << 20


def tokenise(
    map_shards: MapShards,
    files: Mapping[str, Sequence[Path]],
    tokenizer: Path,
    folder: Path,
    desc: str,
    text_bytes: int,
) -> dict[str, Tokens]:
    """Tokenise Parquet files into `folder`, which may hold some of it already; returns the tokens of each source.

    `files` are groups of files by a name (a source, or anything for a file of
    many sources), in the order that their documents have; `text_bytes` is all
    their text, for the progress.
    """
    named = {f"{name}-{number:05d}": path for name, paths in files.items() for number, path in enumerate(paths)}
    model = str(tokenizer.absolute())
    tasks = {name: {"documents": str(path.absolute()), "tokenizer": model} for name, path in named.items()}
    on_disk = {name: path.stat().st_size for name, path in named.items()}
    sizes = {name: text_bytes * size // max(1, sum(on_disk.values())) for name, size in on_disk.items()}
    found = map_shards(tokenise_file, tasks, folder, desc=desc, sizes=sizes)
    return read_spool(folder, {name: facts["text_bytes"] for name, facts in found.items()})


def tokenise_file(task: Mapping[str, str], out: Path) -> dict[str, Any]:
    """Write the documents of one Parquet file as `<|bos|>` ids `<|eos|>` into the spool.

    Work as in `athanor.base.work`. Memory: a batch of about a megabyte of
    text, the row group that Parquet reads, and 60 bytes for each document of the file.
    """
    tokenizer = Tokenizer.load(task["tokenizer"])
    bos, eos = np.array([tokenizer.bos], dtype=np.int32), np.array([tokenizer.eos], dtype=np.int32)
    writer = SpoolWriter(out, token_dtype(tokenizer.vocab_size))
    for batch in in_batches(read_documents(task["documents"]), lambda document: len(document.text), BATCH_CHARS):
        encoded = tokenizer.encode_arrays([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            writer.add(document.source, np.concatenate([bos, ids, eos]), document.text.encode())
    return {"text_bytes": writer.close()}

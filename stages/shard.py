"""Tokenise the clean corpus and write it as token shards, mixed by share, with a validation split per source."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from athanor.artifacts import manifest_digest, new_dir, rounded, write_manifest
from athanor.corpus.documents import read_documents
from athanor.data import shard_gate
from athanor.data.build import Split, check, describe, tokenise, write_train
from athanor.data.mixture import mix_sources, plan_mixture
from athanor.data.shards import KIND, VERSION, token_dtype
from athanor.errors import InputError
from athanor.params.mixture import MixtureParams
from athanor.params.shard import ShardParams
from athanor.pipeline.machine import cores, machine
from athanor.pipeline.run import Run, stage_main
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import Tokenizer

CLEAN, TOKENIZER, OUT = Path("data/clean"), Path("models/tokenizer"), Path("data/shards")


def run(run: Run) -> None:
    params, mixture = run.params("shard", ShardParams), run.params("mixture", MixtureParams)
    tokenizer = Tokenizer.load(TOKENIZER)
    dtype = token_dtype(tokenizer.vocab_size)
    with new_dir(OUT) as folder:
        spool = folder / "spool"
        train = tokenise_split(run, "train", spool, tokenizer, mixture, params.shard_tokens)
        val = tokenise_split(run, "val", folder / "val", tokenizer, mixture, params.shard_tokens)
        shard_gate.check_disjoint(train.hashes, val.hashes)
        if not val.hashes:
            raise InputError(
                "no validation document in any source", where=str(CLEAN), fix="raise download.val_fraction"
            )
        sources = mix_sources(mixture.sources, train.lengths)
        plan = plan_mixture(sources, params.train_tokens, mixture.seed)
        write_train(folder / "train", spool, sources, plan, dtype, params.shard_tokens)
        shutil.rmtree(spool)
        counted = check(folder, sources, tokenizer, params.share_tolerance)
        facts = rounded(describe(sources, train, val, counted))
        write_manifest(
            folder,
            kind=KIND,
            version=VERSION,
            parents={"clean": manifest_digest(CLEAN), "tokenizer": manifest_digest(TOKENIZER)},
            dtype=dtype.name,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos,
            eos_id=tokenizer.eos,
            tokenizer=tokenizer.digest,
            template_hash=template_hash(tokenizer),
            **facts,
        )
    if params.train_tokens is not None and params.train_tokens > plan.allowed:
        run.note(
            f"{params.train_tokens:,} tokens asked; at these shares the epoch cap of source "
            f"'{plan.limited_by}' allows {plan.allowed:,}"
        )
    run.metrics(
        {
            **facts.pop("counts"),
            **facts,
            "shards": len(counted["shards"]),
            "asked_tokens": params.train_tokens,
            "allowed_tokens": plan.allowed,
            "limited_by": plan.limited_by,
            "longest_document_tokens": counted["longest"],
            **id_statistics(tokenizer, counted["histogram"]),
        }
    )
    run.plot(
        "shard_mixture",
        [
            {"source": name, **{key: row[key] for key in ("tokens", "share", "target_share", "epochs")}}
            for name, row in sorted(facts["sources"].items())
        ],
    )


def tokenise_split(
    run: Run, split: str, folder: Path, tokenizer: Tokenizer, mixture: MixtureParams, shard_tokens: int
) -> Split:
    left_out = {name for name, source in mixture.sources.items() if source.share == 0}

    def documents() -> Iterator[tuple[str, str]]:
        for document in read_documents(CLEAN / f"{split}.parquet"):
            if document.source not in left_out:
                yield document.source, document.text

    threads = machine().threads or cores()
    with run.progress(None, f"tokenise {split}", "chars") as progress:
        return tokenise(documents(), folder, tokenizer, shard_tokens, threads, progress.update)


def id_statistics(tokenizer: Tokenizer, histogram: np.ndarray) -> dict[str, Any]:
    """Learned ids the training stream never or hardly uses, and the share of tokens spelled as bytes."""
    is_byte = np.array([tokenizer.processor.is_byte(i) for i in range(tokenizer.vocab_size)])
    learned = (tokenizer.token_bytes > 0) & ~is_byte
    return {
        "dead_ids": int((learned & (histogram == 0)).sum()),
        "rare_ids": int((learned & (histogram < 100)).sum()),
        "byte_fallback_share": float(histogram[is_byte].sum() / histogram.sum()),
    }


if __name__ == "__main__":
    stage_main("shard", run)

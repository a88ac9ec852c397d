"""Tokenise the clean corpus and write it as token shards, mixed by share, with a validation split per source."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from athanor.base.artifacts import manifest_digest, new_dir, read_json, write_manifest
from athanor.base.errors import InputError, Interrupted, ParamsError
from athanor.data.mixture import check_sources, mix_sources, plan_mixture
from athanor.data.mixture_params import MixtureParams, SourceShare
from athanor.data.shards import COOLDOWN, KIND, TRAIN, VERSION
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.sharding import build, shard_gate
from athanor.sharding.params import ShardParams
from athanor.sharding.tokenise import Tokens, tokenise
from athanor.text.documents import shard_files
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import Tokenizer

CLEAN, TOKENIZER, OUT = Path("data/clean"), Path("models/tokenizer"), Path("data/shards")
VAL = CLEAN / "val.parquet"


def run(run: Run) -> None:
    params, mixture = run.params("shard", ShardParams), run.params("mixture", MixtureParams)
    mixtures = {TRAIN: (mixture.sources, params.train_tokens)}
    if mixture.cooldown is not None:
        mixtures[COOLDOWN] = (mixture.cooldown.sources, params.cooldown_tokens)
    elif params.cooldown_tokens is not None:
        fix = "set it to null, or give mixture.cooldown its sources"
        raise ParamsError("there is no mixture for the cooldown", where="shard.cooldown_tokens", fix=fix)
    tokenizer = Tokenizer.load(TOKENIZER)
    parents = {"clean": manifest_digest(CLEAN), "tokenizer": manifest_digest(TOKENIZER)}
    # What decides the tokens, so that every mixture finds them.
    slot = run.sub_slot("tokens", "athanor.sharding.tokenise", {}, parents)
    with slot, new_dir(OUT) as folder:
        used = {name for shares, _ in mixtures.values() for name, source in shares.items() if source.share > 0}
        tokens = tokenised(run, mixture, used, slot.path)
        target = build.Target(folder, tokenizer, params.shard_tokens, params.share_tolerance)
        streams = {
            stream_name: write(run, target, tokens["train"], stream_name, mixture.seed, shares, requested)
            for stream_name, (shares, requested) in mixtures.items()
        }
        facts = {stream_name: stream.facts for stream_name, stream in streams.items()}
        held_out = build.write_val(target, tokens["val"], list(facts[TRAIN]["sources"]))
        counts = {f"val_{key}": sum(row[key] for row in held_out.values()) for key in ("tokens", "documents")}
        if not counts["val_documents"]:
            raise InputError("no validation document in any source", where=VAL, fix="raise download.val_fraction")
        write_manifest(
            folder,
            kind=KIND,
            version=VERSION,
            parents=parents,
            dtype=target.dtype.name,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos,
            eos_id=tokenizer.eos,
            tokenizer=tokenizer.digest,
            template_hash=template_hash(tokenizer),
            val=held_out,
            **{**facts[TRAIN], "counts": {**facts[TRAIN]["counts"], **counts}},
            **{stream_name: rows for stream_name, rows in facts.items() if stream_name != TRAIN},
            **run.codes(),
        )
        slot.mark_done()
    metrics = {stream_name: stream.metrics for stream_name, stream in streams.items()}
    ids = build.id_statistics(tokenizer, streams[TRAIN].histogram)
    run.metrics({**metrics.pop(TRAIN), **counts, "val": held_out, **ids, **metrics})
    run.plot("shard_mixture", build.shares_by_source(facts))


def tokenised(run: Run, mixture: MixtureParams, used: Collection[str], folder: Path) -> dict[str, dict[str, Tokens]]:
    """The tokens of each source in `used`, by split; those that `folder` already has are reused."""
    files = shard_files(CLEAN / "train")
    if not files:
        raise InputError("no documents", where=CLEAN / "train", fix="dvc repro clean")
    if not VAL.is_file():
        raise InputError("file not found", where=VAL, fix="dvc repro clean")
    check_sources(mixture.sources, files)
    cooldown_sources = mixture.cooldown.sources if mixture.cooldown else {}
    check_sources(cooldown_sources, cooldown_sources.keys() & files.keys())
    groups = {"train": {name: paths for name, paths in files.items() if name in used}, "val": {"val": [VAL]}}
    document_counts = read_json(CLEAN / "manifest.json")["counts"]
    # The file of the validation split holds every source, and is tokenised whole.
    count_rows = {
        split: [row for name, row in document_counts[split].items() if name in used or split == "val"]
        for split in groups
    }
    sizes = {split: sum(row["bytes"] for row in count_rows[split]) for split in groups}
    tokens_of = {}
    for split, group in groups.items():
        source_tokens = tokenise(run.map_shards, group, TOKENIZER, folder / split, f"tokenise {split}", sizes[split])
        tokens_of[split] = {name: tokens for name, tokens in source_tokens.items() if name in used}
        shard_gate.check_complete(tokens_of[split], document_counts[split], used, split)
    train, val = ((tokens for t in tokens_of[split].values() for tokens in t.content_hashes()) for split in groups)
    shard_gate.check_disjoint(train, val)
    return tokens_of


def write(
    run: Run,
    target: build.Target,
    tokens: Mapping[str, Tokens],
    stream_name: str,
    seed: int,
    shares: Mapping[str, SourceShare],
    requested_tokens: int | None,
) -> build.Stream:
    """Plan, write and check one stream; its mixture is shown before anything is written."""
    sources = mix_sources(shares, {name: stored.lengths for name, stored in tokens.items() if name in shares})
    plan = plan_mixture(sources, requested_tokens, seed, backwards=stream_name == COOLDOWN)
    run.note(f"{stream_name}\n{build.mixture_table(sources, plan, requested_tokens)}")
    if requested_tokens is not None and requested_tokens > plan.allowed:
        run.note(
            f"{requested_tokens:,} tokens asked; at these shares the epoch cap of source "
            f"'{plan.limited_by}' allows {plan.allowed:,}"
        )
    with run.progress(plan.total / 1e6, f"write {stream_name}", "M tokens") as bar:

        def advance(tokens: int) -> None:
            bar.update(tokens / 1e6)
            if run.stop_requested():
                raise Interrupted("stopped while writing shards; run again to continue (no text is tokenised twice)")

        build.write_stream(target, stream_name, sources, plan, tokens, advance)
    return build.check_stream(target, stream_name, sources, plan, tokens, requested_tokens)


if __name__ == "__main__":
    stage_main("shard", run)

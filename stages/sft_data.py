"""Build the SFT rows: clean conversations of every source, encoded by the chat template and packed whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from athanor.artifacts import manifest_digest, new_dir, write_manifest
from athanor.corpus.conversations import Conversation, read_conversations, read_items
from athanor.corpus.decontaminate import ItemIndex
from athanor.data.packing import pack
from athanor.data.rows import KIND, VERSION, PackedRows, write_split
from athanor.data.shards import token_dtype
from athanor.errors import InputError, ParamsError
from athanor.params.sft_data import SftDataParams
from athanor.pipeline.process import stage_main
from athanor.pipeline.run import Run
from athanor.tokenizer import sft_rows
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import Tokenizer

INSTRUCT, BATTERY = Path("data/instruct"), Path("data/battery")
TOKENIZER, OUT = Path("models/tokenizer"), Path("data/sft")


def run(run: Run) -> None:
    params = run.params("sft_data", SftDataParams)
    tokenizer = Tokenizer.load(TOKENIZER)
    rules = params.decontamination
    index = ItemIndex.from_items(
        read_items(BATTERY / "items.jsonl"),
        ngram_words=rules.ngram_words,
        max_ngram_items=rules.max_ngram_items,
        fact_categories=rules.fact_categories,
    )
    conversations = read_sources(params)
    sft_rows.check_split_keys(conversations)
    read = Counter(row.source for row in conversations)
    losses: dict[str, Counter[str]] = {name: Counter() for name in sorted(read)}
    capacity = params.context_tokens + 1

    # Decontamination comes last: which n-grams count depends on how many of the remaining conversations share them.
    kept = sft_rows.deduplicate(conversations, {n: s.max_copies for n, s in params.sources.items()}, losses)
    rows = sft_rows.encode(tokenizer, kept, capacity, losses)
    caps = {name: params.sources[name].max_supervised_tokens for name in losses}
    rows = sft_rows.cap_supervised(rows, caps, params.seed, losses)
    rows = sft_rows.decontaminate(rows, index, rules.max_ngram_conversations, losses)

    with new_dir(OUT) as folder:
        counts: dict[str, Any] = {}
        for split in ("train", "val"):
            part = [row for row in rows if row.conversation.split == split]
            if not part:
                raise InputError(
                    f"no {split} conversation is left", where=str(INSTRUCT), fix="add conversations, or raise a cap"
                )
            # A repeat is a row entry, not a copy of the ids, and never changes which side a conversation is on.
            times = [params.sources[row.conversation.source].repeats if split == "train" else 1 for row in part]
            entries = [number for number, repeats in enumerate(times) for _ in range(repeats)]
            packed = pack([len(part[number].ids) for number in entries], capacity, params.seed)
            numbered = [[entries[entry] for entry in row] for row in packed]
            write_split(folder, split, [(row.ids, row.mask) for row in part], numbered, tokenizer.vocab_size)
            counts[split] = {"conversations": len(part), "entries": len(entries), "rows": len(numbered)}
        write_manifest(
            folder,
            kind=KIND,
            version=VERSION,
            counts=counts,
            parents={
                "battery": manifest_digest(BATTERY),
                "instruct": manifest_digest(INSTRUCT),
                "tokenizer": manifest_digest(TOKENIZER),
            },
            dtype=token_dtype(tokenizer.vocab_size).name,
            vocab_size=tokenizer.vocab_size,
            pad_id=tokenizer.pad,
            context_tokens=params.context_tokens,
            tokenizer=tokenizer.digest,
            template_hash=template_hash(tokenizer),
        )
        pads = check(folder, tokenizer, index, params)
        facts = describe(params, rows, read, losses, counts, pads)
    run.metrics(facts)


def read_sources(params: SftDataParams) -> list[Conversation]:
    """Every conversation of the sources in use, in order of source and row."""
    paths = {path.stem: path for path in sorted(INSTRUCT.glob("*.jsonl"))}
    for name in sorted(paths.keys() - params.sources.keys()):
        raise ParamsError(
            f"source '{name}' is not named", where="sft_data.sources", fix="add it, with repeats 0 to leave it out"
        )
    for name in sorted(params.sources.keys() - paths.keys()):
        raise InputError(
            "no conversations", where=f"sft_data source '{name}'", fix="add it to instruct.sources, or remove it here"
        )
    used = [path for name, path in paths.items() if params.sources[name].repeats]
    return [row for path in used for row in read_conversations(path)]


def check(folder: Path, tokenizer: Tokenizer, index: ItemIndex, params: SftDataParams) -> dict[str, float]:
    """Run the gates on the written files; returns the padding share of each split."""
    packed = {split: PackedRows(folder, split) for split in ("train", "val")}
    texts = [messages for split, rows in packed.items() for messages in sft_rows.check_packed(tokenizer, rows, split)]
    sft_rows.check_clean(texts, index, params.decontamination.max_ngram_conversations)
    return {split: sft_rows.check_padding(rows, params.max_pad_share, split) for split, rows in packed.items()}


def describe(
    params: SftDataParams,
    rows: list[sft_rows.Encoded],
    read: Counter[str],
    losses: dict[str, Counter[str]],
    counts: dict[str, Any],
    pads: dict[str, float],
) -> dict[str, Any]:
    supervised = dict.fromkeys(losses, 0)
    for row in rows:
        source = row.conversation.source
        if row.conversation.split == "train":
            supervised[source] += row.supervised * params.sources[source].repeats
    shares = sft_rows.check_shares(supervised, params.max_source_share)
    reasons = ("duplicates", "too_long", "truncated", "over_cap", "contaminated")
    return {
        **{split: {**counts[split], "pad_share": pads[split]} for split in counts},
        "supervised_tokens": sum(supervised.values()),
        "contaminated": sum(lost["contaminated"] for lost in losses.values()),
        "sources": {
            name: {
                "read": read[name],
                **{reason: losses[name][reason] for reason in reasons},
                "supervised_tokens": supervised[name],
                "supervised_share": shares[name],
            }
            for name in losses
        },
    }


if __name__ == "__main__":
    stage_main("sft-data", run)

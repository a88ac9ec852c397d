"""Build the SFT rows: clean conversations of every source, encoded by the chat template and packed whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from athanor.base.artifacts import manifest_digest, new_dir, read_manifest, write_manifest
from athanor.base.errors import InputError, ParamsError
from athanor.base.work import Facts
from athanor.chat_data import gates as sft_gates
from athanor.chat_data import replay
from athanor.chat_data import rows as sft_rows
from athanor.chat_data.params import SftDataParams
from athanor.data.mixture_params import MixtureParams
from athanor.data.rows import KIND, VERSION, PackedRows, pack, write_split
from athanor.data.shards import token_dtype
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.text.conversations import Conversation, read_conversations
from athanor.text.documents import shard_files
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.words.decontaminate import ItemIndex

INSTRUCT, BATTERY, CLEAN = Path("data/instruct"), Path("data/battery"), Path("data/clean")
TOKENIZER, OUT = Path("models/tokenizer"), Path("data/sft")


def run(run: Run) -> None:
    mixture = run.params("mixture", MixtureParams)
    shares = {name: source.share for name, source in mixture.sources.items()}
    build(run, Tokenizer.load(TOKENIZER), OUT, shares, {"tokenizer": manifest_digest(TOKENIZER)})


def build(run: Run, tokenizer: Tokenizer, out: Path, shares: Mapping[str, float], parents: Mapping[str, str]) -> None:
    """Write the rows for a tokenizer, our own or one with its interface; `shares`: the mixture's, for replay."""
    params = run.params("sft_data", SftDataParams)
    index = ItemIndex.read(BATTERY / "items.jsonl", params.decontamination)
    conversations = read_sources(params)
    sft_gates.check_split_keys(conversations)
    rows_by_source = Counter(row.source for row in conversations)
    own = [name for name in read_manifest(INSTRUCT, "instruct", 1).get("own", []) if name in rows_by_source]
    dropped: dict[str, Counter[str]] = {name: Counter() for name in sorted(rows_by_source)}
    contaminated: Counter[str] = Counter()
    rows = sft_rows.choose(tokenizer, conversations, params, index, dropped, contaminated, own, run.note)
    supervised = sft_rows.supervised_tokens(rows, params, dropped)
    facts = sft_rows.source_report(params, rows_by_source, dropped, supervised, own)
    files = shard_files(CLEAN / "train") if params.replay_share else {}
    replay_text = replay.choose_replay(tokenizer, params, shares, files, index, sum(supervised.values()))
    params = replace(params, replay_share=replay_text.share(params.replay_share, sum(supervised.values())))
    if short := ", ".join(replay_text.short):
        run.note(
            f"all text of {short} is replayed, and less than was asked: {params.replay_share:.0%} of the supervised tokens"
        )
    names = [*dropped, *replay_text.pieces]
    read_from = {"battery": BATTERY, "instruct": INSTRUCT, **({"clean": CLEAN} if replay_text.pieces else {})}

    with new_dir(out) as folder:
        counts: Facts = {}
        for split in ("train", "val"):
            split_rows = [row for row in rows if row.conversation.split == split]
            if not split_rows:
                what = f"no {split} conversation is left"
                raise InputError(what, where=INSTRUCT, fix="add conversations, or raise a cap")
            entries = [(row.ids, row.mask, names.index(row.source)) for row in split_rows]
            # A repeat is a row entry, not a copy of the ids, and never changes which side a conversation is on.
            repeats_by_entry = [sft_rows.repeats(row, params) if split == "train" else 1 for row in split_rows]
            if split == "train":
                texts = [
                    (ids, names.index(name, len(dropped)))
                    for name, pieces in replay_text.pieces.items()
                    for ids in pieces
                ]
                entries += [(ids, replay.mask_of(ids), source) for ids, source in texts]
                repeats_by_entry += [1] * len(texts)
            numbers = [number for number, count in enumerate(repeats_by_entry) for _ in range(count)]
            packed = pack([len(entries[number][0]) for number in numbers], params.context_tokens + 1, params.seed)
            numbered = [[numbers[position] for position in row] for row in packed]
            pairs, sources = [entry[:2] for entry in entries], [entry[2] for entry in entries]
            write_split(folder, split, pairs, numbered, tokenizer.vocab_size, sources)
            counts[split] = {"conversations": len(split_rows), "texts": len(entries) - len(split_rows)}
            counts[split] |= {"entries": len(numbers), "rows": len(numbered)}
        write_manifest(
            folder,
            kind=KIND,
            version=VERSION,
            counts=counts,
            parents={**parents, **{name: manifest_digest(path) for name, path in read_from.items()}},
            dtype=token_dtype(tokenizer.vocab_size).name,
            vocab_size=tokenizer.vocab_size,
            pad_id=tokenizer.pad,
            stop_id=tokenizer.stop,
            context_tokens=params.context_tokens,
            tokenizer=tokenizer.digest,
            template_hash=template_hash(tokenizer),
            sources=list(dropped),
            replay_sources=list(replay_text.pieces),
            replay_share=params.replay_share,
        )
        facts |= check(folder, tokenizer, index, params, counts)
    facts["replay"]["contaminated"] = replay_text.contaminated
    facts["contaminated_items"] = dict(sorted(contaminated.items()))  # conversations, by item
    run.metrics(facts)


def read_sources(params: SftDataParams) -> list[Conversation]:
    """Every conversation of the sources in use, in order of source and row."""
    params.check_named("sft_data")
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


def check(folder: Path, tokenizer: Tokenizer, index: ItemIndex, params: SftDataParams, counts: Facts) -> Facts:
    """Run the gates on the written files; returns what they measured."""
    max_conversations = params.decontamination.max_ngram_conversations
    packed = {split: PackedRows(folder, split) for split in ("train", "val")}
    conversations_by_split = {split: sft_gates.check_packed(tokenizer, rows, split) for split, rows in packed.items()}
    sft_gates.check_clean(
        [messages for conversations in conversations_by_split.values() for messages in conversations.values()],
        index,
        max_conversations,
    )
    allowed_leaks, hedge_rate = params.filter_exceptions.identity_leak, params.max_hedge_rate
    habits = {
        split: sft_gates.check_habits(conversations_by_split[split], packed[split], allowed_leaks, hedge_rate, split)
        for split in conversations_by_split
    }
    tokens = sft_gates.check_replay(tokenizer, packed["train"], params.replay_share, index, max_conversations, "train")
    pad_shares = {split: sft_gates.check_padding(rows, params.max_pad_share, split) for split, rows in packed.items()}
    facts = {
        split: {**counts[split], "pad_share": pad_shares[split], "hedge_rate": habits[split][1]} for split in packed
    }
    facts["identity_leaks"] = sum(claims for claims, _ in habits.values())
    return {**facts, "replay": {"supervised_tokens": sum(tokens.values()), "sources": tokens}}


if __name__ == "__main__":
    stage_main("sft-data", run)

"""Build the rows for preference optimisation: a better and a worse answer to each prompt, side by side in one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from athanor.base.artifacts import manifest_digest, new_dir, write_manifest
from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.chat_data.params import SftDataParams
from athanor.data.rows import KIND, VERSION, PackedRows, pack, write_split
from athanor.data.shards import token_dtype
from athanor.preferences.gates import check_packed
from athanor.preferences.pairs import REASONS, Encoded, choose, read_pairs
from athanor.preferences.params import DpoDataParams
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.words.decontaminate import ItemIndex

BATTERY, TOKENIZER, OUT = Path("data/battery"), Path("models/tokenizer"), Path("data/dpo")
COLLECT = (
    "collect more on the chat page, thumbs and corrections; athanor chat pairs corpus/pairs.jsonl writes them,"
    " and says what to add to params.yaml"
)


def run(run: Run) -> None:
    params, chats = run.params("dpo_data", DpoDataParams), run.params("sft_data", SftDataParams)
    if not params.sources:
        raise InputError("no source of pairs is named", where="dpo_data.sources", fix=COLLECT)
    tokenizer, capacity = Tokenizer.load(TOKENIZER), chats.context_tokens + 1
    index = ItemIndex.read(BATTERY / "items.jsonl", chats.decontamination)
    max_documents = chats.decontamination.max_ngram_conversations
    dropped: dict[str, Counter[str]] = {source.name: Counter() for source in params.sources}
    contaminated: Counter[str] = Counter()  # pairs, by item
    pairs = [
        pair
        for source in params.sources
        for pair in read_pairs(source, params.val_fraction, lambda reason: dropped[source.name].update([reason]))
    ]
    chosen = choose(tokenizer, pairs, capacity, index, max_documents, dropped, contaminated)
    check_enough(chosen, dropped, params.min_pairs)
    names = list(dropped)
    with new_dir(OUT) as folder:
        counts: Facts = {}
        for split in ("train", "val"):
            side = [encoded for encoded in chosen if encoded.pair.split == split]
            if not side:
                raise InputError(
                    f"none of {len(chosen)} pairs is in {split}",
                    where="dpo_data.val_fraction",
                    fix=f"{'raise' if split == 'val' else 'lower'} it, or add pairs",
                )
            packed = pack([encoded.tokens for encoded in side], capacity, params.seed)
            numbered = [[entry for number in row for entry in (2 * number, 2 * number + 1)] for row in packed]
            entries = [entry for encoded in side for entry in encoded.entries]
            sources = [names.index(encoded.pair.source) for encoded in side for _ in encoded.entries]
            write_split(folder, split, entries, numbered, tokenizer.vocab_size, sources)
            counts[split] = {"pairs": len(side), "entries": len(entries), "rows": len(numbered)}
        write_manifest(
            folder,
            kind=KIND,
            version=VERSION,
            counts=counts,
            parents={"tokenizer": manifest_digest(TOKENIZER), "battery": manifest_digest(BATTERY)},
            pairs=True,  # entries 2k and 2k + 1 are the better and the worse answer of pair k
            dtype=token_dtype(tokenizer.vocab_size).name,
            vocab_size=tokenizer.vocab_size,
            pad_id=tokenizer.pad,
            stop_id=tokenizer.stop,
            context_tokens=chats.context_tokens,
            tokenizer=tokenizer.digest,
            template_hash=template_hash(tokenizer),
            sources=names,
        )
        for split in counts:
            check_packed(tokenizer, PackedRows(folder, split), index, max_documents)
            counts[split] |= sizes([encoded for encoded in chosen if encoded.pair.split == split])
    by_source = Counter((encoded.pair.source, encoded.pair.split) for encoded in chosen)
    facts = {
        source.name: {
            "train": by_source[source.name, "train"],
            "val": by_source[source.name, "val"],
            "license": source.license,
            "left_out": {reason: dropped[source.name][reason] for reason in REASONS},
        }
        for source in params.sources
    }
    run.metrics({**counts, "sources": facts, "contaminated_items": dict(sorted(contaminated.items()))})


def check_enough(chosen: Sequence[Encoded], dropped: Mapping[str, Counter[str]], min_pairs: int) -> None:
    """InputError where there are fewer pairs than the gate asks for; it says why others were left out."""
    if len(chosen) < min_pairs:
        left_out = sum(dropped.values(), Counter())
        reasons = ", ".join(f"{left_out[reason]} {reason}" for reason in REASONS if left_out[reason])
        what = f"{len(chosen)} pairs, dpo_data.min_pairs is {min_pairs}" + (f"; left out: {reasons}" if reasons else "")
        raise InputError(what, where="dpo_data.sources", fix=COLLECT)


def sizes(side: Sequence[Encoded]) -> Facts:
    """Prompts, tokens, and those of answers: how much longer the better ones are is learned, too."""
    chosen, rejected = (sum(int(encoded.entries[number][1].sum()) for encoded in side) for number in (0, 1))
    return {
        "prompts": len({encoded.pair.key for encoded in side}),
        "tokens": sum(encoded.tokens for encoded in side),
        "chosen_tokens": chosen,
        "rejected_tokens": rejected,
    }


if __name__ == "__main__":
    stage_main("dpo-data", run)

"""Build the pairs for training by preferences: a better and a worse answer to each prompt, as TRL reads them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from athanor.base.artifacts import digest, manifest_digest, new_dir, write_manifest, write_text
from athanor.base.errors import InputError
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.text.documents import split_of
from athanor.tuning import model
from athanor.tuning.pair_params import DpoDataParams
from athanor.tuning.pairs import choose, read_pairs
from athanor.tuning.rows import Template
from athanor.words.decontaminate import ItemIndex

BATTERY, OUT = Path("data/battery"), Path("data/dpo")
COLLECT = (
    "collect more: athanor chat pairs corpus/pairs.jsonl writes those of the chat page, and the lines for params.yaml"
)


def run(run: Run) -> None:
    params, base = run.params("dpo_data", DpoDataParams), run.param("side.base")
    template = Template(model.load_tokenizer(base), base)
    index = ItemIndex.read(BATTERY / "items.jsonl", run.param("sft_data.decontamination"))
    left_out: Counter[str] = Counter()
    pairs = [pair for source in params.sources for pair in read_pairs(source, left_out)]
    rows: dict[str, list[str]] = {"train": [], "val": []}
    for pair in choose(template, pairs, params.context_tokens, index, left_out):
        prompt, chosen, rejected = (template.plain(part) for part in (pair.prompt, [pair.chosen], [pair.rejected]))
        row = json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        rows[split_of(digest(prompt), params.val_fraction)].append(row + "\n")
    counts = {split: len(lines) for split, lines in rows.items()}
    if sum(counts.values()) < params.min_pairs or not all(counts.values()):
        what = f"pairs are {counts}, left out {dict(left_out)}; it takes {params.min_pairs}, some of them in val"
        raise InputError(what, where="dpo_data.sources", fix=COLLECT)
    with new_dir(OUT) as folder:
        for split, lines in rows.items():
            write_text(folder / f"{split}.jsonl", "".join(lines))
        parents = {"base": model.base_digest(base), "battery": manifest_digest(BATTERY)}
        write_manifest(folder, kind="dpo-data", version=1, counts=counts, parents=parents)
    run.metrics({"pairs": counts, "left_out": dict(left_out)})


if __name__ == "__main__":
    stage_main("dpo-data", run)

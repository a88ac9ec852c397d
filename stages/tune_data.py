"""Build the rows for tuning a base: conversations in its own chat template, or plain text in its own tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from athanor.base.artifacts import manifest_digest, new_dir, read_manifest, write_manifest
from athanor.base.errors import InputError
from athanor.chat_data import rows as chats
from athanor.chat_data.params import SftDataParams
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.text.documents import read_documents, read_sources
from athanor.tuning import model
from athanor.tuning.rows import Template, text_rows
from athanor.words.decontaminate import ItemIndex
from stages import sft_data
from stages.sft_data import BATTERY, CLEAN, INSTRUCT

OUT = Path("data/tune")
CHECKED_ROWS = 500  # of each split, that the gate renders a second time
VAL_ROWS = 256  # at most: they are read at each save


def run(run: Run) -> None:
    base, data, context_tokens = run.param("side.base"), run.param("tune.data"), run.param("tune.context_tokens")
    model.libraries("transformers", "peft")
    template = Template(model.load_tokenizer(base), base)
    if data == "text":
        rows, facts = texts(template, context_tokens, run.param("tune.max_text_tokens"))
    else:
        rows, facts = conversations(run, template, context_tokens)
    read = {"clean": CLEAN} if data == "text" else {"instruct": INSTRUCT, "battery": BATTERY}
    parents = {"base": model.base_digest(base), **{name: manifest_digest(path) for name, path in read.items()}}
    counts = {split: len(part) for split, part in rows.items()}
    for split, count in counts.items():
        if not count:
            fix = "add text or conversations, or a smaller tune.context_tokens"
            raise InputError(f"no {split} row is left", where="tune", fix=fix)
    with new_dir(OUT) as folder:
        for split, part in rows.items():
            columns = {"input_ids": [ids for ids, _ in part], "labels": [labels for _, labels in part]}
            pq.write_table(pa.table(columns), folder / f"{split}.parquet", compression="zstd")
        hashes = {"template_hash": template.template_hash}
        write_manifest(folder, kind="tune-data", version=1, counts=counts, parents=parents, **hashes)
    run.metrics({"rows": counts, "tokens": sum(len(ids) for ids, _ in rows["train"]), **facts})


def conversations(run: Run, template: Template, context_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows of conversations, chosen as for our own model: filters, copies, battery items, caps, repeats."""
    chosen_by = run.params("sft_data", SftDataParams)
    settings = dataclasses.replace(chosen_by, context_tokens=context_tokens - 1)
    found = sft_data.read_sources(settings)
    dropped: dict[str, Counter[str]] = {name: Counter() for name in sorted({row.source for row in found})}
    plain = [row for row in found if not template.forges(row.messages)]
    own = [name for name in read_manifest(INSTRUCT, "instruct", 1).get("own", []) if name in dropped]
    index = ItemIndex.read(BATTERY / "items.jsonl", settings.decontamination)
    encoded = chats.choose(template, plain, settings, index, dropped, Counter(), own, run.note)
    rows: dict[str, Any] = {"train": [], "val": []}
    for split, part in rows.items():
        chosen = [row for row in encoded if row.conversation.split == split]
        if split == "val":
            chosen = chosen[:: -(-len(chosen) // VAL_ROWS) or 1]
        for row in chosen[:: max(1, len(chosen) // CHECKED_ROWS)]:
            template.check(row.conversation.messages)
        for row in chosen:
            labels = [token if taught else -100 for token, taught in zip(row.ids.tolist(), row.mask, strict=True)]
            part += [(row.ids.tolist(), labels)] * (chats.repeats(row, settings) if split == "train" else 1)
    left_out = {name: dict(counts) for name, counts in dropped.items() if counts}
    return rows, {"left_out": left_out, "control_text": len(found) - len(plain)}


def texts(template: Template, context_tokens: int, max_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pieces of documents, every token of which is learned."""
    documents = {"train": read_sources(CLEAN / "train"), "val": read_documents(CLEAN / "val.parquet")}
    limits = {"train": max_tokens, "val": VAL_ROWS * context_tokens}
    pieces = {
        split: text_rows(template, (row.text for row in part), context_tokens, limits[split])
        for split, part in documents.items()
    }
    return {split: [(ids, ids) for ids in part] for split, part in pieces.items()}, {}


if __name__ == "__main__":
    stage_main("tune-data", run)

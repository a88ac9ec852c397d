"""Write what a LoRA became: the merged model, the adapter for peft and llama.cpp, and a card; checked before it appears."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from athanor.adapters import export as export
from athanor.adapters import foreign, gguf_lora, lora
from athanor.adapters.export import HF_DIR
from athanor.adapters.foreign_files import base_digests, read_config, trained_in_bf16
from athanor.adapters.tokenizer import ForeignTokenizer
from athanor.base.artifacts import (
    digest,
    manifest_digest,
    new_dir,
    read_json,
    read_manifest,
    write_manifest,
    write_text,
)
from athanor.base.errors import InputError
from athanor.data import rows as packed
from athanor.model.device import prepare
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run

MODEL, DATA, OUT = Path("models/lora"), Path("data/lora"), Path("models/lora-export")
METRICS = Path("metrics/lora.json")
ADAPTER, GGUF = "adapter", "adapter.gguf"


def run(run: Run) -> None:
    name, dtype, tolerance = (run.param(f"export.{key}") for key in ("name", "dtype", "logit_tolerance"))
    base = Path(run.param("sft.base"))
    prepare("cpu", machine().threads)
    manifest, data = read_manifest(MODEL, "lora", 1), read_manifest(DATA, packed.KIND, packed.VERSION)
    tokenizer, digests = ForeignTokenizer(base), base_digests(base)
    if digests != manifest["files_of_base"] or tokenizer.template_hash != manifest["template_hash"]:
        raise InputError("the base is not the one that was trained on", where=str(base), fix="athanor repro")
    settings, adapters = lora.LoraSettings(**manifest["lora"]), lora.read_adapter(MODEL)
    parents = {"base": digest(digests), "lora": manifest_digest(MODEL), "sft": manifest_digest(DATA)}
    if dtype == "float16" and trained_in_bf16(read_config(base)):
        what = "the base was trained in bf16, and float16 cannot hold its activations"
        raise InputError(what, where="export.dtype", fix="set it to bfloat16 or float32")
    with new_dir(OUT) as folder:
        export.write_merged(folder / HF_DIR, base, tokenizer, adapters, settings.scale, dtype)
        (folder / ADAPTER).mkdir()
        for file in (lora.WEIGHTS, lora.CONFIG):
            shutil.copyfile(MODEL / file, folder / ADAPTER / file)
        arch = read_config(base)["model_type"]
        config = foreign.shape(base, settings, data["context_tokens"])
        gguf_lora.write_lora(folder / GGUF, adapters, arch, config, settings.alpha, name)
        gguf_lora.check_lora(folder / GGUF, adapters, arch, config, settings.alpha)
        parity = export.check_merged(folder / HF_DIR, base, settings, adapters, windows(), dtype, tolerance)
        facts = {
            "Base": {"directory": str(base), "model_type": arch, "parameters": manifest["counts"]["base"]},
            "LoRA": {**manifest["lora"], "parameters": manifest["counts"]["adapters"]},
            "Recipe": manifest["sft"],
            "Conversations": {**data["counts"], "context_tokens": data["context_tokens"]},
            "Result": read_json(METRICS),
            f"Merged in {dtype} against base and adapter in float32": parity,
        }
        write_text(folder / "MODEL_CARD.md", export.card(name, facts, digests))
        write_manifest(folder, kind="lora-export", version=1, counts=manifest["counts"], parents=parents)
    run.metrics({**manifest["counts"], "parity": parity})
    run.attach(OUT / "MODEL_CARD.md")


def windows(max_windows: int = 4) -> list[torch.Tensor]:
    """Ids of a few held-out conversations, int64 [1, tokens]."""
    rows: Any = packed.PackedRows(DATA, "val")
    ids = [rows.conversation(number)[0] for number in range(min(max_windows, rows.conversation_count))]
    return [torch.from_numpy(window[: rows.context_tokens].astype("int64"))[None] for window in ids]


if __name__ == "__main__":
    stage_main("lora-export", run)

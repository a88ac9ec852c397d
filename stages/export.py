"""Write the chat model for transformers and llama.cpp, check that every runtime agrees with ours, and its card."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from athanor.base.artifacts import (
    new_dir,
    read_json,
    read_manifest,
    sha256_file,
    write_json,
    write_manifest,
    write_text,
)
from athanor.base.strict import read_yaml
from athanor.export.card import CardInputs, model_card
from athanor.export.params import ExportParams
from athanor.export.perplexity_gate import check_perplexity
from athanor.export.probes import battery_prompts, make_probe
from athanor.export.publish import check_files, write_files
from athanor.export.source import (
    MANIFESTS,
    METRICS,
    MODEL,
    TOKENIZER,
    Source,
    load_source,
    lock_hashes,
    manifests,
    metrics,
)
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.text.documents import read_documents

OUT = Path("models/export")
VAL, BATTERY = Path("data/clean/val.parquet"), Path("data/eval/battery.jsonl")
PARAMETERS_PER_THREAD = 10_000_000


def run(run: Run) -> None:
    params = run.params("export", ExportParams)
    lineage = manifests()
    source = load_source(MODEL, TOKENIZER, params.name, lineage | metrics(), lock_hashes())
    counts = {"parameters": source.config.parameter_count()}
    # Nothing appears under models/export before every check has passed.
    with new_dir(OUT) as folder:
        parity = write_checked(run, folder, source, params, BATTERY)
        files = weights(folder)
        write_text(folder / "MODEL_CARD.md", model_card(source, card_inputs(lineage, parity, files)))
        write_manifest(folder, kind="export", version=1, counts=counts, parents=lineage)
    checked = {name: facts for name, facts in parity.items() if isinstance(facts, dict)}
    run.metrics(
        {
            **counts,
            "bytes": {name: facts["bytes"] for name, facts in files.items()},
            "parity": checked,
            "llama_cpp_checked": int("llama_cpp_f32" in checked),
        }
    )
    run.attach(OUT / "MODEL_CARD.md")
    run.attach(OUT / "parity.json")


def write_checked(run: Run, folder: Path, source: Source, params: ExportParams, battery: Path) -> dict[str, Any]:
    """Write the model's files and compare every runtime with ours, on prompts of `battery`; what was compared."""
    # A small model's matrices are done before a second thread has woken; on a busy machine it is much slower.
    threads = min(machine().threads, 1 + source.config.parameter_count() // PARAMETERS_PER_THREAD)
    torch.set_num_threads(threads)
    probe = make_probe(
        source.tokenizer,
        context_tokens=source.config.context_tokens,
        documents=(document.text for document in read_documents(VAL)),
        conversations=battery_prompts(battery),
        prompts=params.parity_prompts,
        texts=params.parity_texts,
        windows=params.parity_windows,
    )
    if len(probe.windows) < params.parity_windows or len(probe.prompts) < params.parity_prompts:
        available = f"{len(probe.windows)} held-out documents and {len(probe.prompts)} held-out prompts"
        run.note(f"{available} are all there are to compare the runtimes on")
    write_files(folder, source, params)
    started = time.monotonic()
    workers = max(1, machine().threads // threads)
    parity = check_files(folder, source, probe, params, threads=threads, note=run.note, workers=workers)
    texts = (document.text for document in read_documents(VAL))
    check_perplexity(folder, source, texts, params, parity, threads=threads, note=run.note, workers=workers)
    run.fact(parity_seconds=round(time.monotonic() - started, 2))
    write_json(folder / "parity.json", parity)
    return parity


def weights(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of the files that hold weights."""
    paths = [folder / "hf" / "model.safetensors", *sorted(folder.glob("*.gguf"))]
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in paths
    }


def card_inputs(lineage: dict[str, str], parity: dict[str, Any], files: dict[str, Any]) -> CardInputs:
    paths = {name: Path("metrics") / f"{name}.json" for name in METRICS}
    digests = {f"{MANIFESTS[name].as_posix()}/manifest.json": digest for name, digest in lineage.items()}
    digests |= {path.as_posix(): sha256_file(path) for path in paths.values()}
    return CardInputs(
        manifests={name: read_manifest(MANIFESTS[name], name, 1) for name in ("raw", "instruct", "clean", "shards")},
        metrics={name: read_json(path) for name, path in paths.items()},
        params=read_yaml("params.yaml"),  # as written: other stages have checked their sections
        parity=parity,
        files=files,
        digests=digests,
    )


if __name__ == "__main__":
    stage_main("export", run)

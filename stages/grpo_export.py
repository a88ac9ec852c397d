"""Write the model of reinforcement learning for transformers and llama.cpp, and check that every runtime agrees with ours."""

from __future__ import annotations

from pathlib import Path

from athanor.base.artifacts import manifest_digest, new_dir, write_manifest
from athanor.export.params import ExportParams
from athanor.export.source import TOKENIZER, load_source
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from stages import export


def run(run: Run) -> None:
    publish(run, Path("models/grpo"), Path("models/grpo-export"))


def publish(run: Run, model: Path, out: Path) -> None:
    params = run.params("export", ExportParams)
    parents = {model.name: manifest_digest(model), "tokenizer": manifest_digest(TOKENIZER)}
    source = load_source(model, TOKENIZER, f"{params.name}-{model.name}", parents)
    counts = {"parameters": source.config.parameter_count()}
    with new_dir(out) as folder:
        parity = export.write_checked(run, folder, source, params, Path(f"data/{model.name}-eval/battery.jsonl"))
        write_manifest(folder, kind="export", version=1, counts=counts, parents=parents)
    run.metrics({**counts, "parity": {name: facts for name, facts in parity.items() if isinstance(facts, dict)}})
    run.attach(out / "parity.json")


if __name__ == "__main__":
    stage_main("grpo-export", run)

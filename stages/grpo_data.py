"""Attack a person's own rewards; then write the questions of training by reward, exercises or rows of their own."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from athanor.base.artifacts import digest, manifest_digest, new_dir, write_manifest, write_text
from athanor.base.errors import GateError
from athanor.rewards.gate import check
from athanor.rewards.params import KIND, VERSION, GrpoDataParams
from athanor.rewards.questions import exercise_rows, file_rows
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.sources.battery_params import BatteryParams
from athanor.text.conversations import searched_items
from athanor.text.documents import split_of

BATTERY, OUT = Path("data/battery"), Path("data/grpo")


def run(run: Run) -> None:
    params = run.params("grpo_data", GrpoDataParams)
    check()
    held_out = {digest(asdict(item)["prompt"]) for item in searched_items(BATTERY / "items.jsonl")}
    sides: dict[str, list[Any]] = {"train": [], "val": []}
    rows = file_rows(params.files) if params.files else exercise_rows(params, run.params("battery", BatteryParams))
    for key, row in rows:
        if digest(row["prompt"]) in held_out:
            what = f"a question of the battery would be trained on: {row['prompt'][-1]['content']!r:.80}"
            raise GateError("battery held out", what, where="grpo_data", fix="remove it, or its category")
        # A tenth of the keys, as instruct divides exercises.
        sides[split_of(f"validation/{params.seed}/{key}", 0.1)].append(row)
    sides["val"] = sorted(sides["val"], key=digest)[: params.validation_rows]
    counts = {side: len(rows) for side, rows in sides.items()}
    with new_dir(OUT) as folder:
        for side, rows in sides.items():
            write_text(folder / f"{side}.jsonl", "".join(f"{json.dumps(row, sort_keys=True)}\n" for row in rows))
        write_manifest(folder, kind=KIND, version=VERSION, counts=counts, parents={"battery": manifest_digest(BATTERY)})
    run.metrics({"questions": counts})


if __name__ == "__main__":
    stage_main("grpo-data", run)

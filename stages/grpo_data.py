"""Draw the questions of training by reward, and let each of them prove that it pays what is right and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from athanor.base.artifacts import manifest_digest, new_dir, write_manifest
from athanor.base.errors import GateError, InputError
from athanor.evaluation.item_gate import check_items
from athanor.evaluation.scoring import scorable
from athanor.rewards.params import KIND, VERSION, GrpoDataParams
from athanor.rewards.questions import draw_questions
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.sources.battery_params import BatteryParams
from athanor.text.conversations import Item, searched_items, write_rows

BATTERY, OUT = Path("data/battery"), Path("data/grpo")


def run(run: Run) -> None:
    params, battery = run.params("grpo_data", GrpoDataParams), run.params("battery", BatteryParams)
    items: dict[str, list[Item]] = {}
    left_out: Counter[str] = Counter()
    for side, exercises in draw_questions(params, battery).items():
        items[side], unscorable = scorable(exercise.item for exercise in exercises)
        left_out.update(unscorable)
    if left_out:
        names = ", ".join(f"{category} ({count})" for category, count in sorted(left_out.items()))
        run.note(f"left out, because nothing on this machine confines programs that a model writes: {names}")
    if not items["train"]:
        fix = "name other categories, or run it on Linux"
        raise InputError("this machine can score none of the questions", where="grpo_data.categories", fix=fix)
    drawn = [item for side in items.values() for item in side]
    compared = check_apart(drawn, list(searched_items(BATTERY / "items.jsonl")))
    check_items(drawn, workers=machine().workers)
    counts = {side: dict(sorted(Counter(item.category for item in rows).items())) for side, rows in items.items()}
    with new_dir(OUT) as folder:
        for side, rows in items.items():
            write_rows(folder / f"{side}.jsonl", rows)
        parents = {"battery": manifest_digest(BATTERY)}
        write_manifest(folder, kind=KIND, version=VERSION, counts=counts, parents=parents, left_out=dict(left_out))
    run.metrics({"questions": counts, "left_out": dict(left_out), "questions_compared_with_battery": compared})


def check_apart(drawn: list[Item], held_out: list[Item]) -> int:
    """GateError for a question of the battery among those drawn; returns how many were compared."""
    prompts = {item.prompt for item in held_out}
    for item in drawn:
        if item.prompt in prompts:
            what = f"a question of the battery is drawn: {item.prompt[-1].content[:80]!r}"
            fix = "remove the category from grpo_data, or the question from the file that battery.written names"
            raise GateError("battery held out", what, where=f"grpo_data.categories.{item.category}", fix=fix)
    return len(drawn)


if __name__ == "__main__":
    stage_main("grpo-data", run)

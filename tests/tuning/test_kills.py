"""Every training of a side graph, killed again and again, ends within the noise of undisturbed seeds. Minutes.

ATHANOR_KILLS=10 kills at ten moments.
"""

from __future__ import annotations

import json
import os
import statistics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl")
from athanor.base.artifacts import new_dir, write_manifest
from athanor.rewards.params import VERSION
from tests.tuning.test_grpo import QUESTIONS, REWARDS
from tests.tuning.world import World

KILLS = int(os.environ.get("ATHANOR_KILLS", "2"))
ROWS = 4 + 10 // KILLS  # of numbers that a process lives: a checkpoint or two of 40 steps with 20 saves
PAIRS = [
    {name: [{"role": role, "content": text}] for name, role, text in (
        ("prompt", "user", f"Name {n}"), ("chosen", "assistant", f"It is {n}."), ("rejected", "assistant", "no " * (n % 5 + 1)))}
    for n in range(80)
]  # fmt: skip
SHARED = {"saves": 20, "rows_at_once": 4}
TRAININGS = {
    "lora": ("tune", {"rows_per_step": 4, "epochs": 2.0, "lr": 0.01}, "val_loss"),
    "full": ("tune", {"rows_per_step": 4, "epochs": 2.0, "lr": 0.003}, "val_loss"),
    "dpo": ("dpo", {"pairs_per_step": 4, "epochs": 2.0, "lr": 0.003}, "val_loss"),
    "grpo": ("grpo", {"steps": 40, "questions_per_step": 2, "answers_per_question": 8, "rows_at_once": 16, "lr": 0.01,
                      "max_new_tokens": 8, "rewards": {"letters": 1.0}}, "val_reward"),
}  # fmt: skip


def made(folder, name, seed):
    stage, settings, _ = TRAININGS[name]
    folder.mkdir()
    method = "lora" if name == "lora" else "full"
    world = World(folder, side={"base": "base", "method": method}, **{stage: {**SHARED, **settings, "seed": seed}})
    if stage == "tune":
        ids = [[(n * k) % 90 for k in range(1, 12)] for n in range(80)]
        with new_dir(folder / "data/tune") as out:
            for split, rows in (("train", ids), ("val", ids[:8])):
                pq.write_table(pa.table({"input_ids": rows, "labels": rows}), out / f"{split}.parquet")
            write_manifest(out, kind="tune-data", version=1, counts={"train": 80, "val": 8}, parents={})
    elif stage == "dpo":
        world.data(stage, 1, train=PAIRS, val=PAIRS[:8])
    else:
        (folder / "rewards").mkdir()
        (folder / "rewards/mine.py").write_text(REWARDS)
        world.data(stage, VERSION, train=QUESTIONS, val=QUESTIONS[:8])
    return world


def score(world, stage, reading):
    done = world.run("-m", f"stages.{stage}")
    assert done.returncode == 0, done.stderr
    return json.loads((world.folder / f"metrics/{stage}.json").read_text())["after"][reading]


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_that_is_killed_again_and_again_ends_within_the_noise(name, tmp_path):
    stage, _, reading = TRAININGS[name]
    undisturbed = [score(made(tmp_path / str(seed), name, seed), stage, reading) for seed in (1, 2, 3)]
    world = made(tmp_path / "killed", name, 4)
    for _ in range(KILLS):
        world.kill(stage, ROWS)
    ended = score(world, stage, reading)
    spread = max(statistics.stdev(undisturbed), 0.01 * abs(statistics.mean(undisturbed)))
    print(f"{name}: {reading} {ended:.4f} after {KILLS} kills; undisturbed {undisturbed}")
    assert abs(ended - statistics.mean(undisturbed)) <= 3 * spread

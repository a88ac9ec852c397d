"""GRPO by TRL on a tiny base: a reward rises, a run that was killed ends, every reading is there, faults are told. 60 s."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")
from athanor.rewards.params import VERSION
from athanor.tuning.trainer import READINGS
from tests.tuning.world import World

QUESTIONS = [{"prompt": [{"role": "user", "content": f"Say {number}"}]} for number in range(40)]
REWARDS = '''
def letters(reply, **_):
    """The share of letters from a to m."""
    return sum("a" <= char <= "m" for char in reply) / max(1, len(reply))


def nothing(reply, **_):
    return 0.0


EXAMPLES = {"letters": [], "nothing": []}
UNFINISHED = ("letters", "nothing")
'''


def world(folder, **grpo):
    sizes = {"questions_per_step": 4, "answers_per_question": 8, "rows_at_once": 16, "max_new_tokens": 8, "saves": 4}
    made = World(folder, grpo={**sizes, "steps": 24, "lr": 0.01, **grpo})
    (folder / "rewards").mkdir()
    (folder / "rewards" / "mine.py").write_text(REWARDS)
    made.data("grpo", VERSION, train=QUESTIONS, val=QUESTIONS[:8])
    return made


def test_a_reward_rises_in_a_run_that_was_killed_and_every_reading_is_in_its_journal(tmp_path):
    made = world(tmp_path, rewards={"letters": 1.0}, kl_coefficient=0.001, steps_per_round=2)
    metrics = made.killed_and_resumed("grpo")
    assert metrics["after"]["val_reward"] > metrics["before"]["val_reward"] + 0.3
    rows = [row["m"] for row in made.journal("grpo") if "policy.sampler_difference" in row.get("m", {})]
    assert rows[0]["policy.sampler_difference"] < 1e-5 and rows[0]["policy.sampler_ratio_min"] > 0.999
    found = {name for row in made.journal("grpo") for name in row.get("m", {})}
    of_dpo = {"policy.margin", "policy.accuracy", "policy.chosen", "policy.rejected", "val_loss"}
    expected = set(READINGS.values()) - of_dpo - {"policy.format_share"}
    assert expected | {"rewards.letters.mean"} <= found
    (answers,) = tmp_path.glob(".athanor/runs/grpo-*/files/completions.jsonl")
    assert all(name in answers.read_text() for name in ("prompt", "answer", "letters"))


def test_a_reward_of_nothing_is_found_by_health(tmp_path):
    made = world(tmp_path, rewards={"nothing": 1.0})
    assert made.run("-m", "stages.grpo").returncode == 0
    told = [row["rule"] for row in made.journal("grpo") if row.get("event") == "finding"]
    assert "reward_flat" in told

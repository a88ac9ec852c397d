"""The questions of training by reward: the same bytes again, none of the battery's, and validation apart from training."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from athanor.base.artifacts import manifest_digest, read_manifest, verify_files
from athanor.base.errors import AthanorError, GateError
from athanor.base.strict import build
from athanor.rewards.shipped import item_of
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises.build import draw_exercises, training_conversations
from athanor.sources.instruct_params import ExercisesSource
from stages import grpo_data
from tests.stages.conftest import ROOT, run_stage, settle, write_battery

COUNTS = {"addition": 60, "counting": 40, "http_status": 40, "line_count": 40, "worked_addition": 60}
PARAMS = {
    "battery": {"seed": 2, "held_out_fraction": 0.1, "development_fraction": 0.2, "written": None,
                "categories": dict.fromkeys(COUNTS, 20)},
    "grpo_data": {"seed": 1, "categories": COUNTS, "validation_rows": 12},
}  # fmt: skip
FILES = ("train.jsonl", "val.jsonl", "manifest.json")


def battery() -> BatteryParams:
    return build(BatteryParams, PARAMS["battery"], "battery")


def execute(root: Path, patch: pytest.MonkeyPatch, **changes: Any) -> dict[str, bytes]:
    root.mkdir(exist_ok=True)
    settle(patch, root)
    write_battery(root, [each.item for name in COUNTS for each in draw_exercises(name, 20, "2", True, battery())])
    if not Path("rewards").exists():
        shutil.copytree(ROOT / "rewards", "rewards")
    run_stage(grpo_data, PARAMS | {"grpo_data": PARAMS["grpo_data"] | changes})
    return {name: (root / "data/grpo" / name).read_bytes() for name in FILES}


def rows_of(side: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"data/grpo/{side}.jsonl").read_text().splitlines()]


def test_exercises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = execute(tmp_path / "one", monkeypatch)
    manifest = read_manifest("data/grpo", "grpo-data", 2)
    verify_files("data/grpo")
    assert manifest["parents"] == {"battery": manifest_digest("data/battery")}
    train, val = rows_of("train"), rows_of("val")
    assert manifest["counts"] == {"train": len(train), "val": len(val)} and len(val) == 12 and len(train) > 180
    for row in train + val:
        item = item_of(row["item"])
        assert row["category"] == item.category in COUNTS
        assert row["prompt"] == [{"role": each.role, "content": each.content} for each in item.prompt]
    asked = [{json.dumps(row["prompt"]) for row in rows} for rows in (train, val)]
    assert not asked[0] & asked[1]
    # With one seed for both, what instruct validates on is not trained on.
    source = ExercisesSource("exercises", "e", {name: 400 for name in COUNTS}, 0, 0.0)
    conversations = training_conversations(source, PARAMS["grpo_data"]["seed"], 0.05, battery())
    validated = {row.messages[0].content for row in conversations if row.split == "val"}
    assert len(validated) > 9 and not validated & {row["prompt"][-1]["content"] for row in train}
    assert execute(tmp_path / "two", monkeypatch) == first
    assert execute(tmp_path / "three", monkeypatch, seed=7)["val.jsonl"] != first["val.jsonl"]


def test_rows_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(tmp_path / "mine").mkdir()
    asked = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(100)]
    asked[7]["prompt"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ünd 7 + 1?"}]
    (tmp_path / "mine/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    execute(tmp_path, monkeypatch, categories=None, files="mine/*.jsonl")
    train, val = rows_of("train"), rows_of("val")
    assert len(train + val) > 98 and 3 < len(val) < 13
    found = {row["answer"]: row["prompt"] for row in train + val}
    assert found["8"] == asked[7]["prompt"] and found["9"] == [{"role": "user", "content": "What is 8 + 1?"}]


def test_a_question_of_the_battery_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(tmp_path, monkeypatch)
    before = (tmp_path / "data/grpo/manifest.json").read_bytes()
    write_battery(tmp_path, [replace(item_of(rows_of("train")[3]["item"]), category="written")])
    with pytest.raises(GateError, match="a question of the battery would be trained on"):
        run_stage(grpo_data, PARAMS)
    assert (tmp_path / "data/grpo/manifest.json").read_bytes() == before


def test_a_reward_that_can_be_cheated_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "rewards", tmp_path / "rewards")
    file = tmp_path / "rewards/mine.py"
    file.write_text(file.read_text().replace("len(reply) > 1000 or ", ""))
    with pytest.raises(GateError, match="number pays 1 for a repeated answer"):
        execute(tmp_path, monkeypatch)
    assert not (tmp_path / "data/grpo").exists()


@pytest.mark.parametrize(
    ("changes", "where", "fix"),
    [
        ({"categories": {"adition": 3}}, "categories.adition", "did you mean 'addition'?"),
        ({"categories": {"agreement": 3}}, "categories.agreement", "remove it"),
        ({"categories": {"python_functions": 3}}, "grpo_data.categories.python_functions", "remove it"),
        ({"categories": {"addition": 0}}, "grpo_data.categories", "a count ≥ 1"),
        ({"categories": None}, "grpo_data.categories", "or files"),
        ({"files": "mine.jsonl"}, "grpo_data.categories", "not both"),
        ({"categories": None, "files": "mine.jsonl"}, "mine.jsonl:2", ""),
        ({"categories": None, "files": "none.jsonl"}, "none.jsonl", "add the files"),
    ],
)
def test_errors_name_the_key_or_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], where: str, fix: str
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    with pytest.raises(AthanorError) as caught:
        execute(tmp_path, monkeypatch, **changes)
    assert caught.value.where == where and fix in caught.value.fix
    assert not (tmp_path / "data/grpo").exists()

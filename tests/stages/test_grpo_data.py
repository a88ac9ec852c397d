"""The questions of training by reward: the same bytes again, none of the battery's, and validation apart from training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from athanor.base.artifacts import manifest_digest, read_json, read_manifest, verify_files
from athanor.base.errors import GateError, InputError, ParamsError
from athanor.base.strict import build, read_yaml
from athanor.evaluation import scoring
from athanor.rewards import questions
from athanor.rewards.params import GrpoDataParams
from athanor.runtime.closure import RL
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises.build import (
    BATTERY_ONLY,
    CATEGORIES,
    draw_exercises,
    is_held_out,
    training_conversations,
)
from athanor.sources.instruct_params import ExercisesSource
from athanor.text.conversations import Item, read_items
from stages import grpo_data
from tests.stages.conftest import ROOT, run_stage, settle, write_battery

COUNTS = {
    "addition": 30,
    "counting": 20,
    "http_status": 20,
    "line_count": 20,
    "python_functions": 6,
    "worked_addition": 30,
}
PARAMS = {
    "battery": {"seed": 2, "held_out_fraction": 0.1, "development_fraction": 0.2, "written": None,
                "categories": dict.fromkeys(COUNTS, 20)},
    "grpo_data": {"seed": 1, "categories": COUNTS, "validation_per_category": 5},
}  # fmt: skip
FILES = ("train.jsonl", "val.jsonl", "manifest.json")


def battery() -> BatteryParams:
    return build(BatteryParams, PARAMS["battery"], "battery")


def battery_exercises() -> list[Any]:
    return [exercise for name in COUNTS for exercise in draw_exercises(name, 20, "2", True, battery())]


def execute(root: Path, patch: pytest.MonkeyPatch, **changes: Any) -> dict[str, bytes]:
    root.mkdir(exist_ok=True)
    settle(patch, root)
    write_battery(root, [exercise.item for exercise in battery_exercises()])
    run_stage(grpo_data, PARAMS | {"grpo_data": PARAMS["grpo_data"] | changes})
    return {name: (root / "data/grpo" / name).read_bytes() for name in FILES}


def test_the_same_params_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = execute(tmp_path / "one", monkeypatch)
    manifest = read_manifest("data/grpo", "grpo-data", 1)
    verify_files("data/grpo")
    assert manifest["counts"] == {"train": COUNTS, "val": dict.fromkeys(COUNTS, 5)}
    assert manifest["parents"] == {"battery": manifest_digest("data/battery")} and manifest["left_out"] == {}
    facts = read_json("metrics/grpo_data.json")
    assert facts["questions"] == manifest["counts"]
    assert facts["questions_compared_with_battery"] == sum(COUNTS.values()) + 5 * len(COUNTS)
    assert execute(tmp_path / "two", monkeypatch) == first
    other = execute(tmp_path / "three", monkeypatch, seed=7)
    assert other["train.jsonl"] != first["train.jsonl"] and other["val.jsonl"] != first["val.jsonl"]


def test_the_sides_share_no_key_and_no_question_with_each_other_nor_with_the_battery() -> None:
    drawn = questions.draw_questions(build(GrpoDataParams, PARAMS["grpo_data"], "grpo_data"), battery())
    sides = {**drawn, "battery": battery_exercises()}
    for part in (lambda exercise: exercise.key, lambda exercise: exercise.item.prompt):
        sets = [{part(exercise) for exercise in exercises} for exercises in sides.values()]
        assert sum(map(len, sets)) == len(set.union(*sets))
    prompts = [exercise.item.prompt for exercises in drawn.values() for exercise in exercises]
    assert len(prompts) == len(set(prompts))
    assert not any(is_held_out(exercise, battery()) for exercises in drawn.values() for exercise in exercises)


def test_what_instruct_validates_on_is_not_trained_on() -> None:
    """With one seed for both: the keys of validation are divided by the same hash."""
    source = ExercisesSource("exercises", "e", {"line_count": 400, "addition": 400}, 0, 0.0)
    rows = training_conversations(source, PARAMS["grpo_data"]["seed"], 0.05, battery())
    validated = {row.key for row in rows if row.split == "val"}
    drawn = questions.draw_questions(GrpoDataParams(1, {"line_count": 400, "addition": 400}, 5), battery())
    assert len(validated) > 9 and not validated & {exercise.key for exercise in drawn["train"]}


def test_rows_are_read_as_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(tmp_path, monkeypatch)
    for side, share in (("train", COUNTS), ("val", dict.fromkeys(COUNTS, 5))):
        items = list(read_items(f"data/grpo/{side}.jsonl"))
        assert {name: sum(item.category == name for item in items) for name in COUNTS} == share
        functions = [item for item in items if item.kind == "code"]
        assert all(len(item.tests) > 9 for item in functions)


def test_a_question_of_the_battery_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(tmp_path, monkeypatch)
    before = (tmp_path / "data/grpo/manifest.json").read_bytes()
    item = next(read_items("data/grpo/val.jsonl"))
    write_battery(tmp_path, [replace(item, category="written")])
    with pytest.raises(GateError, match="a question of the battery is drawn") as caught:
        run_stage(grpo_data, PARAMS)
    assert caught.value.where == f"grpo_data.categories.{item.category}"
    assert (tmp_path / "data/grpo/manifest.json").read_bytes() == before


def test_a_question_whose_checker_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = grpo_data.draw_questions

    def planted(*params: Any) -> Any:
        drawn = real(*params)
        exercise = drawn["train"][0]
        drawn["train"][0] = replace(exercise, item=replace(exercise.item, answer="999"))
        return drawn

    monkeypatch.setattr(grpo_data, "draw_questions", planted)
    with pytest.raises(GateError, match="refuses its accepted"):
        execute(tmp_path, monkeypatch)


def test_a_machine_without_a_sandbox_leaves_functions_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scoring, "isolation", lambda: "")
    execute(tmp_path / "one", monkeypatch)
    manifest = read_manifest("data/grpo", "grpo-data", 1)
    assert manifest["left_out"] == {"python_functions": 11} and "python_functions" not in manifest["counts"]["train"]
    assert "python_functions (11)" in capsys.readouterr().err
    with pytest.raises(InputError, match="can score none of the questions"):
        execute(tmp_path / "two", monkeypatch, categories={"python_functions": 2})


@pytest.mark.parametrize(
    ("changes", "where", "what", "fix"),
    [
        ({"categories": {"adition": 3}}, "categories.adition", "unknown exercise category", "did you mean 'addition'?"),
        ({"categories": {"agreement": 3}}, "categories.agreement", "only the battery asks this", "remove it"),
        ({"categories": {"addition": 0}}, "categories.addition", "0 is out of range", "use a value ≥ 1"),
        ({"categories": {}}, "categories", "no category is trained", "copy them from presets/default.yaml"),
        ({"validation_per_category": -1}, "validation_per_category", "-1 is out of range", "from 0 to 100000"),
        ({"categorys": {}}, "categorys", "unknown key", "did you mean 'grpo_data.categories'?"),
        ({"categories": {"line_count": 90_000}}, "categories.line_count", "of 90000 questions", "lower the count"),
    ],
)
def test_errors_name_the_key_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], where: str, what: str, fix: str
) -> None:
    with pytest.raises(ParamsError) as caught:
        execute(tmp_path, monkeypatch, **changes)
    assert caught.value.where == f"grpo_data.{where}"
    assert what in caught.value.what and fix in caught.value.fix
    assert not (tmp_path / "data/grpo").exists()


def test_what_is_compared_and_never_written_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATEGORIES, "choice", BATTERY_ONLY["agreement"])
    with pytest.raises(ParamsError, match="cannot be asked") as caught:
        questions.draw_questions(GrpoDataParams(1, {"choice": 3}, 1), battery())
    assert caught.value.where == "grpo_data.categories.choice" and "remove it" in caught.value.fix


def test_the_graph_holds_the_stages_of_the_schema() -> None:
    graph = read_yaml(ROOT / RL / "grpo.yaml")["stages"]
    assert [*graph] == ["grpo-data", "grpo", "grpo-eval", "grpo-export"]


def test_items_are_the_batterys_but_for_more_tests() -> None:
    """Tests are added to functions only; everything else is scored as the battery scores it."""
    drawn = questions.draw_questions(build(GrpoDataParams, PARAMS["grpo_data"], "grpo_data"), battery())
    items: list[Item] = [exercise.item for exercises in drawn.values() for exercise in exercises]
    assert all(bool(item.tests) == (item.kind == "code") for item in items)

"""What a plan expects after a change of preset, text or conversations, before the stages in between have run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from athanor.base.artifacts import write_json
from athanor.cli.plan.change import Change
from athanor.cli.plan.forecast import PastRun, _changed
from athanor.runtime import presets
from athanor.runtime.facts import flatten
from athanor.runtime.schema import check_values

ROOT = Path(__file__).resolve().parents[2]
# Tokens of the rows of an epoch as the stages made them, on Python 3.11.
MADE = {"micro": 691 * 128, "default": 5141 * 256}
TALK = {
    "messages": [{"role": "user", "content": "Who is it?"}, {"role": "assistant", "content": "It is " + "me " * 20}]
}


def preset(name: str) -> dict:
    return presets.values(ROOT / "presets" / f"{name}.yaml")


def recorded(root: Path, values: dict, rows: int, context: int, corpus: int = 0, **read: int) -> None:
    """dvc.lock and the rows of a build with these parameters."""
    stages = {
        "download": {"params": {"params.yaml": {name: values[name] for name in ("download", "instruct", "battery")}}},
        "sft": {"params": {"params.yaml": {name: value for name, value in values.items() if name != "download"}}},
    }
    stages = {name: {"cmd": f"python -m stages.{name}", **row} for name, row in stages.items()}
    stages["download"]["deps"] = [{"path": "corpus", "md5": "0" * 32, "size": corpus}]
    write_json(root / "dvc.lock", {"schema": "2.0", "stages": stages})
    write_json(root / "data/sft/manifest.json", {"counts": {"train": {"rows": rows}}, "context_tokens": context})
    write_json(root / "metrics/sft_data.json", {"sources": {name: {"read": count} for name, count in read.items()}})


@pytest.mark.parametrize("before, after", [("micro", "default"), ("default", "micro"), ("default", "default")])
def test_fine_tuning_after_a_change_of_preset_is_that_preset_s_within_a_tenth(tmp_path, before, after):
    values = preset(before)
    recorded(tmp_path, values, MADE[before] // values["model"]["context_tokens"], values["model"]["context_tokens"])
    change = Change(tmp_path, check_values(preset(after)))
    assert change.conversation_tokens() == pytest.approx(MADE[after], rel=0.1)
    # Of the default on an idle machine eval took 25.0 s and sft-data 5.4 s, of micro 3.0 s and 0.3 s.
    slower = {"micro": -1, "default": 1}[after] if before != after else 0
    assert change.factor("eval") == pytest.approx(8.0**slower, rel=0.25)
    assert (change.factor("sft-data") - 1) * slower >= 0 and change.factor("no such stage") == 1.0


def test_text_that_has_grown_takes_longer_with_the_same_parameters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = preset("micro")
    values["download"]["sources"] = [{"type": "files", "name": "own", "globs": ["corpus/*.txt"]}]
    values["mixture"]["sources"] = {"own": {"share": 1.0, "max_epochs": 4.0}}
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/book.txt").write_text("x" * 40_000_000)
    recorded(tmp_path, values, 10, 128, corpus=4_000_000)
    change = Change(tmp_path, check_values(values))
    assert 5 < change.factor("clean") < 10 and 4 < change.factor("download") < 10
    assert change.factor("train-tokenizer") == 1.0  # it reads a sample
    assert change.conversation_tokens() == pytest.approx(1280, rel=0.01)


def test_conversations_of_one_s_own_count_as_often_as_they_are_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = preset("micro")
    values["instruct"]["sources"] = [{"type": "messages", "name": "talks", "files": "talks.jsonl"}]
    values["sft_data"] |= {"sources": {"talks": {}}, "source_priority": [], "replay_share": 0.0}
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(TALK) + "\n" for _ in range(40)))
    recorded(tmp_path, values, 10, 128, talks=20)  # there were half as many then
    planned = {**values, "sft_data": {**values["sft_data"], "sources": {"talks": {"repeats": 10, "follow_ups": 10}}}}
    grown, repeated = (Change(tmp_path, check_values(each)).conversation_tokens() for each in (values, planned))
    assert grown == pytest.approx(2 * 1280, rel=0.02) and repeated == pytest.approx(30 * grown, rel=0.02)


def test_runs_of_the_planned_parameters_are_taken_as_they_are(tmp_path):
    values = preset("micro")
    recorded(tmp_path, values, MADE["micro"] // 128, 128)
    change = Change(tmp_path, check_values(preset("default")))

    def run(seconds: float, params: dict) -> PastRun:
        return PastRun(int(seconds), seconds, None, None, params, {}, {})

    lock, planned = change.params("sft"), dict(flatten({"eval": preset("default")["eval"]}))
    assert _changed("eval", planned, [run(25.0, planned), run(3.0, lock)], change) == 25.0
    (other,) = [run(3.0, change.params("eval"))]
    assert _changed("eval", planned, [other], change) == pytest.approx(3.0 * change.factor("eval"))
    assert _changed("eval", planned, [], change) is None


def test_without_a_record_that_can_be_read_nothing_is_expected_to_change(tmp_path):
    built = check_values(preset("default"))
    change = Change(tmp_path, built)
    assert change.factor("eval") == 1.0 and change.conversation_tokens() is None
    recorded(tmp_path, {**preset("micro"), "model": {"of": "an older version"}}, 10, 128)
    assert Change(tmp_path, built).factor("clean") == 1.0

"""A battery that an answer without thought passes is refused before DVC begins, by `athanor repro` and `athanor plan`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.base.errors import GateError
from athanor.cli import battery_gate, cli, repro
from athanor.cli.plan import main as plan
from athanor.runtime import presets

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with `micro` and twelve written questions that one sentence answers."""
    yaml = YAML(typ="safe")
    params = yaml.load(presets.complete(ROOT / "presets" / "micro.yaml"))
    params["battery"] |= {"written": "battery/mine.jsonl", "development_fraction": 0.0, "categories": {"counting": 2}}
    yaml.dump(params, tmp_path / "params.yaml")
    (tmp_path / "battery").mkdir()
    write(tmp_path, ["The same."] * 12)
    (tmp_path / "dvc.yaml").write_text(
        "stages:\n  download:\n    cmd: python -m stages.download\n    outs: [data/raw]\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(root: Path, answers: list[str]) -> None:
    rows = [
        {
            "category": "mine",
            "kind": "exact",
            "prompt": f"Question {n}?",
            "accepted": [answer],
            "rejected": ["x", "y"],
            "difficulty": "easy",
        }
        for n, answer in enumerate(answers)
    ]
    (root / "battery" / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_repro_and_plan_refuse_it_before_dvc_begins(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("DVC was asked")

    monkeypatch.setattr(repro.side, "command_runner", never)
    monkeypatch.setattr(plan.dvc_view, "open_repo", never)
    for name, status in (("repro", 1), ("plan", 2)):
        monkeypatch.setattr("sys.argv", ["athanor", name])
        assert cli.main() == status
        told = capsys.readouterr().err
        assert (
            "mine: gate 'battery' failed" in told
            and "'The same.'" in told
            and "100% of 12 items" in told
            and "Fix:" in told
        )


def test_another_answer_for_each_question_is_taken(root: Path) -> None:
    battery = plan.check_file(root / "params.yaml")["battery"]
    with pytest.raises(GateError, match="mine"):
        battery_gate.check_battery(root, battery)
    write(root, [f"Answer {chr(97 + n)}." for n in range(12)])
    battery_gate.check_battery(root, battery)


def test_what_download_recorded_is_not_searched_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    battery = plan.check_file(root / "params.yaml")["battery"]
    searched: list[object] = []
    monkeypatch.setattr(battery_gate, "check_floors", searched.append)
    lock = root / "dvc.lock"
    YAML(typ="safe").dump({"stages": {"download": {"params": {"params.yaml": {"battery": asdict(battery)}}}}}, lock)
    battery_gate.check_battery(root, battery)
    assert not searched
    battery_gate.check_battery(root, replace(battery, seed=9))
    os.utime(lock, (0, 0))  # written before the questions were
    battery_gate.check_battery(root, battery)
    lock.write_text("")  # as a kill leaves it
    battery_gate.check_battery(root, battery)
    assert len(searched) == 3

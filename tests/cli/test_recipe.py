"""`athanor recipe` as a person types it: measured here, for another device, kept as a preset."""

from __future__ import annotations

import json
import shutil

import pytest

from athanor.base.errors import ParamsError
from athanor.cli import cli
from athanor.cli.plan import main as plan
from athanor.runtime import presets
from athanor.runtime.schema import check_file, check_values
from athanor.sizing import speed
from tests.e2e.clone import ROOT


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "presets", tmp_path / "presets")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_written_lines_are_a_params_file_with_the_comments_it_had(project, monkeypatch, capsys):
    monkeypatch.setattr(speed.Measured, "budget_seconds", 0.05)
    assert cli.call("recipe", ["--hours", "3", "--write"]) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out and "memory" in out and "kWh" in out
    assert max(map(len, out.splitlines())) <= 150 and len(out.splitlines()) < 60
    sections = check_file("params.yaml")
    assert sections["model"].dim % 64 == 0 and sections["pretrain"].tokens > 1_000_000
    assert "# warmup, constant, cooldown" in (project / "params.yaml").read_text(encoding="utf-8")
    assert (project / ".athanor" / "speeds.json").is_file()
    assert cli.call("recipe", ["--tokens", "2e6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= 2_000_000


def test_a_plan_that_measures_tells_memory_by_part_and_energy(project, monkeypatch):
    monkeypatch.setattr(speed.Measured, "budget_seconds", 0.05)
    memory, energy = plan.measure()(7200.0)
    assert "weights 14.56 MB, " in memory and "logits " in memory  # 4 bytes for each of 3.6M parameters
    assert energy == "energy: about 0.09 kWh at 45 W"


def test_a_recipe_for_a_card_that_is_not_here_becomes_a_preset(project, capsys):
    words = ["--hours", "8", "--device", "RTX 4090", "--from", "plasma-1.1", "--save", "night"]
    assert cli.call("recipe", words) == 0
    out = capsys.readouterr().out
    assert "RTX 4090" in out and "on each of 4" in out and "within a factor" in out
    assert cli.call("recipe", ["--tokens", "1e8", "--device", "mi50", "--from", "plasma-1.1"]) == 0
    assert "at least" in capsys.readouterr().out
    assert (project / "presets/night.yaml").read_text(encoding="utf-8").startswith("# ")
    values = presets.values(project / "presets/night.yaml")
    base = presets.values(project / "presets/plasma-1.1.yaml")
    built = check_values(values)
    assert built["pretrain"].tokens < base["pretrain"]["tokens"]
    for mine, theirs in zip(values["download"]["sources"], base["download"]["sources"], strict=True):
        assert mine["name"] == theirs["name"] and mine["max_bytes"] < theirs["max_bytes"]
        assert {**mine, "max_bytes": 0, "min_bytes": 0, "min_documents": 0} == {
            **theirs, "max_bytes": 0, "min_bytes": 0, "min_documents": 0
        }  # fmt: skip


@pytest.mark.parametrize(
    "words, where",
    [
        (["--hours", "1", "--device", "rtx 9999"], "RTX"),
        (["--hours", "1", "--from", "plasma"], "plasma-1"),
        (["--hours", "1", "--from", "micro", "--write"], "--save"),
        ([], "--hours"),
    ],
)
def test_slips_are_told_with_what_was_meant(project, words, where):
    with pytest.raises(ParamsError, match=where):
        cli.call("recipe", [*words, *([] if "--device" in words else ["--device", "rtx 4090"])])


def test_presets_of_the_ladder_are_what_the_dial_gives(project, capsys):
    """Each says by which words it was made; a change of the laws shows here."""
    made = {
        name: text.split("By athanor recipe ")[1].split(";")[0]
        for name in presets.names(project / "presets")
        if "By athanor recipe " in (text := (project / f"presets/{name}.yaml").read_text(encoding="utf-8"))
    }
    for name, words in made.items():
        if "--device" not in words:
            continue
        import shlex

        before = presets.values(project / f"presets/{name}.yaml")
        assert cli.call("recipe", [*shlex.split(words), "--save", name]) == 0
        assert presets.values(project / f"presets/{name}.yaml") == before, name
    assert {"evening", "one-gpu-hour", "one-gpu-day"} <= made.keys()  # evening is of a machine that was measured

"""The learning-rate probe on a model of milliseconds: its curve, kill and resume, and what DVC makes of it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ruamel.yaml import YAML

from athanor.base.artifacts import read_json
from athanor.base.errors import GateError, Interrupted, ParamsError
from athanor.base.strict import read_yaml
from athanor.cli import probe
from athanor.cli import probe as command
from athanor.runtime import presets
from athanor.runtime.run import Run
from athanor.runtime.schema import check_file
from stages import probe_lr
from tests.e2e.clone import Clone, environment
from tests.stages import test_train_stages
from tests.stages.conftest import PARAMS, run_stage, settle
from tests.stages.test_train_stages import MODEL, PRETRAIN

ROOT = Path(__file__).resolve().parents[2]
inputs, work = test_train_stages.inputs, test_train_stages.work
# One row a step: enough steps in a tenth of a second for a curve with both sides.
RECIPE = PRETRAIN | {"lr": 0.016, "tokens": 2400, "batch_tokens": 16, "warmup_tokens": 240}
PROBE = PARAMS["probe_lr"]
RATES = [0.0025, 0.00625, 0.0156, 0.0391, 0.0977]
RESULTS = ("metrics/probe_lr.json", "plots/probe_lr.tsv")


def execute(stop_after: int | None = None, **changes: dict) -> Run:
    """The stage's body here; `stop_after` asks it to stop at the n-th look."""
    params = {"model": MODEL, "pretrain": RECIPE, "probe_lr": PROBE}
    return run_stage(probe_lr, {name: values | changes.get(name, {}) for name, values in params.items()}, stop_after)


def results() -> list[bytes]:
    return [Path(name).read_bytes() for name in RESULTS]


@pytest.fixture(scope="module")
def probed(inputs, tmp_path_factory):
    """What an uninterrupted probe writes, and the folder it is in."""
    root = tmp_path_factory.mktemp("probed") / "work"
    shutil.copytree(inputs, root, symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        settle(patch, root)
        execute()
        return results(), root


def no_training(*_: object) -> None:
    raise AssertionError("trained again")


def test_a_wide_grid_has_its_minimum_inside(probed):
    told = read_json(probed[1] / "metrics/probe_lr.json")
    bpb = [point["bpb"] for point in told["points"]]
    assert [point["lr"] for point in told["points"]] == RATES and told["tokens"] == 960
    inner = min(bpb[1:-1])
    assert told["inside"] and bpb[0] > inner + 0.1 and bpb[-1] > inner + 0.1
    assert RATES[0] < told["lowest"] <= told["optimum"] <= told["highest"] < RATES[-1]
    table = (probed[1] / "plots/probe_lr.tsv").read_text().splitlines()
    assert table[0] == "lr\tbpb\tparabola" and len(table) == 6
    assert b"second" not in b"".join(probed[0]) and b"/tmp" not in b"".join(probed[0])


def test_scores_are_kept_and_checkpoints_are_not(work, probed, monkeypatch):
    shutil.copytree(probed[1] / ".athanor", work / ".athanor")
    assert len(list(Path(".athanor/slots/probe_lr").glob("*/point.json"))) == 5
    assert not list(Path(".athanor/slots").rglob("*.safetensors"))
    monkeypatch.setattr(probe_lr, "train", no_training)
    execute()
    assert results() == probed[0]
    # Another rate in the recipe has the same grid, and a wider grid the same points.
    execute(pretrain={"lr": 0.013})
    assert results() == probed[0]
    with pytest.raises(AssertionError, match="trained again"):
        execute(pretrain={"weight_decay": 0.2})


def test_stopped_within_a_run_it_goes_on_from_there(work, probed, monkeypatch):
    real, begun = probe_lr.train, []
    with pytest.raises(Interrupted, match="stopped at step"):
        execute(stop_after=90)  # a look before each rate and after each step: in the second of 60 steps
    monkeypatch.setattr(probe_lr, "train", lambda *words: begun.append(words) or real(*words))
    execute()
    assert results() == probed[0] and len(begun) == 4


VICTIM = """
import os, signal, sys
from athanor.runtime.run import Run
from tests.stages.test_probe_lr_stage import execute
notes, real = [], Run.note
def note(self, text):
    real(self, text)
    notes.append(text)
    if len(notes) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Run.note = note
execute()
"""


def test_killed_between_two_runs_it_ends_with_the_same_bytes(work, probed):
    env = environment(PYTHONPATH=str(ROOT), ATHANOR_THREADS="1", ATHANOR_DEVICE="cpu")
    command = [sys.executable, "-c", VICTIM]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list(Path(".athanor/slots/probe_lr").glob("*/DONE"))) == 2 and not Path(RESULTS[0]).exists()
    execute()
    assert results() == probed[0]


def test_a_best_rate_at_the_edge_adds_rates_there(work, probed):
    shutil.copytree(probed[1] / ".athanor", work / ".athanor")
    execute(pretrain={"lr": 0.0016})
    told = read_json(RESULTS[0])
    assert [point["lr"] for point in told["points"]] == [0.0004, 0.001, *RATES[:4]]
    assert told["inside"] and told["best"]["lr"] == 0.0156
    execute(pretrain={"lr": 0.0016}, probe_lr={"max_points": 5})
    told = read_json(RESULTS[0])
    assert not told["inside"] and told["extend"] == "higher" and told["optimum"] == 0.0156


def test_a_run_that_breaks_off_is_the_worst_and_no_error(work, probed, monkeypatch):
    shutil.copytree(probed[1] / ".athanor", work / ".athanor")
    for path in Path(".athanor/slots/probe_lr").glob("*/DONE"):
        facts = read_json(path.with_name("facts.json"))
        if facts["params"]["pretrain"]["lr"] == RATES[-1]:
            path.unlink()

    def broken(*words):
        raise GateError("finite steps", "50 steps in a row had a gradient that is not finite")

    monkeypatch.setattr(probe_lr, "train", broken)
    execute()
    told = read_json(RESULTS[0])
    assert told["points"][-1] == {
        "lr": RATES[-1],
        "bpb": None,
        "diverged": "gate 'finite steps' failed: 50 steps in a row had a gradient that is not finite",
    }
    assert told["inside"] and told["best"]["lr"] == 0.0156
    assert Path(RESULTS[1]).read_text().splitlines()[-1].startswith("0.0977\t\t")
    assert 'class="bad"' in probe.chart(told, 0.016)


def test_a_handful_of_steps_is_refused(work):
    with pytest.raises(ParamsError, match="9 steps are too few"):
        execute(probe_lr={"tokens": 159})


# -- with DVC -------------------------------------------------------------------------------------------------------

MAIN = "stages:\n  main: {cmd: cp source.txt out.txt, deps: [source.txt], outs: [out.txt]}\n"
QUIET = {"ATHANOR_THREADS": "1", "ATHANOR_DEVICE": "cpu", "ATHANOR_TRACKING": "off"}


@pytest.fixture
def checkout(inputs, tmp_path) -> Clone:
    """A Git and DVC repository with this code, a pipeline of one stage and the probe's inputs."""
    path = tmp_path / "checkout"
    shutil.copytree(inputs, path, ignore=shutil.ignore_patterns("athanor", "stages"))
    for name in ("athanor", "stages", "probes"):
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__", "dvc.*"))
    values = presets.values(ROOT / "presets/micro.yaml")
    YAML().dump({**values, "model": MODEL, "pretrain": RECIPE, "probe_lr": PROBE}, path / "params.yaml")
    (path / "dvc.yaml").write_text(MAIN)
    (path / "source.txt").write_text("s")
    clone = Clone(path)
    clone.run("git", "init", "-q", "-b", "main")
    clone.dvc("init", "-q")
    return clone


def test_the_command_tells_the_optimum_and_plan_remembers_it(checkout, tmp_path):
    """What DVC makes of a side stage: tests/cli/test_side.py."""
    env = {**QUIET, "DVC_SITE_CACHE_DIR": str(tmp_path / "site")}
    path, values = checkout.path, read_yaml(checkout.path / "params.yaml")
    said = checkout.dvc("repro", **env).stdout
    assert "main" in said and "probe" not in said
    (path / "probes/dvc.yaml").write_text("left behind by a kill")
    said = checkout.run(sys.executable, "-m", "athanor", "probe", "lr", **env).stdout
    assert "Running stage 'probes/dvc.yaml:probe-lr'" in said and "Optimum" in said
    assert "\nPlot           plots/probe_lr.svg\n" in said and not (path / "probes/dvc.yaml").exists()
    ElementTree.parse(path / "plots/probe_lr.svg")
    # What plan says of a rate that is far from the optimum, while the probe is one of this recipe and this data.
    for lr, changes, told in ((0.016, {}, False), (0.0025, {}, True), (0.0025, {"beta2": 0.9}, False)):
        YAML().dump({**values, "pretrain": {**values["pretrain"], **changes, "lr": lr}}, path / "params.yaml")
        said = command.far_from_probe(path, check_file(path / "params.yaml"))
        assert bool(said) == told and (not told or "times below the optimum" in said)

"""A profile of a training that runs, and what one leaves that finds no memory: no byte of the result is another."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from athanor.base.artifacts import read_json
from athanor.base.errors import InputError
from athanor.cli import cli
from athanor.model.loss import Targets
from athanor.model.transformer import Transformer
from athanor.training import step
from stages import pretrain, shard
from tests.runtime.toy_pipeline import place_stages, until
from tests.serving.live import ROOT
from tests.stages.conftest import PARAMS, run_stage, run_text_stage

SECTIONS = {"model": PARAMS["model"], "pretrain": {**PARAMS["pretrain"], "tokens": 2560}}
HELD = 12  # of 40 steps
# A training that waits after a step until it is asked for a profile.
TRAINING = f"""
import time
from pathlib import Path
from athanor.runtime.run import Run
from stages import pretrain
from tests.stages.conftest import run_stage

real = Run.save_requested

def save_requested(run, done=[]):
    done.append(1)
    if len(done) == {HELD}:
        Path("held").touch()
        while not Path(".athanor/PROFILE").exists():
            time.sleep(0.05)
        time.sleep(0.6)  # it looks for the file every half second
    return real(run)

Run.save_requested = save_requested
run_stage(pretrain)
"""


@pytest.fixture
def work(tokenizer_world: Path) -> Path:
    run_text_stage(shard)
    return tokenizer_world


def test_a_run_is_profiled_while_it_trains_and_ends_with_the_same_bytes(work: Path, capsys) -> None:
    run_stage(pretrain, SECTIONS)
    result = Path("models/base/model.safetensors")
    expected = result.read_bytes()
    shutil.rmtree(".athanor")
    shutil.rmtree("models/base")
    training = subprocess.Popen([sys.executable, "-c", TRAINING], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        until(Path("held").exists, "it trains")
        assert cli.call("profile", ["--steps", "3"]) == 0
        assert training.wait(120) == 0
    finally:
        training.kill()
        training.wait()
    assert result.read_bytes() == expected
    (folder,) = Path(".athanor").glob("runs/*/files/profile-step-*")
    assert folder.name == f"profile-step-{HELD + 2:08d}"  # the first step behind the request only begins it
    assert not list(Path(".athanor").glob("PROFILE*"))
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    assert len({event["name"] for event in events if event["name"].startswith("ProfilerStep#")}) == 3
    with open(folder / "operations.tsv", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert 0.99 < sum(float(row["share"]) for row in rows) < 1.01
    update = next(row for row in rows if "adamw" in row["operation"].lower())
    assert int(update["calls"]) % 3 == 0
    told = capsys.readouterr().out
    assert rows[0]["operation"][:50] in told and "ui.perfetto.dev" in told and str(folder / "trace.json.gz") in told


def test_where_nothing_trains_it_says_what_to_type(work: Path) -> None:
    with pytest.raises(InputError, match="no training runs here.*athanor repro"):
        cli.call("profile", [])
    assert not Path(".athanor/PROFILE").exists()


def test_a_profiler_that_fails_ends_no_training(work: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from athanor.runtime import profiling
    from athanor.runtime.run import Run

    real = Run.save_requested

    def save_requested(run: Run, done: list[int] = []) -> bool:  # noqa: B006
        done.append(1)
        if len(done) == HELD:
            (run.anchor / ".athanor" / "PROFILE").write_text("3\n")
            run._profiler._request._next = 0.0
        return real(run)

    def broken(recorded: object) -> list[object]:
        raise RuntimeError("planted")

    monkeypatch.setattr(Run, "save_requested", save_requested)
    monkeypatch.setattr(profiling, "operations", broken)
    run_stage(pretrain, SECTIONS)
    assert "no profile: RuntimeError('planted'); the training goes on" in capsys.readouterr().err
    assert not list(Path(".athanor").glob("PROFILE*")) and not list(Path(".athanor").glob("runs/*/files/profile*"))
    assert read_json(next(Path(".athanor").glob("runs/*/end.json")))["status"] == "FINISHED"


def test_a_run_that_finds_no_memory_leaves_what_held_it_and_ends_with_the_same_bytes(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    run_stage(pretrain, SECTIONS)
    result = Path("models/base/model.safetensors")
    expected, real, calls = result.read_bytes(), step.training_loss, []

    def short(model: Transformer, batch: Targets, *rest: object, **how: object) -> torch.Tensor:
        calls.append(len(batch.ids_BT))
        if len(calls) == 4:
            activations = torch.zeros(1 << 20)  # alive when the memory ends
            raise MemoryError(f"with {len(activations)} numbers")
        return real(model, batch, *rest, **how)

    shutil.rmtree(".athanor")
    monkeypatch.setattr(step, "training_loss", short)
    with pytest.raises(InputError, match="out of memory in step 1 with one row"):
        run_stage(pretrain, SECTIONS)
    (path,) = Path(".athanor").glob("runs/*/files/memory-step-*.json")
    tensors = {row["name"] or str(row["shape"]): row for row in read_json(path)["tensors"]}
    assert tensors["[1048576]"]["bytes"] == 4 << 20
    assert {"model.embed_tokens.weight", "optimiser model.embed_tokens.weight.exp_avg"} <= set(tensors)
    assert f"what held the memory is in {path.resolve()}; the largest: " in capsys.readouterr().err
    run_stage(pretrain, SECTIONS)
    assert result.read_bytes() == expected


def test_memory_that_ends_outside_of_a_step_leaves_what_held_it(tmp_path: Path) -> None:
    body = "import torch\n\ndef run(run):\n    held = torch.zeros(1 << 20)\n    raise MemoryError('planted')\n"
    main = "from athanor.runtime.process import stage_main\nstage_main('toy', run)\n"
    place_stages(tmp_path, "stages:\n  toy:\n    cmd: python -m stages.toy\n    outs: [o]\n", toy=body + main)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ATHANOR_TRACKING": "off"}
    environment.pop("DVC_ROOT", None)
    done = subprocess.run(
        [sys.executable, "-m", "stages.toy"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and "float32 [1048576] 4.0 MiB" in done.stderr, done.stderr
    (path,) = tmp_path.glob(".athanor/runs/*/files/memory-end.json")
    assert read_json(path)["tensors"][0]["shape"] == [1 << 20]

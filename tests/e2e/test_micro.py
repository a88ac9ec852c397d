"""The whole graph at micro size, with real DVC, MLflow, SentencePiece, transformers and llama.cpp."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from athanor.base.artifacts import verify_files
from athanor.base.strict import read_yaml
from tests.e2e.clone import STAGES, Clone, environment, make_clone


def lock(clone: Clone) -> dict[str, str]:
    """Hash of every output and metric, less the leaf files that hold timings."""
    stages = read_yaml(clone.path / "dvc.lock")["stages"]
    outs = {out["path"]: out["md5"] for stage in stages.values() for out in stage.get("outs", [])}
    return {path: md5 for path, md5 in outs.items() if not path.startswith("metrics/runs/")}


def makers(clone: Clone) -> dict[str, str]:
    folder = clone.path / "metrics" / "runs"
    return {stage: json.loads((folder / f"{stage.replace('-', '_')}.json").read_text())["run"] for stage in STAGES}


def tracking(clone: Clone):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{clone.path}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("athanor").experiment_id], max_results=500)
    return client, found


def test_every_stage_ran_and_the_summary_says_what_matters(micro):
    text = (micro.path / "dvc_plots" / "first.log").read_text()
    for stage in STAGES:
        assert f"  {stage:<17} ran" in text
    for words in ("bits per byte", "Battery", "make serve", "make chat", "make ui", "models/export"):
        assert words in text


def test_every_output_matches_its_manifest(micro):
    folders = [path.parent for path in sorted(micro.path.glob("[dm]*/*/manifest.json"))]
    assert len(folders) == 12
    for folder in folders:
        verify_files(folder)


def test_outputs_name_no_host_time_or_path(micro):
    import platform

    for path in sorted(micro.path.glob("[dm]*/*/manifest.json")) + sorted(micro.path.glob("metrics/*.json")):
        text = path.read_text()
        assert str(micro.path) not in text and platform.node() not in text, path


def test_tracking_has_one_parent_with_a_child_for_every_stage(micro):
    micro.run(sys.executable, "-m", "athanor", "ship", "--wait", "90")
    client, found = tracking(micro)
    children = [run for run in found if "mlflow.parentRunId" in run.data.tags]
    parents = {run.data.tags["mlflow.parentRunId"] for run in children if run.data.tags["athanor.experiment"] == ""}
    assert len(parents) == 1
    mine = [run for run in children if run.data.tags["mlflow.parentRunId"] in parents]
    assert sorted(run.info.run_name for run in mine) == sorted(STAGES)
    assert {run.info.status for run in mine} == {"FINISHED"}
    by_stage = {run.info.run_name: run for run in mine}
    pretrain = by_stage["pretrain"]
    assert pretrain.data.params["pretrain.lr"] and pretrain.inputs.dataset_inputs
    assert len(client.get_metric_history(pretrain.info.run_id, "loss/train")) > 3
    names = {file.path for file in client.list_artifacts(by_stage["export"].info.run_id)}
    assert "MODEL_CARD.md" in names
    assert {file.path for file in client.list_artifacts(by_stage["eval"].info.run_id)} >= {"samples.md"}


def test_experiment_on_sft_runs_exactly_sft_eval_export(micro):
    before = makers(micro)
    micro.dvc("exp", "run", "-n", "lower-lr", "-S", "sft.lr=0.0004")
    after = makers(micro)
    assert {stage for stage in STAGES if after[stage] != before[stage]} == {"sft", "eval", "export"}
    shown = list(csv.DictReader(io.StringIO(micro.dvc("exp", "show", "--csv").stdout)))
    rates = {row["Experiment"] or row["rev"]: row["sft.lr"] for row in shown}
    assert rates["lower-lr"] == "0.0004" and len(set(rates.values())) == 2
    micro.run(sys.executable, "-m", "athanor", "ship", "--wait", "90")
    _, found = tracking(micro)
    of_it = [run for run in found if run.data.tags.get("athanor.experiment") == "lower-lr"]
    children = [run for run in of_it if "athanor.run" in run.data.tags]
    assert sorted(run.info.run_name for run in children) == ["eval", "export", "sft"]
    parent = next(run for run in found if run.info.run_id == children[0].data.tags["mlflow.parentRunId"])
    assert parent.data.tags["athanor.made_by.pretrain"] == before["pretrain"]
    micro.run("git", "checkout", "-q", "--force", "main")
    micro.dvc("checkout", "--force", "-q")


def test_killed_pretrain_and_fresh_build_give_the_same_bytes_everywhere(micro, tmp_path):
    """Another clone, nothing cached: kill -9 the trainer at a random step, run again, compare every hash."""
    other = make_clone(tmp_path)
    micro.run("git", "checkout", "-q", "--force", "main")
    other.dvc("repro", "shard", "sft-data", ATHANOR_TRACKING="off")
    # A fast machine may end the training between the look and the kill; then it is trained and killed anew.
    assert any(_kill_pretrain(other, tmp_path / f"{attempt}.log") for attempt in range(6))
    assert not (other.path / "models" / "base").exists()
    other.dvc("repro", ATHANOR_TRACKING="off")
    assert lock(other) == lock(micro)


def _checkpoints(slots: Path) -> list[str]:
    """Not `rglob`, which fails when a folder that the trainer is still writing gets its name meanwhile."""
    return [name for _, folders, _ in os.walk(slots) for name in folders if name.startswith("step_")]


def _kill_pretrain(clone: Clone, log: Path) -> bool:
    """Train from nothing and kill -9 after the first checkpoint; False when training ended before the kill."""
    shutil.rmtree(clone.path / ".athanor" / "slots" / "pretrain", ignore_errors=True)
    env = environment(ATHANOR_SAVE_EVERY_SECONDS="1", ATHANOR_TRACKING="off")
    command = [sys.executable, "-m", "dvc", "repro", "--force", "--single-item", "pretrain"]
    with open(log, "w") as out:
        child = subprocess.Popen(command, cwd=clone.path, env=env, stdout=out, stderr=out)
    deadline = time.monotonic() + 400
    while not _checkpoints(clone.path / ".athanor" / "slots" / "pretrain"):
        assert child.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words, cwd = process.info["cmdline"] or (), process.info["cwd"]
        if {"-m", "stages.pretrain"} <= {*words} and cwd == str(clone.path.resolve()):
            process.kill()
    return child.wait(120) != 0

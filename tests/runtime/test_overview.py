"""What MLflow's pages say of runs."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest

from athanor.base.artifacts import read_json, write_json
from athanor.runtime import overview
from athanor.runtime.facts import flatten, provenance
from athanor.runtime.journal import Journal
from athanor.runtime.presets import values
from athanor.runtime.tracking import Tracker
from tests.e2e.clone import small_repo
from tests.runtime.view import meta

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "a" * 40


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("loss", ("loss/train", 2e6)),
        ("val_bpb.all", ("loss/val_bits_per_byte", 2e6)),
        ("val_bpb.books", ("sources/val_bpb.books", 2e6)),
        ("disk.free_bytes", ("system/disk_available_megabytes", 2.0)),
        ("health.nan_loss", ("monitor/nan_loss", 2e6)),
        ("books.torch.loss", ("books.torch.loss", 2e6)),
    ],
)
def test_the_losses_come_first_and_the_machine_has_its_page(name, shown):
    assert overview.shown(name, 2e6) == shown
    assert "loss/" == min(f"{new.partition('/')[0]}/" for _, new in overview.NAMES if not new.startswith("\\"))


def test_a_parent_gets_few_points_of_a_long_curve_and_all_of_the_held_out_ones():
    """They do not depend on how the journal is cut into chunks, or a second delivery would add others."""
    plan = {"t": 0, "event": "training", "schedule": {"total_tokens": 100_000}, "batch_tokens": 10}
    steps = [{"t": step, "s": step, "m": {"loss": 1.0}} for step in range(10_000)]
    lines = [json.dumps(row).encode() + b"\n" for row in [plan, *steps, {"t": 1, "s": 9_999, "m": {"val_loss": 2.0}}]]
    all_points, curves, health = overview.points(b"".join(lines), "sft", {})
    assert len(all_points) == 10_001 and 150 <= len(curves) <= 201 and health == "ok"
    assert curves[-1] == ("sft.val_loss", 2.0, 1, 9_999) and curves[0][0] == "sft.train_loss"
    state: dict[str, int] = {}
    assert curves == [point for line in lines for point in overview.points(line, "sft", state)[1]]


def test_a_description_says_where_a_run_comes_from_and_how_to_make_it_again(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    remote = ["git", "-C", tmp_path, "remote", "add", "origin", "https://me:secret@git.example.org/me/it.git"]
    subprocess.run(remote, check=True)
    (tmp_path / "presets").symlink_to(ROOT / "presets")
    params = {key: str(value) for key, value in flatten(values(ROOT / "presets" / "micro.yaml"))}
    tags = {"athanor.key": "main@aaaaaaa/1", "mlflow.source.git.commit": COMMIT, "athanor.dirty": "True"}
    text = overview.description(tmp_path, tags, params, {"eval.accuracy": 0.5}, "ok")
    assert f"Branch main, commit [aaaaaaa](https://git.example.org/me/it/commit/{COMMIT}), with edits" in text
    assert "preset `micro`." in text and "| Battery, share of right answers | 50.0% |" in text
    assert "`git checkout aaaaaaa && athanor preset use micro && athanor repro`" in text
    assert "secret" not in text and "promote" not in text
    tags |= {"athanor.experiment": "slow", "athanor.made_by.export": "export-1"}
    text = overview.description(tmp_path, tags, params | {"sft.lr": "0.5"}, {}, "")
    lr = values(ROOT / "presets" / "micro.yaml")["sft"]["lr"]
    assert (
        "Experiment **slow**, commit [aaaaaaa]" in text
        and "edits" not in text
        and f"`micro` with `sft.lr` 0.5 ({lr} there)." in text
    )
    assert "&& dvc exp apply slow && athanor repro`" in text and "`athanor promote slow`" in text


def test_the_settings_of_an_experiment_come_first_and_the_preset_is_the_nearest(tmp_path):
    """A text of one's own with the preset for it: of as many values it differs from the default, too."""
    settings = values(ROOT / "presets" / "own-text.yaml")
    settings["download"]["sources"] = [{"type": "files", "name": "novel"}]
    settings["instruct"]["sources"], settings["battery"]["categories"] = [], {"identity": 60}
    settings["sft_data"] |= {"source_priority": ["identity"], "sources": {"identity": {"max_copies": 8}}}
    settings["clean"]["rules"]["prose"]["min_words"], settings["sft"]["lr"] = 1, 0.003
    clone = small_repo(tmp_path / "repo", {"params.yaml": json.dumps(settings), "dvc.yaml": "stages: {}"})
    (clone.path / "presets").symlink_to(ROOT / "presets")
    commit = clone.run("git", "rev-parse", "HEAD").stdout.strip()
    params = {key: str(value) for key, value in flatten(settings)}
    tags = {"athanor.key": "lr@1/1", "athanor.experiment": "lr", "mlflow.source.git.commit": commit}
    tracker = Tracker(clone.path, f"sqlite:///{clone.path}/mlflow.db")
    for lr in ("0.002", "0.004"):  # the second is the preset's
        text = overview.description(clone.path, tags, params | {"sft.lr": lr}, {}, "")
        assert "Parameters: preset `own-text` with `sft.lr` " + lr in text
        journal = Journal(clone.path / ".athanor/runs" / lr)
        more = {"experiment": "lr", "commit": commit, "params": params | {"sft.lr": lr}, "key": f"{lr}@1/1"}
        write_json(journal.folder / "meta.json", meta(lr, "sft", **more))
        journal.close("FINISHED", metrics={}, facts={}, seconds=1.0)
        tracker.ship(journal.folder, live=False)
        child = tracker.client.get_run(read_json(journal.folder / "ship.json")["mlflow_run"])
        parent = tracker.client.get_run(child.data.tags["mlflow.parentRunId"])
        assert parent.data.tags["athanor.changed"].startswith(f"sft.lr {lr}, clean.rules")


@pytest.mark.parametrize("remote", ["git@example.org:me/it.git", "ssh://git@example.org:22/me/it", "/srv/it.git"])
def test_a_commit_has_a_page_where_origin_is_on_the_web(monkeypatch, remote):
    monkeypatch.setattr(overview, "git", lambda *_: remote)
    page = f"https://example.org/me/it/commit/{COMMIT}" if "example" in remote else ""
    assert overview._commit_page(ROOT, COMMIT) == page


@pytest.mark.parametrize(
    ("file", "experiment", "dirty"), [("params.yaml", "", True), ("params.yaml", "e", False), ("a.py", "e", True)]
)
def test_what_dvc_writes_for_an_experiment_is_no_dirt(tmp_path, monkeypatch, file, experiment, dirty):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / file).write_text("a: 1")
    subprocess.run(["git", "-C", tmp_path, "add", file], check=True)
    monkeypatch.setenv("DVC_EXP_NAME", experiment)
    assert provenance(tmp_path, {})["dirty"] is dirty


def test_a_run_keeps_what_was_installed_and_set_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("ATHANOR_NOTIFY", "https://me:s3cret-word@example.org")
    snapshot = provenance(tmp_path, {})["snapshot"]
    assert snapshot["packages"]["pytest"] == importlib.metadata.version("pytest") and len(snapshot["packages"]) > 50
    assert snapshot["environment"]["NCCL_DEBUG"] == "INFO" and "HOME" not in snapshot["environment"]
    assert "s3cret-word" not in json.dumps(snapshot)

"""The shipper against a real MLflow SQLite store: nothing lost, nothing doubled."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from athanor.base.artifacts import read_json, write_json
from athanor.runtime import ship
from athanor.runtime.journal import Journal
from athanor.runtime.tracking import Tracker
from tests.runtime.view import ROOT, assert_view, environment, meta


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    (root / ".athanor" / "runs").mkdir(parents=True)
    return root, Tracker(root, f"sqlite:///{root}/mlflow.db")


def finish(journal):
    journal.close("FINISHED", metrics={}, facts={}, seconds=1.0)


def folder(root, run, stage, steps, **more):
    path = root / ".athanor" / "runs" / run
    journal = Journal(path)
    write_json(path / "meta.json", meta(run, stage, **more))
    for step in range(steps):
        journal.scalars(step, {"train/loss": 1.0 / (step + 1)})
    return path, journal


def test_run_arrives_whole_under_its_parent_and_only_once(store):
    root, tracker = store
    path, journal = folder(root, "pretrain-1", "pretrain", 50)
    tracker.ship(path, live=True)
    for step in range(50, 60):
        journal.scalars(step, {"train/loss": float("nan") if step == 55 else 0.1})
    (path / "files" / "card.md").write_text("hello")
    scores = {"validation.all.bpb": 1.5, "validation.all.n": 7, "train_loss": 3.0, "steps": 60}
    journal.close("FINISHED", metrics=scores, facts={"slot": "abc"}, seconds=2.0)
    tracker.ship(path, live=False)
    tracker.ship(path, live=False)
    state = read_json(path / "ship.json")
    run = tracker.client.get_run(state["mlflow_run"])
    history = tracker.client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in history) == list(range(60))
    assert run.info.status == "FINISHED" and run.data.metrics["summary/bpb"] == 1.5
    assert run.data.params["pretrain.lr"] == "0.001" and run.data.tags["athanor.made_by.clean"] == "clean-1"
    assert run.inputs.dataset_inputs[0].dataset.digest == "0123456789abcdef0123456789abcdef"
    assert [file.path for file in tracker.client.list_artifacts(run.info.run_id)] == ["card.md", "metrics.json"]
    parent = tracker.client.get_run(run.data.tags["mlflow.parentRunId"])
    assert parent.data.metrics == {"pretrain.bpb": 1.5, "pretrain.seconds": 2.0}  # the rest is in the file
    assert parent.data.tags["athanor.made_by.pretrain"] == "pretrain-1"
    assert ship.shipped(path)


def test_a_parent_has_the_scores_of_stages_that_came_from_the_cache(tmp_path):
    """A sweep that ends at eval, taken over: only the export ran, and the run that was promoted had no scores."""
    root, tracker = tmp_path, Tracker(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    params = {"params": {"pretrain.lr": "0.002", "a key!": "x"}}
    swept, journal = folder(root, "pretrain-7", "pretrain", 1, key="sweep@1", **params)
    journal.close("FINISHED", metrics={"validation.all.bpb": 1.5}, facts={}, seconds=2.0)
    more = {"made_by": {"pretrain": "pretrain-7"}, "params": {"export.dtype": "f16"}}
    exported, journal = folder(root, "export-1", "export", 1, key="taken@1", **more)
    journal.close("FINISHED", metrics={}, facts={}, seconds=1.0)
    for path in (swept, exported):
        tracker.ship(path, live=False)
    child = tracker.client.get_run(read_json(exported / "ship.json")["mlflow_run"])
    parent = tracker.client.get_run(child.data.tags["mlflow.parentRunId"])
    assert parent.data.metrics["pretrain.bpb"] == 1.5 and parent.data.tags["athanor.made_by.pretrain"] == "pretrain-7"
    assert parent.data.params == {"export.dtype": "f16", "pretrain.lr": "0.002", "a key_": "x"}


def test_health_of_a_run_is_a_tag_and_its_findings_are_points(store):
    root, tracker = store
    path, journal = folder(root, "watched-1", "pretrain", 3)
    tracker.ship(path, live=True)
    run_id = read_json(path / "ship.json")["mlflow_run"]
    finding = {"value": 2.0, "threshold": 1.5, "diagnosis": "The loss jumped.", "fix": "a lower lr."}
    seen = []
    events = [("training", {}), ("finding", {"rule": "spike_recovery", "level": "info", "step": 3, **finding})]
    events += [
        ("finding", {"rule": "nan_loss", "level": level, "step": 5, **finding}) for level in ("critical", "warning")
    ]
    for name, facts in [("note", {"text": "x"}), *events]:
        journal.event(name, **facts)
        tracker.ship(path, live=True)
        seen.append(tracker.client.get_run(run_id).data.tags.get("health"))
    assert seen == [None, "ok", "ok", "critical", "critical"]  # the worst that was seen, not the last
    points = {
        name: tracker.client.get_metric_history(run_id, f"monitor/{name}") for name in ("spike_recovery", "nan_loss")
    }
    assert [(point.step, point.value) for point in points["spike_recovery"]] == [(3, 2.0)]
    assert {(point.step, point.value) for point in points["nan_loss"]} == {(5, 4.0), (5, 3.0)}
    finish(journal)
    tracker.client.set_tag(run_id, "health", "lost")
    (path / "ship.json").unlink()  # told from nothing it comes out the same
    tracker.ship(path, live=False)
    run = tracker.client.get_run(run_id)
    assert run.data.tags["health"] == "critical"
    assert tracker.client.get_run(run.data.tags["mlflow.parentRunId"]).data.tags["health"] == "critical"


def test_lost_ship_state_does_not_double_points(store):
    root, tracker = store
    path, journal = folder(root, "sft-1", "sft", 30)
    tracker.ship(path, live=True)
    first = read_json(path / "ship.json")["mlflow_run"]
    (path / "ship.json").unlink()
    finish(journal)
    tracker.ship(path, live=False)
    assert read_json(path / "ship.json")["mlflow_run"] == first
    assert len(tracker.client.get_metric_history(first, "train/loss")) == 30


def test_stages_of_one_configuration_share_a_parent_and_another_has_its_own(store):
    root, tracker = store
    parents = []
    for run, key in (
        ("a-1", "main@1111111/aaaaaaaa"),
        ("b-1", "main@1111111/aaaaaaaa"),
        ("c-1", "main@1111111/bbbbbbbb"),
    ):
        path, journal = folder(root, run, run[0], 1, key=key)
        finish(journal)
        tracker.ship(path, live=False)
        child = tracker.client.get_run(read_json(path / "ship.json")["mlflow_run"])
        parents.append(child.data.tags["mlflow.parentRunId"])
    assert parents[0] == parents[1] != parents[2]


def test_a_parent_is_at_work_while_a_stage_of_it_goes_on_or_begins(store):
    root, tracker = store

    def states(path, live):
        tracker.ship(path, live)
        child = tracker.client.get_run(read_json(path / "ship.json")["mlflow_run"])
        parent = tracker.client.get_run(child.data.tags["mlflow.parentRunId"])
        return {(run.info.status, bool(run.info.end_time)) for run in (child, parent)}

    path, journal = folder(root, "again-1", "sft", 1, key="again@1")
    assert states(path, live=True) == {("RUNNING", False)}
    journal.close("KILLED")
    assert states(path, live=False) == {("KILLED", True)}
    (path / "end.json").unlink()
    _, journal = folder(root, "again-1", "sft", 2, key="again@1", resumed=1)
    assert states(path, live=True) == {("RUNNING", False)}
    finish(journal)
    assert states(path, live=False) == {("FINISHED", True)}
    assert states(folder(root, "next-1", "eval", 1, key="again@1")[0], live=True) == {("RUNNING", False)}


def test_a_description_that_a_person_wrote_stays(store):
    root, tracker = store
    notes = []
    for number, own in enumerate(["", "Mine.", ""]):
        path, journal = folder(root, f"note-{number}", "clean", 1, key="noted@1111111/aaaaaaaa")
        finish(journal)
        tracker.ship(path, live=False)
        run = tracker.client.get_run(read_json(path / "ship.json")["mlflow_run"])
        parent = run.data.tags["mlflow.parentRunId"]
        notes.append(tracker.client.get_run(parent).data.tags["mlflow.note.content"])
        if own:
            tracker.client.set_tag(parent, "mlflow.note.content", own)
    assert notes[0] == notes[1] and "Branch noted" in notes[0] and notes[2] == "Mine."


def test_a_branch_with_a_quote_in_its_name_has_a_parent_of_its_own(store):
    """MLflow's queries cannot quote a quote, so they ask with a wildcard, which finds others, too."""
    root, tracker = store
    parents = []
    for number, branch in enumerate(["o'neil", "o_neil", "o'neil"]):
        path, journal = folder(root, f"quote-{number}", "clean", 1, key=f"{branch}@1111111/aaaaaaaa")
        finish(journal)
        tracker.ship(path, live=False)
        child = tracker.client.get_run(read_json(path / "ship.json")["mlflow_run"])
        parents.append(child.data.tags["mlflow.parentRunId"])
    assert parents[0] == parents[2] != parents[1]


def test_shipper_process_delivers_and_leaves(store, tmp_path):
    root, tracker = store
    path, journal = folder(root, "proc-1", "clean", 3)
    finish(journal)
    command = [sys.executable, "-m", "athanor.runtime.ship", "--root", str(root), "--wait", "90"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ship.shipped(path)
    assert_view(tracker.client, root)


def test_a_record_of_a_delivery_that_cannot_be_read_costs_a_second_one(store, monkeypatch):
    """It ended the shipper with a traceback, so that nothing else was delivered either."""
    root, tracker = store
    path, journal = folder(root, "unread-1", "clean", 5)
    journal.close("FINISHED", metrics={"rows": 5}, facts={}, seconds=1.0)
    tracker.ship(path, live=False)
    before = read_json(path / "ship.json")

    def broken(path, *_):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patched:
        patched.setattr("athanor.runtime.store._read", broken)
        assert path in ship.unshipped(root)
        tracker.ship(path, live=False)
    assert read_json(path / "ship.json") == before and ship.shipped(path)


def test_what_cannot_be_delivered_is_told_with_what_happens_now_and_has_status_1(store, monkeypatch):
    root, _ = store
    here = root / "twice"
    path, journal = folder(here, "clean-1", "clean", 3)
    finish(journal)
    said, failures = [], [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path / "ship.json"))] * 2
    plain = Tracker.ship

    def failing(self, *args, **how):
        if failures:
            raise failures.pop()
        plain(self, *args, **how)

    monkeypatch.setattr(Tracker, "ship", failing)
    monkeypatch.setattr(Tracker, "explained", lambda *_: False)
    monkeypatch.setattr(ship, "say", said.append)
    monkeypatch.setattr(ship, "step_back", lambda: None)
    monkeypatch.setattr(ship, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(ship, "IDLE_SECONDS", 0.3)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    assert ship._serve(here) == 1 and not ship.shipped(path)
    assert ship._serve(here) == 1 and not ship.shipped(path)
    assert len(said) == 2 and all("clean-1 is not shipped" in line and "the disk is full" in line for line in said)
    assert all(
        "the journal is kept, and this shipper, the next stage's or `athanor ship` delivers it" in line for line in said
    )
    monkeypatch.setattr(ship, "IDLE_SECONDS", 2.0)  # long enough to try again
    failures.append(ValueError("once"))
    assert ship._serve(here) == 0 and ship.shipped(path) and failures == [] and len(said) == 3

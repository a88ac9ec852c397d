"""What MLflow should show, computed from journals alone, compared with what it shows."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from athanor.runtime.headlines import headlines

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"loss": "loss/train", "lr": "optimizer/lr", "val_bpb.all": "loss/val_bits_per_byte"}
CURVES = {"loss": "train_loss", "val_bpb.all": "bpb"}
BIGGEST = 1.7976931348623157e308  # what MLflow stores for infinity


def meta(run, stage, **more):
    return {
        "run": run,
        "stage": stage,
        "started_ms": 1_700_000_000_000,
        "resumed": 0,
        "pid": os.getpid(),
        "params": {"pretrain.lr": 0.001, "pretrain.seed": 1, "pretrain.note": "", "pretrain.none": None},
        "inputs": {"data/shards": "0123456789abcdef0123456789abcdef.dir"},
        "made_by": {"clean": "clean-1"},
        "hardware": {"host": "h", "cpu": "c", "versions": {"torch": "2"}},
        "commit": "a" * 40,
        "branch": "main",
        "experiment": "",
        "dirty": False,
        "key": "main@aaaaaaa/12345678",
        **more,
    }


def environment(**more):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "DVC_", "ATHANOR_", "PYTEST_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**clean, "PATH": path, "PYTHONPATH": str(ROOT), **more}


def _number(value):
    value = float(value)
    if value != value:
        return "nan"
    return max(-BIGGEST, min(BIGGEST, value))


def journals(*roots):
    """Per run id: what its directory says."""
    found = {}
    for root in roots:
        for path in (root / ".athanor" / "runs").glob("*/meta.json"):
            folder, facts = path.parent, json.loads(path.read_text())
            lines = (folder / "journal.jsonl").read_bytes().split(b"\n")[:-1]
            rows = [json.loads(line) for line in lines]
            end = folder / "end.json"
            last = max((row["t"] for row in rows), default=facts["started_ms"])
            end = json.loads(end.read_text()) if end.is_file() else {"status": "KILLED", "ended_ms": last}
            points, curves, stage = {}, {}, facts["stage"].replace("-", "_")
            for row in rows:
                for name, value in row.get("m", {}).items():
                    point = (row["t"], row["s"], _number(value))
                    points.setdefault(NAMES.get(name, name), []).append(point)
                    if name in CURVES:
                        curves.setdefault(f"{stage}.{CURVES[name]}", []).append(point)
            files = {file.name: file.read_bytes() for file in (folder / "files").iterdir()}
            if end["status"] == "FINISHED":
                scores = headlines(facts["stage"], end["metrics"])
                summary = {name: value for name, value in end["metrics"].items() if "." not in name} | scores
                summary["seconds"] = end["seconds"]
                points |= {f"summary/{name}": [(end["ended_ms"], 0, _number(v))] for name, v in summary.items()}
                scores |= {"seconds": end["seconds"]} if "train_loss" in summary else {}
                for name, value in scores.items():
                    point = (end["ended_ms"], summary["steps"] if name in CURVES.values() else 0, _number(value))
                    curves.setdefault(f"{stage}.{name}", []).append(point)
                files["metrics.json"] = json.dumps(end["metrics"], indent=2).encode()
            found[facts["run"]] = {"meta": facts, "end": end, "points": points, "curves": curves, "files": files}
    return found


def runs(client):
    experiment = client.get_experiment_by_name("athanor")
    return list(client.search_runs([experiment.experiment_id], max_results=5000)) if experiment else []


def history(client, run):
    """Every point of every metric of a run but findings, which are events in the journal."""
    return {
        name: sorted((p.timestamp, p.step, _number(p.value)) for p in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
        if not name.startswith("monitor/")
    }


def assert_view(client, *roots, files=True):
    """Nothing lost, nothing doubled, nothing else: children, parents, params, points, status, tags, artifacts."""
    expected = journals(*roots)
    found = runs(client)
    children = [run for run in found if "athanor.run" in run.data.tags]
    parents = [run for run in found if "athanor.key" in run.data.tags]
    assert len(children) + len(parents) == len(found)
    assert sorted(run.data.tags["athanor.run"] for run in children) == sorted(expected)
    by_key = {run.data.tags["athanor.key"]: run for run in parents}
    keys = {want["meta"]["key"] for want in expected.values()}
    assert sorted(run.data.tags["athanor.key"] for run in parents) == sorted(keys)
    for run in children:
        want = expected[run.data.tags["athanor.run"]]
        facts, end = want["meta"], want["end"]
        assert run.data.tags["mlflow.parentRunId"] == by_key[facts["key"]].info.run_id
        assert run.data.params == {key: str(value) for key, value in facts["params"].items()}
        assert {i.dataset.name: i.dataset.digest for i in run.inputs.dataset_inputs} == {
            path: digest.removesuffix(".dir") for path, digest in facts["inputs"].items()
        }
        assert len(run.inputs.dataset_inputs) == len(facts["inputs"])
        assert history(client, run) == {name: sorted(points) for name, points in want["points"].items()}
        assert (run.info.status, run.info.end_time) == (end["status"], end["ended_ms"])
        assert run.info.start_time == facts["started_ms"]
        assert run.data.tags.get("athanor.resumed", "0") == str(facts["resumed"])
        assert run.data.tags.get("athanor.error") == end.get("error")
        for name, value in end.get("facts", {}).items():
            assert run.data.tags[f"athanor.{name}"] == str(value)
        if files:
            listed = client.list_artifacts(run.info.run_id)
            assert {file.path: file.file_size for file in listed} == {k: len(v) for k, v in want["files"].items()}
    for key, parent in by_key.items():
        mine = sorted(
            (e for e in expected.values() if e["meta"]["key"] == key),
            key=lambda e: (e["meta"]["started_ms"], e["meta"]["run"]),
        )
        points, makers = {}, {}
        for want in mine:
            for name, values in want["curves"].items():
                points.setdefault(name, []).extend(values)
            if want["end"]["status"] == "FINISHED":
                makers |= want["meta"]["made_by"] | {want["meta"]["stage"]: want["meta"]["run"]}
        # Two children that ended in one millisecond with one value make one point.
        assert history(client, parent) == {name: sorted(set(values)) for name, values in points.items()}
        tags = {k.removeprefix("athanor.made_by."): v for k, v in parent.data.tags.items() if "made_by" in k}
        assert tags == makers
        params = {name: str(value) for want in mine for name, value in want["meta"]["params"].items()}
        assert parent.data.params == params
        assert parent.info.run_name == (
            mine[0]["meta"]["experiment"] or re.sub(r"^(.*)@(.*)/(.{4}).*$", r"\1-\2-\3", key)
        )
        last = max(mine, key=lambda want: want["end"]["ended_ms"])["end"]
        assert (parent.info.status, parent.info.end_time) == (last["status"], last["ended_ms"])


def view(client):
    """The whole view without MLflow's own ids, to compare two stores or two moments."""
    names = {run.info.run_id: run.data.tags.get("athanor.run") or run.data.tags["athanor.key"] for run in runs(client)}
    return {
        names[run.info.run_id]: (
            run.info.run_name,
            run.info.status,
            run.info.start_time,
            run.info.end_time,
            run.data.params,
            history(client, run),
            {key: names.get(value, value) for key, value in run.data.tags.items()},
            sorted((file.path, file.file_size) for file in client.list_artifacts(run.info.run_id)),
        )
        for run in runs(client)
    }

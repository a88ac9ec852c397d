"""MLflow as a view of the journals: one parent run per configuration, one child per executed stage."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

from athanor.artifacts import read_json, write_json

EXPERIMENT = "athanor"
BATCH = 800
PARAM_CHARS = 6000
HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_DISABLE_TELEMETRY": "true"}


class Tracker:
    """A connection to one tracking store. Import of mlflow takes seconds, so it happens here and not before."""

    def __init__(self, root: Path, uri: str) -> None:
        for name, value in HTTP.items():
            os.environ.setdefault(name, value)
        os.environ.pop("MLFLOW_RUN_ID", None)  # it would turn every new run into that one
        self.root, self.uri = root, uri
        # Two first constructions at once crash while both create the tables.
        with open(root / ".athanor" / "mlflow-init.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            from mlflow.tracking import MlflowClient

            self.client = MlflowClient(tracking_uri=uri)
            found = self.client.get_experiment_by_name(EXPERIMENT)
            if found is None:
                artifacts = None if uri.startswith("http") else (root / "mlartifacts").as_uri()
                self.experiment = self.client.create_experiment(EXPERIMENT, artifact_location=artifacts)
            else:
                self.experiment = found.experiment_id

    def ship(self, folder: Path, live: bool) -> None:
        """Bring one run up to date; idempotent."""
        meta = read_json(folder / "meta.json")
        state_path = folder / "ship.json"
        state = read_json(state_path) if state_path.is_file() else {"uri": self.uri, "offset": 0}
        if state["uri"] != self.uri:  # another store: tell it everything from the start
            state = {"uri": self.uri, "offset": 0}
        if "mlflow_run" not in state:
            state["mlflow_run"] = self._create(meta)
            write_json(state_path, state)
        if state.get("closed") or state.get("resumed", 0) != meta["resumed"]:
            self.client.update_run(state["mlflow_run"], status="RUNNING")
            self.client.set_tag(state["mlflow_run"], "athanor.resumed", str(meta["resumed"]))
            state |= {"closed": False, "resumed": meta["resumed"]}
        state["offset"] = self._metrics(state["mlflow_run"], folder / "journal.jsonl", state["offset"])
        if not live:
            self._close(state["mlflow_run"], meta, folder)
            state["closed"] = (folder / "end.json").is_file()
        write_json(state_path, state)

    def _parent(self, meta: dict[str, Any]) -> str:
        """The run that groups all stages of one (experiment or branch, commit, params)."""
        found = self.client.search_runs(
            [self.experiment], f"tags.`athanor.key` = '{_quoted(meta['key'])}'", max_results=1
        )
        if found:
            return found[0].info.run_id
        name = meta["experiment"] or f"{meta['branch']}-{meta['commit'][:7] or 'uncommitted'}"
        tags = {"athanor.key": meta["key"], "mlflow.source.git.commit": meta["commit"], "athanor.dirty": meta["dirty"]}
        run = self.client.create_run(
            self.experiment,
            start_time=meta["started_ms"],
            run_name=name,
            tags={key: str(value) for key, value in tags.items()},
        )
        return run.info.run_id

    def _create(self, meta: dict[str, Any]) -> str:
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        # A crash between creating the run and noting its id must not make a second one.
        found = self.client.search_runs([self.experiment], f"tags.`athanor.run` = '{meta['run']}'", max_results=1)
        if found:
            return found[0].info.run_id
        parent = self._parent(meta)
        hardware = meta["hardware"]
        tags = {
            "mlflow.parentRunId": parent,
            "mlflow.source.git.commit": meta["commit"],
            "athanor.run": meta["run"],
            "athanor.stage": meta["stage"],
            "athanor.experiment": meta["experiment"],
            "athanor.dirty": meta["dirty"],
            "athanor.host": hardware["host"],
            "athanor.cpu": hardware["cpu"],
            **{f"athanor.version.{name}": version for name, version in hardware["versions"].items()},
            **{f"athanor.made_by.{stage}": maker for stage, maker in meta["made_by"].items()},
        }
        run = self.client.create_run(
            self.experiment,
            start_time=meta["started_ms"],
            run_name=meta["stage"],
            tags={key: str(value) for key, value in tags.items()},
        )
        run_id = run.info.run_id
        params = [Param(_key(key), str(value)[:PARAM_CHARS]) for key, value in meta["params"].items()]
        for start in range(0, len(params), 100):
            self.client.log_batch(run_id, params=params[start : start + 100])
        datasets = [
            DatasetInput(
                Dataset(path, digest.removesuffix(".dir")[:36], "dvc", json.dumps({"path": path, "md5": digest})),
                [InputTag("mlflow.data.context", meta["stage"])],
            )
            for path, digest in meta["inputs"].items()
        ]
        if datasets:
            self.client.log_inputs(run_id, datasets)
        for stage, maker in meta["made_by"].items():
            self.client.set_tag(parent, f"athanor.made_by.{stage}", maker)
        return run_id

    def _metrics(self, run_id: str, path: Path, offset: int) -> int:
        """Send the whole journal lines after `offset`; returns the new offset."""
        from mlflow.entities import Metric

        if not path.is_file():
            return offset
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        batch = [
            Metric(_key(name), float(value), row["t"], row["s"])
            for row in map(json.loads, data.splitlines())
            for name, value in row.get("m", {}).items()
        ]
        for start in range(0, len(batch), BATCH):
            self.client.log_batch(run_id, metrics=batch[start : start + BATCH])
        return offset + len(data)

    def _close(self, run_id: str, meta: dict[str, Any], folder: Path) -> None:
        from mlflow.entities import Metric

        end_path = folder / "end.json"
        end = read_json(end_path) if end_path.is_file() else {"status": "KILLED", "ended_ms": None}
        numbers = {name: float(value) for name, value in end.get("metrics", {}).items() if _is_number(value)}
        if end.get("seconds") is not None:
            numbers["seconds"] = float(end["seconds"])
        stamp = end["ended_ms"] or meta["started_ms"]
        self.client.log_batch(run_id, metrics=[Metric(_key(f"final.{k}"), v, stamp, 0) for k, v in numbers.items()])
        for name, value in end.get("facts", {}).items():
            self.client.set_tag(run_id, f"athanor.{_key(name)}", str(value))
        if end.get("error"):
            self.client.set_tag(run_id, "athanor.error", end["error"])
        if any((folder / "files").iterdir()):
            self.client.log_artifacts(run_id, str(folder / "files"))
        status = end["status"] if end["status"] in ("FINISHED", "FAILED", "KILLED") else "FAILED"
        self.client.set_terminated(run_id, status=status, end_time=end["ended_ms"])
        parent = self._parent(meta)
        stage = meta["stage"].replace("-", "_")
        self.client.log_batch(parent, metrics=[Metric(_key(f"{stage}.{k}"), v, stamp, 0) for k, v in numbers.items()])
        self.client.set_tag(parent, f"athanor.made_by.{meta['stage']}", meta["run"])
        self.client.set_terminated(parent, status=status, end_time=end["ended_ms"])


def _key(name: str) -> str:
    """A name MLflow accepts: letters, digits, and _ - . space : /"""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _quoted(text: str) -> str:
    return text.replace("'", "\\'")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

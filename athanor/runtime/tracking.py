"""MLflow as a view of the journals: one parent run per configuration, one child per executed stage.

Every step can be repeated after a crash at any moment: runs are found again by
their tags, MLflow drops exact duplicates of (key, timestamp, step, value), and
a parent's parameters, headlines, curves, status and makers are those of its
children. A child has its curves and its stage's plain numbers; all others are
in its file metrics.json.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from athanor.base.artifacts import digest, naming, write_json
from athanor.runtime import overview
from athanor.runtime.headlines import headlines
from athanor.runtime.journal import Record, last_ms, read_after
from athanor.runtime.redact import redact
from athanor.runtime.store import (
    EXPERIMENT,
    StoreReplaced,
    artifacts_of,
    at_work,
    database,
    delivery,
    identity,
    make_tables,
    store_lock,
    without_traceback,
)

if TYPE_CHECKING:
    from mlflow.entities import Run

MAX_ITEMS_PER_REQUEST = {"metrics": 800, "params": 100, "tags": 100}  # of a request
CHUNK_BYTES = 2**20
PARAM_CHARS = 6000
TAG_CHARS = 5000
# No retries inside the client: a request whose answer was lost may have made a run, so an attempt begins with a search.
HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_DISABLE_TELEMETRY": "true"}


class Tracker:
    """A connection to one tracking store. Import of mlflow takes seconds, so it happens here and not before."""

    def __init__(self, root: Path, uri: str) -> None:
        for name, value in HTTP.items():
            os.environ.setdefault(name, value)
        os.environ.pop("MLFLOW_RUN_ID", None)  # it would turn every new run into that one
        # The address without its secrets names the store: a new password does not make it another store.
        self.root, self.uri, self.name = root, uri, redact(uri)
        # Two first constructions at once crash while both create the tables.
        with store_lock(uri):
            from mlflow.tracking import MlflowClient

            logging.getLogger("mlflow.store.db.utils").addFilter(without_traceback)
            path = database(uri)
            if path is not None and not path.exists():
                make_tables(path)
            self.client = MlflowClient(tracking_uri=uri)
            experiment = self.client.get_experiment_by_name(EXPERIMENT)
            if experiment is None:
                artifacts = None if uri.startswith("http") else artifacts_of(path or root / "mlflow.db").as_uri()
                experiment_id = self.client.create_experiment(EXPERIMENT, artifact_location=artifacts)
                experiment = self.client.get_experiment(experiment_id)
            elif experiment.lifecycle_stage == "deleted":  # its name cannot be used again, and runs need a place
                self.client.restore_experiment(experiment.experiment_id)
        if experiment.tags.get(overview.VIEW_TAG) != overview.VIEW_STATE:
            self.client.set_experiment_tag(experiment.experiment_id, overview.VIEW_TAG, overview.VIEW_STATE)
        self.experiment = experiment.experiment_id
        self.store = f"{experiment.experiment_id}@{experiment.creation_time}"  # another after the database was deleted
        self._file = identity(uri)

    def check(self) -> None:
        """Fail when the database file was deleted or replaced under this connection."""
        if identity(self.uri) != self._file:
            raise StoreReplaced

    def lacks(self, folder: Path) -> bool:
        """True when a run was delivered to this address, but the store there was replaced by a new one since."""
        state = delivery(folder)
        return state.get("uri") == self.name and state.get("store") != self.store

    def ship(self, folder: Path, live: bool) -> None:
        """Bring one run up to date; idempotent."""
        meta = Record(folder / "meta.json")
        path = folder / "ship.json"
        state = delivery(folder)
        if (state.get("uri"), state.get("store")) != (self.name, self.store):
            state = {"uri": self.name, "store": self.store, "offset": 0}  # another store: send it everything
        elif not live and state.get("dead") and state.get("resumed") == meta["resumed"]:
            if not (folder / "end.json").is_file() and not read_after(folder, state["offset"]):
                return
        goes_on = state.get("resumed", 0) != meta["resumed"]
        begins = live and (goes_on or "mlflow_run" not in state or state.get("closed") or state.get("dead"))
        if "mlflow_run" not in state:
            state["mlflow_run"] = self._open(meta)
            write_json(path, state)
        run_id = state["mlflow_run"]
        if goes_on:
            self.client.set_tag(run_id, "athanor.resumed", str(meta["resumed"]))
        if begins:
            at_work(self.client, run_id)
            with store_lock(self.uri):
                self._update_parent(self._parent(meta))
        state |= {"closed": False, "dead": False, "resumed": meta["resumed"]}
        for health in self._metrics(run_id, meta, folder / "journal.jsonl", state):
            worst = max(health, state.get("health", ""), key=overview.HEALTH.index)
            if worst != state.get("health", ""):
                self.client.set_tag(run_id, "health", worst)
            state |= {"health": worst}
            write_json(path, state)
        if not live:
            ended = (folder / "end.json").is_file()
            self._close(run_id, meta, folder)
            state |= {"closed": ended, "dead": not ended}
        write_json(path, state)

    def explained(self, folder: Path) -> bool:
        """After a failure with one run: True when its user deleted it in the UI. It stays deleted until --rebuild.

        Raises when the store itself does not answer.
        """
        from mlflow.exceptions import MlflowException

        self.client.get_experiment(self.experiment)
        state = delivery(folder)
        if "mlflow_run" not in state:
            return False
        try:
            run = self.client.get_run(state["mlflow_run"])
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # an older copy of the store came back
                (folder / "ship.json").unlink()
            return False
        if run.info.lifecycle_stage == "deleted":
            write_json(folder / "ship.json", {**state, "closed": True})
        return run.info.lifecycle_stage == "deleted"

    def forget(self, run_ids: Iterable[str]) -> None:
        """Delete the runs of these journals, and their parents unless other checkouts have runs there."""
        own_runs = set(run_ids)
        with store_lock(self.uri):
            parents = set()
            for run in self._search("tags.`athanor.run` LIKE '%'"):
                if run.data.tags["athanor.run"] in own_runs:
                    self.client.delete_run(run.info.run_id)
                    parents.add(run.data.tags.get("mlflow.parentRunId"))
            for run in self._search("tags.`athanor.key` LIKE '%'"):
                if run.info.run_id in parents and not self._by_tag("mlflow.parentRunId", run.info.run_id):
                    self.client.delete_run(run.info.run_id)

    def _search(self, query: str) -> list[Run]:
        page = self.client.search_runs([self.experiment], query, max_results=1000)
        runs = list(page)
        while page.token:
            page = self.client.search_runs([self.experiment], query, max_results=1000, page_token=page.token)
            runs += page
        return runs

    def _by_tag(self, tag: str, value: str) -> list[Run]:
        """Active runs with a tag, the oldest first. The query language cannot quote a quote, so it gets a wildcard."""
        candidates = self._search(f"tags.`{tag}` LIKE '{value.replace(chr(39), '_')}'")
        exact = [run for run in candidates if run.data.tags.get(tag) == value]
        return sorted(exact, key=lambda run: (run.info.start_time, run.info.run_id))

    def _parent(self, meta: dict[str, Any]) -> str:
        """The run that groups all stages of one (experiment or branch, commit, params). Call with the store locked."""
        parents = self._by_tag("athanor.key", meta["key"])
        for duplicate in parents[1:]:  # merged into the older: every shipper chooses alike
            for name in duplicate.data.metrics:
                history = self.client.get_metric_history(duplicate.info.run_id, name)
                self._send(parents[0].info.run_id, metrics=list(history))
            for child in self._by_tag("mlflow.parentRunId", duplicate.info.run_id):
                self.client.set_tag(child.info.run_id, "mlflow.parentRunId", parents[0].info.run_id)
            self.client.delete_run(duplicate.info.run_id)
        if parents:
            if parents[1:]:
                self._update_parent(parents[0].info.run_id)
            return parents[0].info.run_id
        # The ending distinguishes runs of one commit by their parameters. It is short: the UI cuts names at 18 letters.
        name = meta["experiment"] or re.sub(r"@([^@]*)/(.{4}).*$", r"-\1-\2", meta["key"])
        return self._new(meta, name, overview.parent_tags(meta))

    def _new(self, meta: dict[str, Any], name: str, tags: dict[str, Any]) -> str:
        texts = {key: str(value)[:TAG_CHARS] for key, value in tags.items()}
        run = self.client.create_run(self.experiment, start_time=meta["started_ms"], run_name=name, tags=texts)
        return run.info.run_id

    def _open(self, meta: dict[str, Any]) -> str:
        """The MLflow run of a journal, with its parameters and inputs; made if need be."""
        with store_lock(self.uri):
            parent = self._parent(meta)
            # A crash between creating the run and noting its id must not make a second one.
            runs = self._by_tag("athanor.run", meta["run"])
            for duplicate in runs[1:]:
                self.client.delete_run(duplicate.info.run_id)
            run_id = runs[0].info.run_id if runs else self._new(meta, meta["stage"], overview.child_tags(meta, parent))
            for target_id in (run_id, parent):
                self._add_params(target_id, meta["params"])
            self._add_inputs(run_id, meta)
        return run_id

    def _add_inputs(self, run_id: str, meta: dict[str, Any]) -> None:
        """Inputs that a run has not yet. Call with the store locked.

        MLflow 3.17 loses those of a run when another one logs a dataset of the same
        name and digest for the first time at the same moment.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = {path: digest.removesuffix(".dir")[:36] for path, digest in meta["inputs"].items()}
        if not inputs:
            return
        known = {(each.dataset.name, each.dataset.digest) for each in self.client.get_run(run_id).inputs.dataset_inputs}
        new = [
            DatasetInput(
                Dataset(path, digest, "dvc", json.dumps({"path": path, "md5": meta["inputs"][path]})),
                [InputTag("mlflow.data.context", meta["stage"])],
            )
            for path, digest in inputs.items()
            if (path, digest) not in known
        ]
        if new:
            self.client.log_inputs(run_id, new)

    def _add_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Parameters that a run has not yet; MLflow refuses to change one."""
        from mlflow.entities import Param

        known = self.client.get_run(run_id).data.params
        new = {overview.key(name): str(value)[:PARAM_CHARS] for name, value in params.items()}
        self._send(run_id, params=[Param(key, value) for key, value in new.items() if key not in known])

    def _send(self, run_id: str, **lists: list[Any]) -> None:
        for kind, items in lists.items():
            for start in range(0, len(items), MAX_ITEMS_PER_REQUEST[kind]):
                self.client.log_batch(run_id, **{kind: items[start : start + MAX_ITEMS_PER_REQUEST[kind]]})

    def _metrics(self, run_id: str, meta: dict[str, Any], path: Path, state: dict[str, Any]) -> Iterator[str]:
        """Send the complete journal lines after the offset in `state`, in chunks; the parent gets some of them.

        Yields, for each chunk that arrived, the health that its rows report ("" for none); `state` has the offset then.
        """
        from mlflow.entities import Metric

        if not path.is_file():
            return
        with open(path, "rb") as file:
            while True:
                with naming(path):
                    file.seek(state["offset"])
                    data = file.read(CHUNK_BYTES)
                    data = (
                        data[: data.rfind(b"\n") + 1] or data + file.readline()
                    )  # one line may be longer than a chunk
                if not data.endswith(b"\n"):
                    return
                points, curves, health = overview.points(data, meta["stage"], state)
                self._send(run_id, metrics=[Metric(*point) for point in points])
                if curves:
                    with store_lock(self.uri):
                        self._send(self._parent(meta), metrics=[Metric(*point) for point in curves])
                state["offset"] += len(data)
                yield health

    def _close(self, run_id: str, meta: dict[str, Any], folder: Path) -> None:
        """Status, files and, of a finished run, its numbers: an unfinished one may resume and end with others."""
        from mlflow.entities import Metric, RunTag

        path = folder / "end.json"
        end: dict[str, Any] = {"status": "KILLED", "ended_ms": last_ms(folder, meta["started_ms"])}
        end |= Record(path) if path.is_file() else {}
        status = end["status"] if end["status"] in ("FINISHED", "FAILED", "KILLED") else "FAILED"
        metrics, stamp = end.get("metrics", {}), end["ended_ms"]
        scores = headlines(meta["stage"], metrics)
        plain = {name: value for name, value in metrics.items() if "." not in name} | scores
        plain |= {"seconds": end.get("seconds")}
        numbers = {name: float(value) for name, value in plain.items() if type(value) in (int, float)}
        final, top = [], []
        if status == "FINISHED":
            final = [Metric(overview.key(f"summary/{name}"), value, stamp, 0) for name, value in numbers.items()]
            if "train_loss" in numbers:
                scores |= {"seconds": numbers["seconds"]}
            prefix, steps = (
                overview.prefix(meta["stage"]),
                dict.fromkeys(overview.CURVES.values(), numbers.get("steps", 0)),
            )
            # At the end of its curve, where it has one: tables show the point of the last step.
            top = [Metric(f"{prefix}.{n}", float(value), stamp, int(steps.get(n, 0))) for n, value in scores.items()]
            self.client.log_dict(run_id, metrics, "metrics.json")
        texts = {
            f"athanor.{overview.key(name)}": str(value)[:TAG_CHARS] for name, value in end.get("facts", {}).items()
        }
        if end.get("error"):
            texts["athanor.error"] = end["error"][:TAG_CHARS]
        if status != "FINISHED" and "seconds" in numbers:
            texts["athanor.seconds"] = str(numbers["seconds"])
        self._send(run_id, metrics=final, tags=[RunTag(key, value) for key, value in texts.items()])
        if (folder / "files").is_dir() and any((folder / "files").iterdir()):
            self.client.log_artifacts(run_id, str(folder / "files"))
        self.client.set_terminated(run_id, status=status, end_time=stamp)
        with store_lock(self.uri):
            parent = self._parent(meta)
            self._add_inputs(run_id, meta)  # again, for shippers of another machine share no lock
            child = self.client.get_run(run_id)
            for stale in {"athanor.error", "athanor.seconds"} & set(child.data.tags) - set(texts):
                self.client.delete_tag(run_id, stale)  # of an earlier attempt
            if child.data.tags["mlflow.parentRunId"] != parent:
                self.client.set_tag(run_id, "mlflow.parentRunId", parent)
            self._send(parent, metrics=top)
            self._update_parent(parent)

    def _update_parent(self, parent_id: str) -> None:
        """What a parent says of all its children: parameters, makers, health, status, and a description."""
        from mlflow.entities import Metric, RunTag

        children = [run for run in self._by_tag("mlflow.parentRunId", parent_id) if "athanor.run" in run.data.tags]
        children.sort(key=lambda run: (run.info.start_time, run.data.tags["athanor.run"]))
        self._add_params(parent_id, {key: value for run in children for key, value in run.data.params.items()})
        tags: dict[str, str] = {}
        for child_tags in (run.data.tags for run in children if run.info.status == "FINISHED"):
            tags |= {key: value for key, value in child_tags.items() if key.startswith("athanor.made_by.")}
            tags[f"athanor.made_by.{child_tags['athanor.stage']}"] = child_tags["athanor.run"]
        self._add_params(parent_id, overview.params_of(self.root, overview.makers(tags).values()))
        points, healths = overview.restored(self.root, tags, {run.data.tags["athanor.run"] for run in children})
        self._send(parent_id, metrics=[Metric(*point) for point in points])
        healths += [run.data.tags.get("health", "") for run in children]
        health = max(healths, key=overview.HEALTH.index, default="")
        tags |= {"health": health} if health else {}
        data = self.client.get_run(parent_id).data
        tags["athanor.changed"] = overview.changed(self.root, {**data.tags, **tags}, data.params)[:TAG_CHARS]
        text = overview.description(self.root, {**data.tags, **tags}, data.params, data.metrics, health)
        old = data.tags.get(overview.NOTE, "")
        if not old or data.tags.get(overview.NOTE_DIGEST) == digest(old):  # what a person wrote there stays
            tags |= {overview.NOTE: text[:TAG_CHARS], overview.NOTE_DIGEST: digest(text[:TAG_CHARS])}
        self._send(parent_id, tags=[RunTag(key, value) for key, value in tags.items()])
        if any(run.info.status == "RUNNING" for run in children):
            at_work(self.client, parent_id)
        elif children:
            last = max(children, key=lambda run: run.info.end_time or 0)
            self.client.set_terminated(parent_id, status=last.info.status, end_time=last.info.end_time)

"""What the errors are put into: the file of feedback, a journal, its way to MLflow, prune, and the stages."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError
from athanor.runtime.closure import stage_module
from athanor.runtime.journal import Journal, live, rows
from tools.drill import compare
from tools.forked import forked
from tools.scratch import Scratch

ROWS = 40
LIMIT_SECONDS = 300.0


class Operation:
    """Something to run again and again in one place, `work`, which `begin` makes as it is before the first run.

    inside: the folder whose files count. `run` is called in a fork with `work` as its directory and returns its status.
    `problems` says what is wrong with what a run with status 0 left behind, what it acknowledged included.
    """

    def __init__(self, name: str, scratch: Scratch) -> None:
        base = scratch.base.parent / name
        self.name, self.scratch, self.base, self.work = name, scratch, base, base / "work"
        self.inside, self.template = self.work, base / "template"
        self.acknowledged, self.log = base / "acknowledged", base / "log"

    def prepare(self) -> None:
        self.template.mkdir(parents=True)

    def begin(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.template, self.work, symlinks=True)
        self.acknowledged.unlink(missing_ok=True)

    def between(self, number: int) -> None:
        """What may happen between two runs."""

    def run(self) -> int:
        raise NotImplementedError

    def problems(self) -> str:
        raise NotImplementedError

    def acknowledge(self, **facts: Any) -> None:
        with open(self.acknowledged, "a") as file:
            file.write(json.dumps(facts) + "\n")

    def told(self) -> list[dict[str, Any]]:
        text = self.acknowledged.read_text() if self.acknowledged.is_file() else ""
        return [json.loads(line) for line in text.splitlines()]


def tell(error: Exception) -> None:
    with contextlib.suppress(OSError):  # where telling is what fails
        print(error, file=sys.stderr)


class Store(Operation):
    """Feedback as people give it: what a call returned for is there afterwards, what was deleted is not."""

    def run(self) -> int:
        from athanor.serving.feedback import Feedback

        feedback, failed = Feedback("feedback.jsonl"), 0

        def attempt(call: Callable[..., Any], *args: Any) -> Any:
            nonlocal failed
            try:
                row = call(*args) or {"chat": args[0], "gone": True}
            except AthanorError as error:
                failed += 1
                tell(error)
                return {}
            self.acknowledge(**{name: row.get(name) for name in ("chat", "message", "id", "status", "gone")})
            return row

        for number in range(3):
            chat = {"chat": f"chat {number}", "title": "", "path": [], "prompt": [{"role": "user", "content": "?"}]}
            said = {**chat, "message": f"m{number}", "parent": "p", "model": "m", "answer": "an answer " * 300}
            attempt(feedback.record, {**said, "verdict": "up"})
            if row := attempt(feedback.record, {**said, "verdict": "down", "correction": "better"}):
                attempt(feedback.settle, row["id"], "accepted")
            if number == 1:
                attempt(feedback.forget, chat["chat"])
        return 1 if failed else 0

    def problems(self) -> str:
        from athanor.serving.feedback import Feedback

        rows, told = {row["message"]: row for row in Feedback(self.work / "feedback.jsonl").rows()}, self.told()
        gone = {row["chat"] for row in told if row["gone"]}
        for row in told:
            kept = rows.get(row["message"])
            if row["chat"] in gone:
                if any(one["chat"] == row["chat"] for one in rows.values()):
                    return f"{row['chat']} is back"
            elif row["chat"] != "chat 1" and (
                kept is None or kept["id"] != row["id"] or row["status"] and not kept["status"]
            ):
                return f"what was said about {row['message']} is lost"
        return ""


class Journalled(Operation):
    """A run that logs, is closed, and is continued by the next process when it was not."""

    def run(self) -> int:
        try:
            journal = Journal(Path("runs/toy-1"))
            for step in range(ROWS):
                journal.scalars(step, {"loss": 1 / (1 + step), "norm": float(step)})
                self.acknowledge(step=step)
            journal.event("note", text="nearly done")
            journal.close("FINISHED", metrics={"loss": 0.5})
        except (OSError, AthanorError) as error:
            tell(error)
            return 1
        return 0

    def problems(self) -> str:
        folder = self.work / "runs/toy-1"
        if not (folder / "end.json").is_file() or read_json(folder / "end.json")["status"] != "FINISHED":
            return "the run is not closed"
        found = [(row["s"], row["m"]) for row in live(rows((folder / "journal.jsonl").read_bytes())) if "m" in row]
        wanted = [(step, {"loss": 1 / (1 + step), "norm": float(step)}) for step in range(ROWS)]
        merged: dict[int, dict[str, float]] = {}
        for step, values in found:
            if merged.get(step, {}).keys() & values.keys():
                return f"step {step} is there twice"
            merged.setdefault(step, {}).update(values)
        return "" if sorted(merged.items()) == wanted else f"{len(merged)} steps of {ROWS}, or other values"


class Shipped(Operation):
    """Journals of finished stages, delivered to a database of MLflow: one with a run in it, or none yet (`ship-first`)."""

    def prepare(self) -> None:
        super().prepare()
        runs = self.template / ".athanor" / "runs"
        for folder in sorted((self.scratch.inputs / ".athanor" / "runs").glob("*"))[:2]:
            shutil.copytree(folder, runs / folder.name)
        os.environ.pop("ATHANOR_TRACKING", None)
        from athanor.runtime import ship

        # The shipper waits for stages that go on and for servers that come back; here are none.
        ship.POLL_SECONDS, ship.IDLE_SECONDS, ship.GIVE_UP_SECONDS = 0.01, 0.05, 0.1
        self.begin()
        if self.name == "ship":  # the database has one run already, which must not suffer
            held = sorted((self.work / ".athanor" / "runs").glob("*"))[1:]
            for folder in held:
                folder.rename(self.base / folder.name)
            self.deliver()
            for folder in held:
                (self.base / folder.name).rename(folder)
            shutil.rmtree(self.template)
            shutil.copytree(self.work, self.template)
        self.deliver()
        self.wanted = self.delivered()

    def deliver(self) -> None:
        """In a fork, so that threads and connections of a library do not end up in later ones."""
        if status := forked(self.run, self.work, self.log, LIMIT_SECONDS).status:
            raise AthanorError(f"a run without errors ended with {status}", where=str(self.work), fix="mend that first")

    def run(self) -> int:
        from athanor.runtime import ship

        sys.argv = ["athanor ship"]
        return ship.main()

    def delivered(self) -> str:
        """Everything but MLflow's own ids and times."""
        with contextlib.closing(sqlite3.connect(self.work / "mlflow.db")) as db:
            name = "(SELECT name FROM runs WHERE runs.run_uuid = m.run_uuid)"
            queries = (
                f"SELECT {name}, key, step, value, is_nan, timestamp FROM metrics m ORDER BY 1, 2, 3, 4",
                f"SELECT {name}, key, value FROM params m ORDER BY 1, 2",
                "SELECT name, status, lifecycle_stage, end_time FROM runs ORDER BY 1, 2",
            )
            return json.dumps([db.execute(query).fetchall() for query in queries])

    def problems(self) -> str:
        found = self.delivered()
        return "" if found == self.wanted else f"{len(found)} characters of {len(self.wanted)} in MLflow, or others"


class Pruned(Operation):
    """Slots that go, and some that must not."""

    def prepare(self) -> None:
        super().prepare()
        shutil.copytree(self.scratch.inputs / ".athanor" / "slots", self.template / ".athanor" / "slots")
        (pinned,) = (self.template / ".athanor" / "slots").glob("*/*/PINNED")  # the trunk that pretrain pins
        self.kept = pinned.parent.relative_to(self.template)

    def run(self) -> int:
        from athanor.cli.cli import main

        sys.argv = ["athanor", "slots", "prune", "--days", "0"]
        return main()

    def problems(self) -> str:
        left = [path.relative_to(self.work) for path in (self.work / ".athanor" / "slots").glob("*/*") if path.is_dir()]
        if left != [self.kept]:
            return f"left are {[path.name for path in left]}"
        ours, theirs = ({p.name: p.read_bytes() for p in (base / self.kept).iterdir() if p.is_file() and p.name != "lock"}
                        for base in (self.work, self.template))  # fmt: skip
        return "" if ours == theirs else "the pinned slot is not as it was"


class Stage(Operation):
    """A stage on the inputs of a micro run; its outputs, metrics and plots must be those of that run."""

    def __init__(self, name: str, scratch: Scratch) -> None:
        super().__init__(name, scratch)
        self.inside = scratch.base.parent
        module = stage_module(scratch.graph.stages[name]["cmd"])
        self.body = importlib.import_module(module or "").run

    def prepare(self) -> None:
        self.scratch.folder(self.template, self.scratch.params, self.name)

    def begin(self) -> None:
        super().begin()
        for name in self.scratch.graph.dependencies(self.name):  # metrics and manifests, which are no whole output
            source, target = self.scratch.inputs / name, self.work / name
            if source.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.resolve().exists():
                    target.symlink_to(source)

    def between(self, number: int) -> None:
        if number % 2:  # DVC removes a stage's outputs before it runs it; a hand does not
            for path in compare.files(self.work, self.scratch.results(self.name)).values():
                path.unlink()

    def run(self) -> int:
        from athanor.runtime.process import execute

        return execute(self.name, self.body)

    def problems(self) -> str:
        names = self.scratch.results(self.name)
        return "; ".join(
            compare.differing_files(compare.files(self.scratch.inputs, names), compare.files(self.work, names))[:2]
        )


KINDS = {"store": Store, "journal": Journalled, "ship": Shipped, "ship-first": Shipped, "prune": Pruned}


def named(name: str, scratch: Scratch) -> Operation:
    """An operation by its name, with a place of its own in the scratch directory."""
    return KINDS.get(name, Stage)(name, scratch)

"""Shipper processes for tests: real ones, forked from a process that has mlflow imported already.

Importing mlflow takes seconds, and a test that kills a shipper twenty times
would pay for it twenty times. Run as a script this is that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from athanor.base.artifacts import write_json
from athanor.runtime.journal import Journal
from tests.runtime.view import ROOT, environment, meta

QUICK = {"IDLE_SECONDS": 0.5, "POLL_SECONDS": 0.05, "LIVE_SECONDS": 0.05}


def serve() -> None:
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    from mlflow.tracking import MlflowClient  # noqa: F401

    from athanor.runtime import ship, tracking  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(order["env"])
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for name, value in order["settings"].items():
            setattr(ship, name, value)
        os.chdir(order["root"])
        sys.argv = ["athanor ship", *order["words"]]
        code = 1
        try:
            code = ship.main()
        finally:
            os._exit(code)


class Shippers:
    """Starts shippers of any checkout, waits for them, kills them."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.runtime.shippers"]
        pipe = subprocess.PIPE
        self._started: set[int] = set()
        self._server = subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, text=True)

    def start(self, checkout: Checkout, *words: str, **settings: float) -> int:
        env = {"MLFLOW_TRACKING_URI": checkout.uri} if checkout.uri else {}
        log = str(checkout.path / ".athanor" / "ship.log")
        order = {"root": str(checkout.path), "env": env, "log": log, "words": words, "settings": {**QUICK, **settings}}
        print(json.dumps(order), file=self._server.stdin, flush=True)
        pid = int(self._server.stdout.readline())
        self._started.add(pid)
        return pid

    def run(self, *checkouts: Checkout, words: tuple[str, ...] = ()) -> None:
        """Start one for each checkout at once and wait until all are done."""
        for pid in [self.start(checkout, *words) for checkout in checkouts]:
            self.join(pid)

    def join(self, pid: int) -> None:
        until(lambda: not running(pid))
        self._started.discard(pid)

    def close(self) -> None:
        for pid in self._started:  # of tests that failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._server.stdin.close()
        self._server.wait()


class Checkout:
    """A directory with journals in it; `uri` is its tracking store, mlflow.db in it by default."""

    def __init__(self, path, uri: str = "") -> None:
        self.path, self.uri = path, uri
        (path / ".athanor" / "runs").mkdir(parents=True)

    @property
    def client(self):
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=self.uri or f"sqlite:///{self.path}/mlflow.db")

    @property
    def log(self) -> str:
        path = self.path / ".athanor" / "ship.log"
        return path.read_text() if path.is_file() else ""

    def folder(self, run: str):
        return self.path / ".athanor" / "runs" / run

    def open(self, run: str, stage: str = "pretrain", steps: int = 0, **more: Any) -> Journal:
        journal = Journal(self.folder(run))
        write_json(journal.folder / "meta.json", meta(run, stage, **more))
        points(journal, 0, steps)
        return journal

    def closed(self, run: str, stage: str = "pretrain", steps: int = 3, status: str = "FINISHED", **more) -> None:
        journal = self.open(run, stage, steps, **more)
        (journal.folder / "files" / f"{run}.txt").write_text(run)
        finish(journal, status)


def points(journal: Journal, first: int, last: int) -> None:
    for step in range(first, last):
        odd = float("nan") if step % 7 == 3 else float("inf") if step % 11 == 5 else 1.0 / (step + 1)
        journal.scalars(step, {"loss": odd, "lr": 1e-3 / (step + 1), "val_bpb.all": 2.0 / (step + 1)})


def finish(journal: Journal, status: str = "FINISHED") -> None:
    more = {} if status == "FINISHED" else {"error": f"{status} for a reason"}
    journal.close(
        status,
        metrics={"validation.all.bpb": 1.5, "train_loss": 2.0, "steps": 3},
        facts={"slot": "abc"},
        seconds=2.0,
        **more,
    )


def die(journal: Journal) -> None:
    """What SIGKILL leaves: no end.json and no lock."""
    journal._file.close()


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(true, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


if __name__ == "__main__":
    serve()

"""The journal: append-only JSON lines that a run leaves behind, whatever happens to the tracking server.

A run is a directory `.athanor/runs/<id>/`:

    meta.json      who, what, where: written once when the run opens
    journal.jsonl  {"t": ms, "s": step, "m": {name: value}} and {"t": ms, "event": ...};
                   after {"event": "rollback", "to": step} come the steps behind `to` again
    files/         small files to show with the run (plots, samples, the model card)
    end.json       status, final metrics, output hashes: written when the run closes

Appending a line costs about 0.02 ms; a synchronous tracking call costs 24 ms
on SQLite and minutes when the server is gone. The shipper turns journals into
tracking runs, and can do it again from nothing.

While the journal is open it is locked (flock, shared), which is how others
know that its writer lives: the lock dies with the process, whereas a process
id may be another process's by now. Texts are written without secrets.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json, write_json
from athanor.base.errors import AthanorError, InputError
from athanor.runtime.locks import locked, process_exists
from athanor.runtime.redact import redact

TAIL_BYTES = 2**20
ROLLBACK = "rollback"
DAMAGED = "delete this run's folder; results and checkpoints are elsewhere"


def now_ms() -> int:
    return int(time.time() * 1000)


def rows(data: bytes) -> Iterator[dict[str, Any]]:
    """The rows of whole journal lines. What is no JSON (a block of zeros after a power loss) is passed over."""
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def live(written: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that count: without numbers of steps from which the run went back later."""
    live_rows: list[dict[str, Any]] = []
    for row in written:
        if row.get("event") == ROLLBACK:
            live_rows = [earlier for earlier in live_rows if "s" not in earlier or earlier["s"] <= row["to"]]
        live_rows.append(row)
    return live_rows


def last_ms(folder: Path, default: int) -> int:
    """When the last row was written; the end of a run that could not say so itself."""
    path = folder / "journal.jsonl"
    data = read_after(folder, max(0, path.stat().st_size - TAIL_BYTES)) if path.is_file() else b""
    return max((row["t"] for row in rows(data)), default=default)


def read_after(folder: Path, offset: int) -> bytes:
    """The whole lines that a run's journal has after `offset`, or the first of them."""
    path = folder / "journal.jsonl"
    if not path.is_file():
        return b""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(TAIL_BYTES)
        return data[: data.rfind(b"\n") + 1]


class Record(dict[str, Any]):
    """A run's meta.json or end.json; InputError where it cannot be read or lacks a key."""

    def __init__(self, path: Path) -> None:
        value = read_json(path)
        if not isinstance(value, dict):
            raise InputError(f"expected an object, found {type(value).__name__}", where=path, fix=DAMAGED)
        super().__init__(value)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise InputError(f"lacks '{key}'", where=self._path, fix=DAMAGED)


def alive(folder: Path) -> bool:
    """True while a process writes this run; False for a damaged one, which is reported when it is shipped."""
    if (folder / "end.json").is_file():
        return False
    try:
        return process_exists(Record(folder / "meta.json")["pid"]) and locked(folder / "journal.jsonl")
    except AthanorError:
        return False


def finished(folder: Path) -> bool:
    """True when this run came to its end, which no later process may go on with."""
    end = folder / "end.json"
    return end.is_file() and Record(end)["status"] == "FINISHED"


class Journal:
    """Writes one run directory. Lines survive a kill of the process; a torn last line is cut at the next open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "files").mkdir(parents=True, exist_ok=True)
        self.path = folder / "journal.jsonl"
        self.last_step = self._recover()
        self._file = open(self.path, "a", encoding="utf-8", buffering=1)
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def _recover(self) -> dict[str, int]:
        """Cut a torn last line; return the last step logged for each metric name."""
        last: dict[str, int] = {}
        if not self.path.is_file():
            return last
        data = self.path.read_bytes()
        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) != len(data):
            os.truncate(self.path, len(complete))
        for row in rows(complete):
            for name in row.get("m", ()):
                last[name] = max(last.get(name, -1), row["s"])
            if row.get("event") == ROLLBACK:
                last = {name: min(step, row["to"]) for name, step in last.items()}
        return last

    def begin(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Count this process in meta.json; what else it says is asked of `facts` when there is none yet."""
        path = self.folder / "meta.json"
        meta = Record(path) if path.is_file() else {"run": self.folder.name, "resumed": -1, **facts()}
        write_json(path, {**meta, "pid": os.getpid(), "resumed": meta["resumed"] + 1})

    def scalars(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """Append numbers at a step; returns those that were new. A step that was already logged is skipped.

        A resumed run repeats the steps since its last checkpoint; they give
        the same numbers, and logging them twice would double points in charts.
        """
        fresh = {name: float(value) for name, value in values.items() if step > self.last_step.get(name, -1)}
        if not fresh:
            return fresh
        for name in fresh:
            self.last_step[name] = step
        # JSON has no NaN; MLflow charts it, so it travels as a string.
        safe = {name: value if math.isfinite(value) else str(value) for name, value in fresh.items()}
        self._write({"t": now_ms(), "s": step, "m": safe})
        return fresh

    def rewind(self, step: int, **facts: Any) -> None:
        """The run went back to `step`: later ones come again, with other numbers, and `live` passes over the old.

        The event stands before the new numbers, so a reader that follows the
        file, or a killed run that opens it again, knows which ones count.
        """
        self.last_step = {name: min(last, step) for name, last in self.last_step.items()}
        self.event(ROLLBACK, to=step, **facts)

    def event(self, name: str, **facts: Any) -> None:
        self._write({"t": now_ms(), "event": name, **redact(facts)})

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self, status: str, **facts: Any) -> None:
        """Finish the run with FINISHED, FAILED or KILLED. Reopening the directory resumes it."""
        try:  # before the lock goes: a run without both was killed
            write_json(self.folder / "end.json", {"status": status, "ended_ms": now_ms(), **redact(facts)})
        finally:
            self._file.close()

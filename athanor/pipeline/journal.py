"""The journal: append-only JSON lines that a run leaves behind, whatever happens to the tracking server.

A run is a directory `.athanor/runs/<id>/`:

    meta.json      who, what, where: written once when the run opens
    journal.jsonl  {"t": ms, "s": step, "m": {name: value}} and {"t": ms, "event": ...}
    files/         small files to show with the run (plots, samples, the model card)
    end.json       status, final metrics, output hashes: written when the run closes

Appending a line costs about 0.02 ms; a synchronous tracking call costs 24 ms
on SQLite and minutes when the server is gone. The shipper turns journals into
tracking runs, and can do it again from nothing.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from athanor.artifacts import write_json


def now_ms() -> int:
    return int(time.time() * 1000)


class Journal:
    """Writes one run directory. Lines survive a kill of the process; a torn last line is cut at the next open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "files").mkdir(parents=True, exist_ok=True)
        self.path = folder / "journal.jsonl"
        self.last_step = self._recover()
        self._file = open(self.path, "a", encoding="utf-8", buffering=1)

    def _recover(self) -> dict[str, int]:
        """Cut a torn last line; return the last step logged for each metric name."""
        last: dict[str, int] = {}
        if not self.path.is_file():
            return last
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):
            os.truncate(self.path, len(whole))
        for line in whole.splitlines():
            row = json.loads(line)
            for name in row.get("m", ()):
                last[name] = max(last.get(name, -1), row["s"])
        return last

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Append numbers at a step. A step that was already logged is skipped.

        A resumed run repeats the steps since its last checkpoint; they give
        the same numbers, and logging them twice would double points in charts.
        """
        fresh = {name: float(value) for name, value in values.items() if step > self.last_step.get(name, -1)}
        if not fresh:
            return
        for name in fresh:
            self.last_step[name] = step
        # JSON has no NaN; MLflow charts it, so it travels as a string.
        safe = {name: value if math.isfinite(value) else str(value) for name, value in fresh.items()}
        self._write({"t": now_ms(), "s": step, "m": safe})

    def event(self, name: str, **facts: Any) -> None:
        self._write({"t": now_ms(), "event": name, **facts})

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self, status: str, **facts: Any) -> None:
        """Finish the run with FINISHED, FAILED or KILLED. Reopening the directory resumes it."""
        self._file.close()
        write_json(self.folder / "end.json", {"status": status, "ended_ms": now_ms(), **facts})

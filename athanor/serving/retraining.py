"""Training on the accepted corrections, started by the page: a process of its own that outlives the page and the server.

A shell writes the corrections where training reads them and runs `athanor repro`. It holds a lock while it runs, so that
there is one at a time; its log, whose last line says how it ended, lies in the folder of the lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.origins.replacing import at_work
from athanor.runtime.dvc_view import busy
from athanor.runtime.locks import locked
from athanor.runtime.redact import redact

FOLDER, LOCK, LOG, ROWS = Path(".athanor/retraining"), "lock", "log", "corpus/corrections.jsonl"
SCRIPT = f'"$0" -m athanor chat export {ROWS} --write --feedback "$1" && "$0" -m athanor repro; echo "ended with $?"'
DONE = "ended with 0"
PRIVATE = ("ATHANOR_API_KEY", "DVC_ROOT")  # the server's own
TAIL_BYTES, MOST_LINES = 16_384, 4
REASON = r"^(?!.*Training continues without).*(ERROR:|\bFix:)"  # that one is of a tracking store
SCORE = "your own questions"  # of the summary: how many of what was taught is right


class Running(InputError):
    """One is at work."""

    status = 409


class Retraining:
    """That of one checkout; `feedback` is the file with the corrections."""

    def __init__(self, root: Path, feedback: Path) -> None:
        self.root, self.feedback, self.folder = root, feedback, root / FOLDER

    def start(self) -> dict[str, Any]:
        """Start it and return its state; Running while one is at work, or the pipeline by another command."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / LOCK, "ab") as lock:
            at = busy(self.root / ".dvc/tmp") or ", ".join(at_work(self.root))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                at = at or "athanor repro"
            if at:
                what, fix = f"a training is under way here: {at}", "wait for its end, or end it: athanor stop"
                raise Running(what, where="retraining", fix=fix)
            command = ["sh", "-c", SCRIPT, sys.executable, str(self.feedback)]
            environment = {name: value for name, value in os.environ.items() if name not in PRIVATE}
            with open(self.folder / LOG, "wb") as log:
                subprocess.Popen(
                    command, cwd=self.root, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, pass_fds=[lock.fileno()],
                )  # fmt: skip
        return self.state()

    def state(self) -> dict[str, Any]:
        """`state` is none, running, done or failed; `text`, the last lines of its log; `taught`, the rows of one done."""
        path = self.folder / LOG
        if not path.is_file():
            return {"state": "none", "text": ""}
        if locked(self.folder / LOCK):
            return {"state": "running", "text": _tail(path, 1)}
        if _tail(path, 1) == DONE:
            rows = self.root / ROWS
            taught = rows.read_bytes().count(b"\n") if rows.is_file() else 0
            return {"state": "done", "text": _tail(path, MOST_LINES, SCORE), "taught": taught}
        # DVC prints the reason before its closing lines.
        return {"state": "failed", "text": _tail(path, MOST_LINES, REASON) or _tail(path, MOST_LINES)}


def _tail(path: Path, lines: int, of: str = ".") -> str:
    """The last lines of a log in which `of` is found, without what steers a terminal."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.read().decode("utf-8", "replace"))
    said = [line.strip() for line in re.split(r"[\r\n]+", text) if re.search(of, line.strip())]
    return redact("\n".join(said[-lines:]))

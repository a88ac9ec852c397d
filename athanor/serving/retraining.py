"""Training on the accepted corrections, started by the page: a process of its own that outlives the page and the server.

It replaces the checkout's result, so `catalog.keeping` makes an experiment of that first.

A shell writes the corrections where training reads them and runs `athanor repro`. It holds a lock while it runs, so that
there is one at a time; its log, whose last line says how it ended, lies in the folder of the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from athanor.base.artifacts import sha256_bytes
from athanor.base.errors import InputError
from athanor.catalog.keeping import RETURN, ROWS
from athanor.origins.replacing import at_work
from athanor.runtime.dvc_lock import LOCK as DVC_LOCK
from athanor.runtime.dvc_view import busy
from athanor.runtime.locks import locked
from athanor.runtime.redact import redact
from athanor.serving.feedback import Feedback, as_row

FOLDER, LOCK, LOG = Path(".athanor/retraining"), "lock", "log"
SCRIPT = f'"$0" -m athanor chat export {ROWS} --write --feedback "$1" && "$0" -m athanor repro; echo "ended with $?"'
DONE, STOPPED = "ended with 0", "ended with 75"
PROGRESS = "^(?![A-Z]+ at step )."  # no finding of the monitor
PRIVATE = ("ATHANOR_API_KEY", "DVC_ROOT")  # the server's own
HEAD_BYTES, TAIL_BYTES, MOST_LINES = 4096, 16_384, 4
REASON = r"^(?!.*Training continues without).*(ERROR:|\bFix:)"  # that one is of a tracking store
SCORE = "your own questions"  # of the summary: how many of what was taught is right
EXPORTED = ".exported"  # beside the feedback: digests of all rows that were exported from it


def exported(rows: Path, feedback: Path) -> dict[str, bool]:
    """The lines of a file of rows, each with whether it was exported from this feedback.

    Where no export was recorded, as by earlier versions, those that say what any correction here says.
    """
    record = feedback.with_suffix(EXPORTED)
    if record.is_file():
        known = set(record.read_text().split())
    else:
        own = [json.dumps(as_row(row), ensure_ascii=False) for row in Feedback(feedback).corrections()]
        known = {sha256_bytes(line.encode()) for line in own}
    lines = rows.read_bytes().split(b"\n") if rows.is_file() else []
    return {line.decode(errors="replace"): sha256_bytes(line) in known for line in lines if line}


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

    def stop(self) -> dict[str, Any]:
        """Ask it to end, as `athanor stop` does, and return its state; that asks until it has ended."""
        command = [sys.executable, "-m", "athanor", "stop"]
        subprocess.Popen(command, cwd=self.root, stdin=subprocess.DEVNULL, start_new_session=True)
        return self.state()

    def state(self) -> dict[str, Any]:
        """`state` is none, running, done, stopped or failed; `text`, lines of its log; `taught`, how many rows of this feedback there are.

        None also once another command has changed dvc.lock: the result is no longer that of the training.
        """
        path, lock = self.folder / LOG, self.root / DVC_LOCK
        state, text = "none", ""
        if locked(self.folder / LOCK):
            state, text = "running", _tail(path, 1, PROGRESS)
        elif path.is_file() and not (lock.is_file() and lock.stat().st_mtime > path.stat().st_mtime):
            state = {DONE: "done", STOPPED: "stopped"}.get(_tail(path, 1), "failed")
            # DVC prints the reason before its closing lines.
            said = {"done": _tail(path, MOST_LINES, SCORE), "stopped": ""}.get(state, _tail(path, MOST_LINES, REASON))
            said = said or (_tail(path, MOST_LINES) if state == "failed" else "")
            text = "\n".join(filter(None, [said, _tail(path, 1, RETURN)]))
        return {"state": state, "text": text, "taught": sum(exported(self.root / ROWS, self.feedback).values())}


def _tail(path: Path, lines: int, of: str = ".") -> str:
    """The last lines of a log's head and tail in which `of` is found, without what steers a terminal."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(max(len(head), path.stat().st_size - TAIL_BYTES))
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", (head + file.read()).decode("utf-8", "replace"))
    said = [line.strip() for line in re.split(r"[\r\n]+", text) if re.search(of, line.strip())]
    return redact("\n".join(said[-lines:]))

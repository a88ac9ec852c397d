"""Training on the accepted corrections, started by the page: a process of its own that outlives the page and the server.

It replaces the checkout's result, so `keep` makes an experiment of that first.

A shell writes the corrections where training reads them and runs `athanor repro`. It holds a lock while it runs, so that
there is one at a time; its log, whose last line says how it ended, lies in the folder of the lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from athanor.base.artifacts import sha256_bytes
from athanor.base.errors import InputError
from athanor.catalog.discover import export_of, recorded
from athanor.origins.replacing import at_work
from athanor.runtime.dvc_lock import LOCK as DVC_LOCK
from athanor.runtime.dvc_view import busy
from athanor.runtime.facts import git
from athanor.runtime.locks import locked
from athanor.runtime.redact import redact

FOLDER, LOCK, LOG, ROWS = Path(".athanor/retraining"), "lock", "log", "corpus/corrections.jsonl"
SCRIPT = f'"$0" -m athanor chat export {ROWS} --write --feedback "$1" && "$0" -m athanor repro; echo "ended with $?"'
DONE, STOPPED = "ended with 0", "ended with 75"
PROGRESS = "^(?![A-Z]+ at step )."  # no finding of the monitor
PRIVATE = ("ATHANOR_API_KEY", "DVC_ROOT")  # the server's own
HEAD_BYTES, TAIL_BYTES, MOST_LINES = 4096, 16_384, 4
REASON = r"^(?!.*Training continues without).*(ERROR:|\bFix:)"  # that one is of a tracking store
SCORE = "your own questions"  # of the summary: how many of what was taught is right
EXPORTED = ".exported"  # beside the feedback: digests of all rows that were exported from it
KEPT, RETURN = "before-corrections", "to return to it: dvc exp apply"
BACK = (  # `git -c` does not reach DVC
    "the result before is the experiment {0} (to compare: athanor compare {0}; "
    f"{RETURN} {{0}}, where git config knows your user.name and user.email)"
)


def keep(root: Path) -> str:
    """Make a DVC experiment of the checkout's result, unless one has the same export, and say which; or why not.

    Not by `dvc exp save`: that records each stage as run with the parameters and inputs of now, so that `dvc repro`
    would pass over those that have changed since, and fails where an output is missing.
    """
    lock = root / DVC_LOCK
    head, export = git(root, "rev-parse", "HEAD"), export_of(lock.read_text("utf-8")) if lock.is_file() else None
    if not head or not export:
        return f"no result is kept: {f'{DVC_LOCK} has no finished one' if head else 'there is no commit yet'}"
    experiments = {name: out for name, _, _, out in recorded(root)}
    if same := next((name for name, out in experiments.items() if out == export), ""):
        return BACK.format(same)
    name = next(name for n in count(1) if (name := KEPT + (f"-{n}" if n > 1 else "")) not in experiments)
    with tempfile.TemporaryDirectory() as folder:

        def run(*words: str) -> str:
            command = ["git", "-c", "user.name=athanor", "-c", "user.email=athanor@localhost", *words]
            environment = {**os.environ, "GIT_INDEX_FILE": f"{folder}/index"}  # what is staged stays as it is
            return subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True).stdout

        try:
            run("read-tree", "HEAD")
            run("add", "--update", ".")
            new = run(
                "ls-files", "-z", "--others", "--exclude-standard", "--", DVC_LOCK, "params.yaml", "metrics", ROWS
            )
            run("add", "--", *new.split("\0")[:-1])
            commit = run("commit-tree", "-p", head, "-m", name, run("write-tree").strip()).strip()
            run("update-ref", f"refs/exps/{head[:2]}/{head[2:]}/{name}", commit, "")
        except subprocess.CalledProcessError as error:
            return f"no result is kept: {' '.join(error.stderr.split())}"
    return BACK.format(name)


def exported(rows: Path, feedback: Path) -> dict[str, bool]:
    """The lines of a file of rows, each with whether it was exported from this feedback."""
    record = feedback.with_suffix(EXPORTED)
    known = record.read_text() if record.is_file() else ""
    lines = rows.read_bytes().split(b"\n") if rows.is_file() else []
    return {line.decode(): sha256_bytes(line) in known for line in lines if line}


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

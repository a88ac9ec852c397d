"""What the process of a stage records for others: that it is at work in this checkout, and how it died.

`.athanor/stages/<stage>` is locked by the process that DVC started for the stage, while that lives. Killed, `dvc` leaves
its stage at work, and the next `dvc repro` starts another one: that waits here, for both would write the same outputs.

The file holds the process's number, and behind it what a death has to say for itself: an unexpected error, or what
Python's fault handler knows of a crash. An end that was told to the user empties it. So a file with a number that
nobody has locked is of a process that died, and without a further word, of one that was killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from athanor.runtime.locks import lock, locked, process_exists
from athanor.runtime.redact import redact
from athanor.runtime.terminal import say

FOLDER = Path(".athanor/stages")
STOPPED = 75
KILLED = "{stage} was killed and could say nothing"
MEMORY_FIX = (
    "close other programs, or in machine.yaml: for training a smaller micro_batch_tokens or checkpointing: on,"
    " for data work fewer workers"
)

_stage_file: TextIO | None = None  # the file of this process, which is one stage


@contextlib.contextmanager
def at_work(stage: str) -> Iterator[bool]:
    """Be the stage's only process in this checkout, after the one before has ended; True when that was waited for.

    Does nothing in a process that DVC did not start: its user knows what they do.
    """
    global _stage_file
    if "DVC_STAGE" not in os.environ:
        yield False
        return
    waited: list[str] = []

    def wait_for(holder: str) -> None:
        waited.append(holder)
        what = "is already working on this stage here; waiting for it (python -m athanor stop ends it)"
        say(f"{stage}: process {holder.split()[0]} {what}")

    try:
        handle = lock(FOLDER / stage, wait_for)
    except KeyboardInterrupt:
        say(f"{stage}: waits no longer; the other one goes on")
        sys.exit(STOPPED)
    with open(handle, "a", encoding="utf-8") as file:
        file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk is reported by the work itself
            file.write(f"{os.getpid()}\n")
            file.flush()
        faulthandler.enable(file)
        _stage_file = file
        try:
            yield bool(waited)
            if _stage_file is not None:
                file.truncate(0)
        except BaseException as error:
            record_death(repr(error))
            raise
        finally:
            faulthandler.disable()
            _stage_file = None


def end_with(parent: int, poll: float) -> None:
    """End this process soon after the one that started it, however that ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def record_death(cause: str) -> None:
    """Record that this process ends although nobody asked for it and no input is at fault."""
    global _stage_file
    if _stage_file is not None:
        with contextlib.suppress(OSError):
            _stage_file.write(redact(cause))
            _stage_file.flush()
        _stage_file = None


def refused(stage: str) -> None:
    """Record that this stage ends before its run began, and has told why: `athanor repro` finds no run that says so."""
    if _stage_file is not None:
        (FOLDER / f"{stage}.refused").touch()


def refusals(root: Path) -> list[str]:
    """Stages that were refused since this was last asked."""
    paths = list((root / FOLDER).glob("*.refused"))
    for path in paths:
        path.unlink(missing_ok=True)
    return [path.stem for path in paths]


def trace(root: Path, stage: str) -> Path:
    """Where the stack of a stage's last crash is kept."""
    return root / FOLDER / f"{stage}.trace"


def deaths(root: Path) -> dict[str, str]:
    """Stages whose last process in this checkout died, with the recorded cause; each is returned once."""
    causes = {}
    for path in sorted((root / FOLDER).glob("*")):
        pid, _, cause = path.read_text(encoding="utf-8", errors="replace").partition("\n")
        if pid.isdigit() and not (process_exists(int(pid)) and locked(path)):
            causes[path.name] = cause.strip()
            if "\n" in causes[path.name]:  # a stack, which nobody reads between other messages
                trace(root, path.name).write_text(redact(cause), encoding="utf-8")
            path.write_text("")
    return causes

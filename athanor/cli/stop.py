"""Ask the stages that run here to save and end (`athanor stop`) or to write a checkpoint and go on (`athanor save`).

    python -m athanor stop [--wait SECONDS]
    python -m athanor save [--wait SECONDS]

Both make a file, `.athanor/STOP` or `.athanor/SAVE`, that a stage looks for
between two steps, and wait until it was obeyed. So they also reach a stage in
a container or on another machine that shares the directory, where no signal
would; there, make the file by hand, because this command cannot see the stage.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from athanor.base.artifacts import write_text
from athanor.base.errors import InputError
from athanor.runtime.dvc_view import busy
from athanor.runtime.guards import SAVE, STOP
from athanor.runtime.journal import Record, alive
from athanor.runtime.locks import locked
from athanor.runtime.machine import anchor
from athanor.runtime.progress import duration
from athanor.serving.retraining import FOLDER, LOCK

POLL = 0.1  # s
IDLE_POLLS = 20  # without a stage and without DVC, which both are away between two stages
WAIT = 120.0  # s; a step and a save, or what is left of a shard


def running(root: Path, over: set[Path] | None = None) -> list[Path]:
    """Journal folders of the stages at work in a checkout; those that are not go into `over`, and are not looked at again."""
    folders = {path.parent for path in (root / ".athanor" / "runs").glob("*/meta.json")} - (over or set())
    found = sorted(folder for folder in folders if alive(folder))
    if over is not None:
        over |= folders - set(found)
    return found


def stop(root: Path, wait: float) -> int:
    """Ask until nothing is at work: a stage takes the file once, and ignores one that is older than itself.

    So a pipeline is reached between two stages and in one that is too short to look for the file, by the next one.
    """
    asked = set(running(root) if _pipeline(root) else _stages(root))
    deadline, file, idle = time.monotonic() + wait, root / ".athanor" / STOP, 0
    over: set[Path] = set()
    known = {folder: label(folder) for folder in asked}
    write_text(file, "")
    while time.monotonic() < deadline:
        pipeline, found = _pipeline(root), running(root, over)
        # Tasks of DVC's queue, which lock elsewhere, are asked only if they ran from the first.
        here = {folder: label(folder) for folder in found if pipeline or folder in asked}
        if (here.keys() - asked) or not file.exists():
            write_text(file, "")
        asked |= here.keys()
        for folder in known.keys() - here.keys():
            print(f"{known[folder]}: {_end_text(folder)}", flush=True)
        known, idle = here, 0 if here or pipeline else idle + 1
        if idle > IDLE_POLLS:
            file.unlink(missing_ok=True)
            return 0
        time.sleep(POLL)
    return _report_timeout(list(known), file, wait)


def _pipeline(root: Path) -> bool:
    """Whether DVC or a training that the page has started is at work here."""
    return bool(busy(root / ".dvc" / "tmp")) or locked(root / FOLDER / LOCK)


def save(root: Path, wait: float) -> int:
    stages, deadline, file = _stages(root), time.monotonic() + wait, root / ".athanor" / SAVE
    write_text(file, "")
    while time.monotonic() < deadline:
        time.sleep(POLL)
        if not file.exists():
            print(f"saved by {_labels(stages)}; it goes on")
            return 0
        if not any(alive(folder) for folder in stages):
            file.unlink(missing_ok=True)
            raise InputError(f"{_labels(stages)} ended before it came to save", fix="see what runs: athanor slots")
    return _report_timeout(stages, file, wait)


def _stages(root: Path) -> list[Path]:
    folders = running(root)
    if not folders:
        raise InputError("no stage runs here", where=str(root), fix="see its checkpoints: python -m athanor slots")
    return folders


def _report_timeout(waiting: list[Path], file: Path, wait: float) -> int:
    who = _labels(waiting) or "the pipeline"
    text = f"{who} has not answered in {duration(wait)}: only training saves on request, and a step, a shard"
    text += f" or a validation may take longer. The request stays; take it back with rm {file}"
    print(text, file=sys.stderr)
    return 1


def label(folder: Path) -> str:
    meta = Record(folder / "meta.json")
    return f"{meta['stage']} (process {meta['pid']})"


def _labels(folders: list[Path]) -> str:
    return ", ".join(label(folder) for folder in folders)


def _end_text(folder: Path) -> str:
    if not (folder / "end.json").is_file():
        return "killed; the same command goes on from the last checkpoint"
    end = Record(folder / "end.json")
    if end["status"] == "FINISHED":
        return "was through before it came to stop"
    return str(end.get("error", end["status"]))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", type=float, default=WAIT, help=f"seconds to wait for an answer ({WAIT:.0f})")


def run(args: argparse.Namespace) -> int:
    return (save if args.name == "save" else stop)(anchor(), args.wait)

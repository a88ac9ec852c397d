"""Which operations take the time and memory of a training that runs: a profile of its next steps.

    python -m athanor profile [--steps 3]

The training is neither stopped nor changed: it ends with the same bytes. It
looks for the request, the file `.athanor/PROFILE` with the number of steps,
between two steps. Of several processes the main one is profiled.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from pathlib import Path

from athanor.base.artifacts import read_json, write_text
from athanor.base.errors import InputError
from athanor.cli.cli import positive
from athanor.cli.stop import POLL, label, running
from athanor.monitor.monitor import PHASES
from athanor.runtime.journal import Record, alive
from athanor.runtime.machine import anchor
from athanor.runtime.profiling import COLUMNS, MAX_STEPS, MEMORY, OPERATIONS, PROFILE, TENSORS, TRACE
from athanor.runtime.progress import duration
from athanor.runtime.watchdog import HEARTBEAT

WAIT = 600.0  # s; the training may be in the middle of a validation
SHOWN = 15  # operations


def trainings(root: Path) -> list[Path]:
    """Journal folders of the stages at work that train; InputError when there is none."""
    folders = running(root)
    found = [folder for folder in folders if Record(folder / "meta.json")["stage"] in PHASES]
    if found:
        return found
    at_work = f"; {', '.join(map(label, folders))} is at work and trains nothing" if folders else ""
    fix = "start one with `athanor repro`, and type this in another terminal when its steps have begun"
    raise InputError(f"no training runs here{at_work}", where=str(root), fix=fix)


def profile(root: Path, steps: int, wait: float) -> Path:
    """Ask for a profile and wait for it; returns its folder."""
    folders, file, deadline = trainings(root), root / ".athanor" / PROFILE, time.monotonic() + wait
    before, pids = _profiles(folders), [Record(folder / "meta.json")["pid"] for folder in folders]
    write_text(file, f"{steps}\n")
    shown = ""
    try:
        while time.monotonic() < deadline:
            time.sleep(POLL)
            found = _profiles(folders) - before
            working = any(file.with_name(f"{PROFILE}.{pid}").exists() for pid in pids)
            if found and not working:
                return found.pop()
            if not working and not file.exists():
                raise InputError(
                    f"{label(folders[0])} ended, or could not make one", where=str(folders[0]), fix="see its last lines"
                )
            if not any(alive(folder) for folder in folders):
                raise InputError(
                    f"{label(folders[0])} ended before it was done", where=str(root), fix="ask the next one"
                )
            shown = _show(f"{label(folders[0])}: {_state(folders[0], working, steps)}", shown)
    finally:
        file.unlink(missing_ok=True)  # nobody waits for it any longer
        _show("", shown)
    raise InputError(
        f"no step has ended in {duration(wait)}", where=label(folders[0]), fix=f"--wait {2 * wait:.0f} waits longer"
    )


def _profiles(folders: list[Path]) -> set[Path]:
    return {path for folder in folders for path in folder.glob("files/profile-step-*")}


def _state(folder: Path, working: bool, steps: int) -> str:
    at = f"after step {read_json(folder / HEARTBEAT)['step']:,}" if (folder / HEARTBEAT).is_file() else "at work"
    return f"{at}, profiling {steps} steps" if working else f"{at}, waiting for the end of a step"


def _show(text: str, shown: str) -> str:
    """A line that the next one replaces, on a terminal; returns it."""
    if sys.stderr.isatty() and text != shown:
        print(f"\r{text:<{len(shown)}}", end="" if text else "\r", file=sys.stderr, flush=True)
    return text


def table(path: Path) -> str:
    """The first operations of a profile, as lines for people."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    device = any(float(row["device_ms"]) for row in rows)
    names = [name for name in COLUMNS if device or name not in ("device_ms", "memory_mb")]
    lines = ["".join(f"{name:>11}" for name in names[:-1]) + f"  {names[-1]}"]
    for row in rows[:SHOWN]:
        numbers = [f"{float(row['share']):.1%}", f"{int(row['calls']):,}"]
        numbers += [f"{float(row[name]):,.1f}" for name in names[2:-1]]
        lines.append("".join(f"{number:>11}" for number in numbers) + f"  {row['operation'][:50]}")
    rest = sum(float(row["share"]) for row in rows[SHOWN:])
    return "\n".join([*lines, *([f"{rest:>11.1%}{'':11}  {len(rows) - SHOWN} more in {OPERATIONS}"] if rest else [])])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive(int), default=3, help=f"to profile, at most {MAX_STEPS} (3)")
    parser.add_argument("--wait", type=positive(float), default=WAIT, help=f"seconds for an answer ({WAIT:.0f})")


def run(args: argparse.Namespace) -> int:
    folder = profile(anchor(), min(args.steps, MAX_STEPS), args.wait)
    print(table(folder / OPERATIONS))
    shown = os.path.relpath(folder)
    print(f"\nTrace: {shown}/{TRACE}\n  open https://ui.perfetto.dev and drag the file there; it stays on your machine")
    if (folder / MEMORY).is_file():
        print(f"Memory: {shown}/{MEMORY}\n  open https://docs.pytorch.org/memory_viz and drag the file there")
    print(
        f"Tensors by size: {shown}/{TENSORS}\nAll of it becomes artifacts of the MLflow run when the stage ends; the training goes on."
    )
    return 0

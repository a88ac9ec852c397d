"""What the health monitor finds in a training run, finished or running.

    python -m athanor health                 the latest training of this checkout
    python -m athanor health pretrain        the latest run of a stage (pretrain, sft or lora)
    python -m athanor health RUN [--json]    a run by the start of its id, or by its journal's folder

The rules and what they mean: docs/health.md. A health.yaml beside params.yaml
moves their thresholds; the journal is then judged by those. Exit status: 0
when nothing is critical, 1 when something is, 2 when there is nothing to judge.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from athanor.base.errors import AthanorError, InputError
from athanor.cli.render import fill_template
from athanor.monitor.finding import events, status
from athanor.monitor.monitor import PHASES, Reader
from athanor.monitor.thresholds import Thresholds, load
from athanor.runtime.journal import Record, alive, rows
from athanor.runtime.machine import anchor
from athanor.runtime.ship import by_start, run_folders


def choose(root: Path, name: str) -> Path:
    """The journal folder that `name` means; the latest training when it is empty."""
    if name and (Path(name) / "journal.jsonl").is_file():
        return Path(name)
    folders = by_start(run_folders(root))
    if name in ("", *PHASES):
        matches = [folder for folder in folders if _stage(folder) in ((name,) if name else PHASES)][-1:]
    else:
        matches = [folder for folder in folders if folder.name.startswith(name)]
        matches = [folder for folder in matches if folder.name == name] or matches
    if len(matches) == 1:
        return matches[0]
    if not matches:
        fix = "run dvc repro, or name the folder of a journal" if name in ("", *PHASES) else _known_runs(folders)
        what = f"there is no run '{name}'" if name else "no training ran here"
        raise InputError(what, where="athanor health", fix=fix)
    raise InputError(f"{len(matches)} runs begin with '{name}'", where="athanor health", fix=_known_runs(matches))


def _stage(folder: Path) -> str:
    return str(Record(folder / "meta.json").get("stage", ""))


def _known_runs(folders: list[Path]) -> str:
    names = [folder.name for folder in folders if _stage(folder) in PHASES]
    return f"one of {', '.join(names[-5:])}" if names else "no training ran here; run dvc repro"


def read(folder: Path, thresholds: Thresholds) -> Reader:
    """Take a whole journal through the monitor."""
    meta = folder / "meta.json"
    stage = _stage(folder) if meta.is_file() else ""
    reader = Reader(stage if stage in PHASES else "pretrain", thresholds)
    with open(folder / "journal.jsonl", "rb") as file:
        for line in file:
            for row in rows(line if line.endswith(b"\n") else b""):  # a running stage may be in the middle of a line
                reader.line(row)
    if not reader.last_step or (stage and stage not in PHASES and reader.plan is None):
        raise InputError("holds no training steps", where=str(folder), fix=f"name a run of {' or '.join(PHASES)}")
    return reader


def state(folder: Path) -> str:
    """RUNNING, how the run ended, or DIED when it could not say."""
    end = folder / "end.json"
    if end.is_file():
        return str(Record(end)["status"])
    return "RUNNING" if (folder / "meta.json").is_file() and alive(folder) else "DIED"


def text(folder: Path, reader: Reader) -> str:
    header = {"name": folder.resolve().name, "state": state(folder), "status": status(reader.findings)}
    return fill_template("health.txt.j2", reader=reader, events=events(reader.findings), **header).rstrip("\n")


def as_json(folder: Path, reader: Reader) -> dict[str, Any]:
    return {
        "run": folder.resolve().name,
        "state": state(folder),
        "steps": reader.last_step,
        "status": status(reader.findings),
        "findings": [finding.to_dict() for finding in reader.findings],
    }


def options(parser: argparse.ArgumentParser) -> None:
    help = "a stage, the start of a run's id, or a folder (default: the latest training)"
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help=help)
    parser.add_argument("--json", action="store_true", help="every finding, for programs")


def run(args: argparse.Namespace) -> int:
    try:
        folder = choose(anchor(), args.run)
        reader = read(folder, load(Path.cwd(), anchor()))
    except AthanorError as error:  # status 1 says that a run is in trouble, and this is something else
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(as_json(folder, reader), indent=2) if args.json else text(folder, reader))
    return 1 if status(reader.findings) == "critical" else 0

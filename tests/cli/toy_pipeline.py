"""A small pipeline of three stages in a real Git and DVC repository, and what `dvc repro` really does with it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

# Writes a directory of two files and a metric. `fold` makes other parameters give the same bytes.
STAGE = """
import json, pathlib, sys
name, *inputs = sys.argv[1:]
values = json.loads(pathlib.Path("params.yaml").read_text())[name]
text = str(values["value"] % values["fold"]) + "".join(pathlib.Path(path).read_text() for path in inputs)
folder = pathlib.Path(name)
folder.mkdir()
(folder / "main.txt").write_text(name + text)
(folder / "part.txt").write_text(name + text[:1])
pathlib.Path(name + ".json").write_text(json.dumps({"length": len(text)}))
"""
PARAMS = {name: {"value": 1, "fold": 10, "more": []} for name in "abc"}
COMMANDS = {
    "a": (["source.txt"], "source.txt"),
    "b": (["a"], "a/main.txt"),
    "c": (["b/part.txt", "a/main.txt", "a.json"], "b/part.txt a/main.txt a.json"),
}


def graph(**more: dict[str, Any]) -> str:
    """dvc.yaml; keyword arguments are merged into the stages of their names."""
    stages = {}
    for name, (deps, words) in COMMANDS.items():
        stages[name] = {
            "cmd": f"python {name}.py {name} {words}",
            "deps": [f"{name}.py", *deps],
            "params": [name],
            "outs": [name],
            "metrics": [{f"{name}.json": {"cache": False}}],
            **more.get(name, {}),
        }
    return json.dumps({"stages": stages})


def make(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "source.txt").write_text("s")
    (path / "params.yaml").write_text(json.dumps(PARAMS))
    for name in COMMANDS:
        (path / f"{name}.py").write_text(STAGE)
    (path / "dvc.yaml").write_text(graph())
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=path, check=True)
    return path


def set_param(path: Path, name: str, value: Any) -> None:
    values = json.loads((path / "params.yaml").read_text())
    stage, key = name.split(".")
    values[stage][key] = value
    (path / "params.yaml").write_text(json.dumps(values))


class _Said(logging.Handler):
    """What DVC says of each stage."""

    WORDS = {"Running stage '(.+)':": "run", "Stage '(.+)' is cached": "restore", "Stage '(.+)' didn't": "keep"}

    def __init__(self) -> None:
        super().__init__()
        self.stages: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        for pattern, word in self.WORDS.items():
            match = re.match(pattern, record.getMessage())
            if match:
                self.stages[match[1]] = word


def repro(path: Path, *targets: str) -> dict[str, str]:
    """Run the pipeline in the current directory; stage to run, restore or keep."""
    from dvc.repo import Repo

    said, logger = _Said(), logging.getLogger("dvc")
    level = logger.level
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    try:
        Repo(str(path)).reproduce(list(targets) or None)
    finally:
        logger.removeHandler(said)
        logger.setLevel(level)
    return said.stages


def snapshot(path: Path) -> dict[str, tuple[int, int, str]]:
    """Every file but those under .dvc/tmp: mode, time of change, content."""
    return {
        str(file.relative_to(path)): (
            file.stat().st_mode,
            file.stat().st_mtime_ns,
            hashlib.sha256(file.read_bytes()).hexdigest(),
        )
        for file in sorted(path.rglob("*"))
        if file.is_file() and not file.is_relative_to(path / ".dvc" / "tmp")
    }

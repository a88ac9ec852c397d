"""Shards to work on, and a way to hold, fail and kill that work, for the tests of executors."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.runtime.toy_work import Task, make_tasks
from tests.runtime.view import ROOT


@dataclass
class ShardToy:
    """Raw shards, a folder to steer the work with, and the bytes that one process makes of them."""

    raw: Path
    control: Path
    tmp: Path
    serial: dict[str, str]

    def tasks(self) -> dict[str, Task]:
        return make_tasks(self.raw, self.control)

    def order(self, word: str, *shards: int) -> None:
        for shard in shards:
            (self.control / f"{word}-{shard:05d}").touch()

    def withdraw(self, word: str) -> None:
        for path in self.control.glob(f"{word}-*"):
            path.unlink()

    def start(self, out: Path, *words: str, **env: str) -> subprocess.Popen[str]:
        """A coordinator in a process group of its own."""
        command = [sys.executable, "-m", "tests.runtime.toy_work", self.raw, out, self.control, *words]
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | env, text=True, stderr=subprocess.PIPE, start_new_session=True
        )


def until(condition: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.02)
    return value


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def done(out: Path) -> int:
    """Shards that are there; not what a killed worker was about to give its name."""
    return len(list(out.glob("toy/[!.]*/facts.json")))

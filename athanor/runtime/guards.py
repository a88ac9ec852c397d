"""What stops or saves a long stage from outside: a time budget, two files, a disk that fills up.

    .athanor/STOP   save, and end with status 75       (python -m athanor stop)
    .athanor/SAVE   write a checkpoint, and go on      (python -m athanor save)

A stage asks between any two steps, so asking must cost next to nothing: a look
at the clock each time, at a file every half second, at the disk every ten.
Where several processes train together, the main one asks for all.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from athanor.base.errors import ParamsError
from athanor.runtime.machine import Machine
from athanor.runtime.progress import duration

STOP, SAVE = "STOP", "SAVE"
UNTIL = "ATHANOR_UNTIL"  # seconds since the epoch: when `athanor repro --max-minutes` wants to be through
SLURM_END = "SLURM_JOB_END_TIME"  # seconds since the epoch; Slurm sets it inside of a job
LOOK_SECONDS = 0.5  # between two looks at a file
DISK_SECONDS = 10.0  # between two looks at the disk
DISK_LOG_SECONDS = 30.0
SLURM_MARGIN = 60.0  # s before the end of the job; more where a step or a save takes longer
SMALL_DISK = 50  # at most this part of a file system must stay free, so that a small one is of use, too
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Stop:
    """Why a stage has to stop, and whether there is room to save first."""

    why: str
    save: bool = True


class Request:
    """A file by which the user asks a running stage for something. One that is older than the stage is ignored."""

    def __init__(self, path: Path) -> None:
        self.path, self.old = path, _identity(path)
        self._next = 0.0

    def is_pending(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + LOOK_SECONDS
        return _identity(self.path) not in (None, self.old)

    def claim(self) -> bool:
        """Remove the file; False when another stage was faster."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True


def _identity(path: Path) -> tuple[int, int] | None:
    # Not the age: the clocks of two machines that share a directory differ, and the file system's own is coarse.
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


class Guards:
    """Checks that a stage makes between two steps. `slots`: folders of checkpoints; more are added while it runs."""

    def __init__(
        self, home: Path, root: Path, local: Machine, environ: Mapping[str, str] = os.environ, *, main: bool = True
    ) -> None:
        self.folders = [home, root]
        self.slots: list[Path] = []
        self.stop_file, self.save_file = Request(home / STOP), Request(home / SAVE)
        self.main = main
        self._min_free = int(local.min_free_gib * GIB)
        self._budgets = list(_budgets(local.max_minutes, environ))
        self._slurm_end = _monotonic_time(environ, SLURM_END)
        self._slurm_margin_max = (self._slurm_end - time.monotonic()) / 2 if self._slurm_end is not None else 0.0
        self._last_asked: float | None = None
        self._longest = 0.0
        self._saving = False
        self._next_disk = 0.0
        self._free: int | None = None
        self._next_log = 0.0

    def stale(self) -> list[str]:
        """Messages about request files that are older than the stage."""
        paths = [request.path for request in (self.stop_file, self.save_file) if request.old is not None]
        advice = "is older than this stage and is ignored; touch it to ask this one, or remove it"
        return [f"{path} {advice}" for path in paths]

    def stop(self) -> Stop | None:
        """Whether the stage has to stop now. A request is returned once; the caller remembers it."""
        if not self.main:
            return None
        now = time.monotonic()
        if self._last_asked is not None:
            self._longest = max(self._longest, now - self._last_asked)
        self._last_asked = now
        for end, reason in self._budgets:
            if now >= end:
                return Stop(reason)
        if self._slurm_end is not None and now >= self._slurm_end - self._slurm_margin():
            return Stop(f"the Slurm job ends in {duration(max(0.0, self._slurm_end - now))}")
        if self.stop_file.is_pending(now) and self.stop_file.claim():
            return Stop(f"{self.stop_file.path} asked for it")
        if now >= self._next_disk:
            self._next_disk = now + DISK_SECONDS
            return self._check_disk()
        return None

    def save(self) -> bool:
        """Whether a checkpoint is requested now. The next call removes the file, as the checkpoint is then written."""
        if not self.main:
            return False
        self._clear_save_request()
        self._saving = self.save_file.is_pending(time.monotonic())
        return self._saving

    def close(self) -> None:
        """Remove the request for a checkpoint: a run that has ended, well or not, has saved."""
        self._clear_save_request()

    def _clear_save_request(self) -> None:
        if self._saving:
            self.save_file.claim()
            self._saving = False

    def scalars(self) -> dict[str, float]:
        """Numbers for the journal, now and then: the bytes that are free for checkpoints, and the machine's load."""
        now = time.monotonic()
        if self._free is None or now < self._next_log:
            return {}
        self._next_log = now + DISK_LOG_SECONDS
        import psutil

        return {
            "disk.free_bytes": self._free,
            "system/cpu_utilization_percentage": psutil.cpu_percent(),  # since the last call
            "system/system_memory_usage_megabytes": psutil.virtual_memory().used / 1e6,
        }

    def _slurm_margin(self) -> float:
        # One more step and a save must fit; the longest time between two questions had both in it.
        return min(max(SLURM_MARGIN, 2 * self._longest), self._slurm_margin_max)

    def _check_disk(self) -> Stop | None:
        """Stop unless two checkpoints and a reserve fit: the next one is written before an old one is removed."""
        home = self.folders[0]
        try:
            existing = [path for path in reversed(self.folders) if path.is_dir()]
            disks = {os.stat(path).st_dev: (path, shutil.disk_usage(path)) for path in existing}
        except OSError:  # a file system that does not answer is not full
            return None
        self._free = disks[os.stat(home).st_dev][1].free if home.is_dir() else None
        if not self._min_free:
            return None
        checkpoint = max((newest_bytes(slot) for slot in self.slots), default=0)
        for path, usage in disks.values():
            needed = 2 * checkpoint + min(self._min_free, usage.total // SMALL_DISK)
            if usage.free < needed:
                reason = f"only {usage.free / MIB:,.1f} MiB are free in {path}, less than the {needed / MIB:,.1f} MiB"
                reason += " of two checkpoints and a reserve (min_free_gib); python -m athanor slots prune frees some"
                return Stop(reason, save=usage.free > checkpoint + checkpoint // 20 + MIB)
        return None


def newest_bytes(slot: Path) -> int:
    """The size of a slot's newest checkpoint, 0 without one."""
    try:
        newest = max((path for path in slot.glob("step_*") if path.is_dir()), key=lambda path: path.name, default=None)
        return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) if newest else 0
    except OSError:  # it was just dropped for a newer one
        return 0


def _budgets(max_minutes: float, environ: Mapping[str, str]) -> list[tuple[float, str]]:
    """When each time budget ends (on the monotonic clock), and the message for then."""
    budgets = []
    if max_minutes:
        end = time.monotonic() + 60 * max_minutes
        budgets.append((end, f"the {duration(60 * max_minutes)} of max_minutes are used up"))
    until = _monotonic_time(environ, UNTIL)
    if until is not None:
        budgets.append((until, "the time of athanor repro --max-minutes is used up"))
    return budgets


def _monotonic_time(environ: Mapping[str, str], name: str) -> float | None:
    """A variable's seconds since the epoch as a time of the monotonic clock, which nobody can set back."""
    text = environ.get(name)
    if not text:
        return None
    try:
        return time.monotonic() + float(text) - time.time()
    except ValueError:
        where = f"environment {name}"
        raise ParamsError(f"expected seconds since the epoch, found {text!r}", where=where, fix="unset it") from None

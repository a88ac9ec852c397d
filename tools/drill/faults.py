"""Which deaths a stage dies, and what makes a drilled process die there.

The library has no hooks for this. In the forked child, and only there, the
calls that bring bytes to the disk (`open`, `os.fdopen`, `os.fsync`,
`os.replace`, `shutil.rmtree`, Parquet's `write_table`) are wrapped; each call
on a file of the run is a point of some kind, and at the wanted point the
process kills itself with a real SIGKILL.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import sha256_bytes

HURRY = 4.0
SLOTS, RUNS, OUTPUTS = ".athanor/slots/", ".athanor/runs/", ("data/", "models/", "metrics/", "plots/")


TRAINING = ("pretrain", "sft")
STAGES = (*TRAINING, "download")

# Kinds of death in the order of the table, in words. Names up to "after-done" are points of `Watch`.
KINDS = {
    "random": "killed at a random moment",
    "opening": "killed while the slot or the run is opened",
    "journal": "killed in the middle of a journal line",
    "write": "killed in the middle of a checkpoint write",
    "fsync": "killed after a write, before fsync",
    "rename": "killed after fsync, before the rename",
    "renamed": "killed right after the rename",
    "remove": "killed before old checkpoints are removed",
    "removing": "killed with an old checkpoint half removed",
    "before-done": "killed between the last checkpoint and DONE",
    "after-done": "killed between DONE and the end of the stage",
    "truncated": "newest checkpoint's tensors, or part, cut off",
    "flipped tensors": "a byte of the newest checkpoint's tensors, or part, flipped",
    "flipped state": "a byte of the newest checkpoint's state flipped",
    "deleted": "a file of the newest checkpoint deleted",
    "disk": "disk full while a checkpoint is written (no kill)",
}
DAMAGE = ("truncated", "flipped tensors", "flipped state", "deleted")
NOT_FOR_DOWNLOAD = ("journal", "remove", "removing", "flipped state")
RANDOM_SHARE = 4  # of a cycle through all kinds
DISKS = 2


@dataclass(frozen=True)
class Fault:
    """One death. `part`: how far into the points of its kind, the run, or the damaged file, 0 to 1."""

    kind: str
    part: float
    tries: int = 0  # rounds in which its point was not reached


def plan(stage: str, kills: int, draw: random.Random) -> list[Fault]:
    """`kills` deaths in a random order, every kind about equally often, random moments more often."""
    kinds = [kind for kind in KINDS if kind != "disk" and not (stage == "download" and kind in NOT_FOR_DOWNLOAD)]
    cycle = ["random"] * (RANDOM_SHARE - 1) + kinds
    draw.shuffle(cycle)
    chosen = [cycle[number % len(cycle)] for number in range(kills)]
    draw.shuffle(chosen)
    return [Fault(kind, draw.random()) for kind in chosen]


def point(fault: Fault, points: Counter[str], whole: int) -> tuple[str, int]:
    """Where an attempt has to die for a fault: the kind of point and its count.

    `points` counts those an attempt meets, `whole` is the number of whole
    checkpoints on the disk. Damage comes after the second, so that one is
    left. A point that was missed before is tried again nearer.
    """
    if fault.kind in DAMAGE:
        return "renamed", 1 if whole else 2
    # Of points all over a run only the first half: an attempt may begin late.
    share = 1.0 if fault.kind in ("opening", "before-done", "after-done", "write", "fsync") else 0.5
    return fault.kind, 1 + int(fault.part * share * points[fault.kind] / 4**fault.tries)


def possible(fault: Fault, points: Counter[str]) -> bool:
    """Whether a run without kills meets what the fault needs."""
    if fault.kind in DAMAGE:
        return points["renamed"] > 1
    return fault.kind == "random" or points[fault.kind] > 0


def damage(folder: Path, stage: str, fault: Fault, whole: list[Path]) -> Path:
    """Do to the newest whole checkpoint, or part of a download, what a fault says; returns what was damaged."""
    if stage == "download":
        path = sorted(folder.glob(".athanor/slots/download/*/tasks/[!.]*/*.parquet"))[-1]
        hurt = path.parent
        path = hurt / "facts.json" if fault.kind == "deleted" and fault.part >= 0.5 else path
    else:
        in_state = fault.kind == "flipped state" or (fault.kind == "deleted" and fault.part < 0.5)
        hurt, path = whole[0], whole[0] / ("state.json" if in_state else "tensors.safetensors")
    content = bytearray(path.read_bytes())
    at = int(fault.part * len(content))
    if fault.kind == "deleted":
        path.unlink()
        return hurt
    if fault.kind == "truncated":
        del content[at:]
    else:
        before, bit = bytes(content), 1 << int(fault.part * 1000) % 8
        content[at] ^= bit
        while path.name == "state.json" and _parsed(content) == _parsed(before):
            # The last digit of a double may be another one of the same number: no damage, and rightly not seen as one.
            content[at] ^= bit
            at = (at + 1) % len(content)
            content[at] ^= bit
    path.write_bytes(content)
    return hurt


def _parsed(content: bytes | bytearray) -> Any:
    try:
        return json.loads(bytes(content))
    except ValueError:  # no UTF-8, or no JSON
        return None


# -- inside the process ------------------------------------------------------------------------------------------------


class Watch:
    """Writes a line per point and sample to `record`, and kills the process at the `count`-th point of `kind`."""

    def __init__(self, root: Path, record: Path, kind: str = "", count: int = 1) -> None:
        self.root, self.kind, self.left = str(root.resolve()) + "/", kind, count
        self.marked = False  # DONE stands on the disk
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, **values: Any) -> None:
        os.write(self._record, (json.dumps(values) + "\n").encode())

    def reached(self, kind: str, path: str) -> bool:
        """Note a point; True when it is the wanted one."""
        self.note(point=kind, path=path)
        if kind == self.kind:
            self.left -= 1
        return kind == self.kind and self.left == 0

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def relative(self, path: Any) -> str:
        """A path below the run's root, "" for any other."""
        text = os.path.abspath(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else ""
        return text[len(self.root) :] if text.startswith(self.root) else ""

    def kind_of(self, call: str, path: str) -> str:
        """Which kind of point a call on a file is: write, fsync, rename, renamed, remove; "" for none."""
        if path.startswith(SLOTS):
            parts = path.split("/")[4:]  # below the slot
            parts = parts[1:] if parts[0:1] == ["tasks"] else parts
            top = parts[0] if parts else ""
            if top.lstrip(".").startswith("DONE"):
                return "after-done" if call == "renamed" else "before-done"
            if top.lstrip(".").startswith(("step_", "0")):  # checkpoints, and tasks by number
                inner = len(parts) > 1
                if call in ("rename", "renamed") and inner:
                    return "write"  # a file of a checkpoint that is not published yet
                return "" if call == "remove" and top.startswith(".") else call
            return "opening" if parts else ""
        if path.startswith(RUNS):
            if path.endswith("journal.jsonl"):
                return "journal" if call == "write" else ""
            return "after-done" if self.marked else "opening"
        if path.startswith(OUTPUTS):
            return "after-done" if self.marked else "before-done"
        return ""

    # -- the wrapped calls ---------------------------------------------------

    def install(self) -> None:
        builtins.open = self._opening(builtins.open, lambda target: target)
        os.fdopen = self._opening(os.fdopen, lambda handle: os.readlink(f"/proc/self/fd/{handle}"))
        os.fsync, os.replace = self._fsync(os.fsync), self._replace(os.replace)
        shutil.rmtree = self._rmtree(shutil.rmtree)

    def _opening(self, real: Callable[..., Any], path_of: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(target: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            path = self.relative(path_of(target)) if set(mode) & set("wax") else ""
            file = real(target, mode, *args, **options)
            return _Torn(file, self, path) if path else file

        return call

    def _fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def fsync(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            self.pass_by("fsync", self.relative(os.readlink(f"/proc/self/fd/{number}")))
            real(handle)

        return fsync

    def _replace(self, real: Callable[..., None]) -> Callable[..., None]:
        def replace(source: Any, target: Any, **options: Any) -> None:
            path = self.relative(target)
            self.pass_by("rename", path)
            real(source, target, **options)
            if path.startswith(SLOTS) and path.endswith("/DONE"):
                self.marked = True
            self.pass_by("renamed", path)

        return replace

    def _rmtree(self, real: Callable[..., None]) -> Callable[..., None]:
        def rmtree(target: Any, *args: Any, **options: Any) -> None:
            path = self.relative(target)
            self.pass_by("remove", path)
            if self.kind_of("remove", path) == "remove" and self.reached("removing", path):
                next(file for file in sorted(Path(target).iterdir()) if file.is_file()).unlink()
                self.die()
            real(target, *args, **options)

        return rmtree

    def pass_by(self, call: str, path: str) -> None:
        kind = self.kind_of(call, path) if path else ""
        if kind and self.reached(kind, path):
            self.die()


class _Torn:
    """A file whose writes are points; the fatal one leaves half its bytes."""

    def __init__(self, file: Any, watch: Watch, path: str) -> None:
        self._file, self._watch, self._path = file, watch, path

    def write(self, data: Any) -> Any:
        kind = self._watch.kind_of("write", self._path)
        if kind and self._watch.reached(kind, self._path):
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._watch.die()
        return self._file.write(data)

    def __enter__(self) -> _Torn:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Clock:
    """The time module with a clock that runs faster: a checkpoint every quarter of a second, not every second."""

    def monotonic(self) -> float:
        return HURRY * time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def record_batches(watch: Watch) -> None:
    """Note the position and a digest of the ids of every batch that is trained on; let checkpoints come more often."""
    from athanor.training import loop
    from athanor.training.recovery import Recovery

    loop.time, real = _Clock(), Recovery.batch

    def batch(self: Any, position: int) -> Any:
        rows: Any = real(self, position)
        content = b"".join(array.tobytes() for array in rows if hasattr(array, "tobytes"))
        watch.note(at=position, digest=sha256_bytes(content)[:16])
        return rows

    Recovery.batch = batch  # type: ignore[method-assign]


def record_rows(watch: Watch) -> None:
    """Note a digest of every row that is read, in tasks of a row group or two, and take Parquet's writes for points."""
    import pyarrow.parquet as pq

    from athanor.sources import hub_tasks, huggingface

    hub_tasks.SHARD_BYTES = 100_000
    real_rows, real_open, real_write = huggingface.rows_of, pq.ParquetWriter.__init__, pq.ParquetWriter.write_table
    real_probe, probing = huggingface.probe, []

    def probe(*args: Any) -> huggingface.Probe:
        probing.append(True)
        try:
            return real_probe(*args)
        finally:
            probing.clear()

    def rows_of(*args: Any) -> Iterator[dict[str, Any]]:
        for row in real_rows(*args):
            if not probing:  # there the first rows are only looked at
                watch.note(row=sha256_bytes(json.dumps(row, sort_keys=True).encode())[:16])
            yield row

    def open_writer(self: Any, where: Any, *args: Any, **options: Any) -> None:
        self.drilled_path = watch.relative(where)
        real_open(self, where, *args, **options)

    def write_table(self: Any, *args: Any, **options: Any) -> None:
        real_write(self, *args, **options)
        watch.pass_by("write", self.drilled_path)  # rows without the footer

    huggingface.rows_of, huggingface.probe = rows_of, probe
    pq.ParquetWriter.__init__, pq.ParquetWriter.write_table = open_writer, write_table

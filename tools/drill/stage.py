"""The drill of one stage: a quiet run, then rounds of deaths, each compared with it when it ends."""

from __future__ import annotations

import dataclasses
import importlib
import os
import random
import resource
import shutil
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json, sha256_file
from athanor.base.errors import AthanorError
from athanor.runtime.closure import stage_module
from athanor.runtime.process import execute
from athanor.runtime.progress import Progress
from tools.drill import compare
from tools.drill.faults import (
    DAMAGE,
    DISKS,
    TRAINING,
    Fault,
    Watch,
    damage,
    point,
    possible,
    record_batches,
    record_rows,
)
from tools.forked import forked, last_line, learn, status_of
from tools.scratch import Scratch, drill_params

MIN_REMOVED = 2  # old checkpoints in a run without kills; so that every kind of death has its occasion
MAX_LONGER = 64
MAX_TOLD = 10  # differences of one comparison
TRIES = 4  # to reach a point, until the kill comes at a random moment instead
LEAST_PART = 16 << 10  # of a download, on the disk

Damaged = set[tuple[Path, int, int]]  # as `identity` says


@dataclass
class Outcome:
    """Counts by kind of death. `resumed` and `anew`: how the attempt after it began."""

    stage: str
    kills: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    anew: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    rounds: int = 0


@dataclass(frozen=True)
class Attempt:
    status: int
    seconds: float
    hung: bool
    noted: list[dict[str, Any]]
    log: str


class Different(Exception):
    """Something is not as in the quiet run; ends the drill of this stage. All that is known of it, in `problems`."""

    def __init__(self, where: str, *problems: str) -> None:
        self.problems = [f"{where}: {problem}" for problem in problems[:MAX_TOLD]]


class Drill:
    """One stage, imported here and run in forked children."""

    def __init__(self, scratch: Scratch, stage: str, draw: random.Random, *, keep: bool) -> None:
        self.scratch, self.stage, self.draw, self.keep = scratch, stage, draw, keep
        self.base = scratch.base / stage
        self.outcome = Outcome(stage)
        self.longer = 1
        self.attempts, self.seconds = 0, 0.0
        self.damaged_at = 0  # the position of the checkpoint that was damaged last
        self.body = importlib.import_module(stage_module(scratch.graph.stages[stage]["cmd"])).run

    # -- attempts --------------------------------------------------------------

    def attempt(
        self, folder: Path, kind: str = "", count: int = 1, delay: float | None = None, file_bytes: int | None = None
    ) -> Attempt:
        """One process of the stage in `folder`, ended by a kill, an error or its end."""
        self.attempts += 1
        record = folder / "attempts" / f"{self.attempts:03d}.jsonl"
        log = record.with_suffix(".log")
        record.parent.mkdir(exist_ok=True)

        def work() -> int:
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
            watch = Watch(folder, record, kind, count)
            (record_rows if self.stage == "download" else record_batches)(watch)
            watch.install()
            return status_of(lambda: execute(self.stage, self.body))

        status, seconds, late = forked(work, folder, log, max(120.0, 30 * self.seconds) if delay is None else delay)
        text = log.read_text(errors="replace") if log.is_file() else ""
        return Attempt(status, seconds, late and delay is None, compare.events(record), text)

    def whole(self, folder: Path, damaged: Damaged) -> list[Path]:
        """Checkpoints that are neither damaged nor half removed, newest first."""
        found = compare.checkpoints(folder, self.stage, anchors=True)
        return [path for path in found if identity(path) not in damaged and len(list(path.iterdir())) == 2]

    def position(self, folder: Path, damaged: Damaged) -> int:
        """Where the next attempt has to go on: the tokens, or rows, that the newest whole checkpoint stands for."""
        if self.stage not in TRAINING:
            return _rows_of_whole_tasks(folder)
        whole = self.whole(folder, damaged)
        return int(whole[0].name[5:]) * self.unit if whole else 0

    # -- the drill ---------------------------------------------------------------

    def run(self, faults: list[Fault]) -> Outcome:
        """Every fault in its turn, then the full disks. The first difference ends it."""
        try:
            self.quiet_run()
            left = [f if possible(f, self.points) else dataclasses.replace(f, kind="random") for f in faults]
            with Progress(len(faults), f"drill {self.stage}", "kills") as bar:
                while left:
                    self.round(left, bar)
            self.disk_round()
        except Different as found:
            self.outcome.problems += [f"{self.stage}, {problem}" for problem in found.problems]
        return self.outcome

    def quiet_run(self) -> None:
        """The reference: a process of its own. Before it once more, forked and watched, which must give the same."""
        while True:
            self.params = drill_params(self.stage, self.scratch.params, self.longer)
            self.unit = unit(self.stage, self.params)
            watched = self.scratch.folder(self.base / "watched", self.params, self.stage)
            first = self.attempt(watched)
            if first.status:
                raise AthanorError(f"the run without kills failed ({last_line(first.log)})", where=self.stage)
            learn(watched / "attempts" / f"{self.attempts:03d}.log")
            self.points = Counter(note["point"] for note in first.noted if "point" in note)
            enough = self.stage not in TRAINING or self.points["remove"] >= MIN_REMOVED
            if enough or self.longer >= MAX_LONGER:
                break
            self.longer *= 2
            shutil.rmtree(self.base)
        self.quiet = self.scratch.folder(self.base / "quiet", self.params, self.stage)
        if self.stage in TRAINING:
            self.scratch.fresh(self.stage, self.quiet)
        else:  # with tasks as small as those of the others
            self.attempt(self.quiet)
        self.seconds = first.seconds
        if self.stage in TRAINING:  # the points of one checkpoint
            for kind in ("write", "fsync"):
                self.points[kind] //= max(1, self.points["renamed"])
        self.reference = compare.reference_samples(first.noted, self.unit)
        if not self.reference.end or list(self.reference.digests) != list(range(0, self.reference.end, self.unit)):
            raise Different("run without kills", "it does not read every position once, in order")
        self.compare_end(watched, "forked run without kills")

    def round(self, left: list[Fault], bar: Progress) -> None:
        """Attempts on one fresh slot until one ends; takes the faults that came to pass off `left`."""
        self.outcome.rounds += 1
        name = f"round {self.outcome.rounds}"
        folder = self.scratch.folder(self.base / f"round-{self.outcome.rounds:02d}", self.params, self.stage)
        damaged: Damaged = set()
        before = ""
        left.sort(key=lambda fault: fault.kind != "opening")  # only a fresh slot is opened for the first time
        while True:
            start = self.position(folder, damaged)
            attempt = self.next_attempt(folder, left[0] if left else None, start, len(self.whole(folder, damaged)))
            self.check(name, attempt, start, before)
            if attempt.status != -signal.SIGKILL:
                break
            fault = left.pop(0)
            before = fault.kind
            self.outcome.kills[fault.kind] += 1
            bar.update(1, fault.kind)
            if any(compare.status(journal) == "FINISHED" for journal in compare.journals(folder)):
                break  # killed when all was done
            if fault.kind in DAMAGE:
                path = damage(folder, self.stage, fault, self.whole(folder, damaged))
                damaged.add(identity(path))
                self.damaged_at = int(path.name[5:]) * self.unit if self.stage in TRAINING else 0
            if self.draw.random() < 0.5:  # as dvc does before it runs a stage
                for path in compare.files(folder, self.scratch.results(self.stage)).values():
                    path.unlink()
        if attempt.status not in (0, -signal.SIGKILL):
            raise Different(name, f"an attempt exited with {attempt.status}: {last_line(attempt.log)}")
        self.compare_end(folder, name)
        if left and attempt.status == 0:  # this one had no chance in what was left of the round
            tries = left[0].tries + 1
            left[0] = dataclasses.replace(left[0], tries=tries, kind=left[0].kind if tries < TRIES else "random")
        if not self.keep:
            shutil.rmtree(folder)

    def next_attempt(self, folder: Path, fault: Fault | None, start: int, whole: int) -> Attempt:
        if fault is None:
            return self.attempt(folder)
        if fault.kind == "random":  # anywhere in about what is left, start and end of the stage included
            left = self.seconds * (1 - 0.8 * start / self.reference.end)
            return self.attempt(folder, delay=fault.part * left / (1 + fault.tries))
        return self.attempt(folder, *point(fault, self.points, whole))

    def check(self, name: str, attempt: Attempt, start: int, before: str) -> None:
        """An attempt's samples, and what it says of a damaged checkpoint; counts how it went on after a death."""
        if before:
            (self.outcome.resumed if start else self.outcome.anew)[before] += 1
        if attempt.status == 0 and start == 0:  # the first run also imported what later ones find in memory
            self.seconds = min(self.seconds, attempt.seconds)
        overlap = os.environ.get("ATHANOR_OVERLAP") == "on"
        problems = compare.differing_samples(self.reference, attempt.noted, start, attempt.status == 0, overlap)
        begun = any("at" in note for note in attempt.noted)
        went_behind = start < self.damaged_at  # else another whole one of that step was there
        ignored = "checkpoint ignored" in attempt.log
        if self.stage in TRAINING and before in DAMAGE and begun and went_behind and not ignored:
            problems.append("nothing is said of the damaged checkpoint")
        if attempt.hung:
            problems.append(f"the attempt did not end in {attempt.seconds:.0f} s")
        if problems:
            self.outcome.different[before] += 1
            after = f" after '{before}'" if before else ""
            raise Different(f"{name}, attempt {self.attempts}{after}", *problems)

    def compare_end(self, folder: Path, name: str) -> None:
        """Raise Different unless a finished run left what the quiet one left."""
        names = self.scratch.results(self.stage)
        if self.stage in TRAINING:
            names += [compare.checkpoints(self.quiet, self.stage)[0].relative_to(self.quiet).as_posix()]
        problems = compare.differing_files(compare.files(self.quiet, names), compare.files(folder, names))
        problems += compare.differing_journals(self.quiet, folder, self.stage)
        if problems:
            raise Different(name, *problems)

    def disk_round(self) -> None:
        """No room while checkpoints are written: a limit on the size of files. tools/io_errors fails each single write."""
        name = "full disk"
        folder = self.scratch.folder(self.base / "disk", self.params, self.stage)
        self.attempt(folder, "renamed", 1 if self.stage in TRAINING else 9)
        for number in range(DISKS):
            before = self.contents(folder)
            start = self.position(folder, set())
            attempt = self.attempt(folder, file_bytes=int(self.draw.uniform(0.1, 0.9) * self.room(folder)))
            self.check(name, attempt, start, "disk" if number else "")
            lost = [path for path, content in before.items() if self.contents(folder).get(path) != content]
            if lost:
                raise Different(name, f"{lost[0]} is lost or changed")
            if attempt.status in (0, -signal.SIGKILL):
                raise Different(name, f"the attempt ended with {attempt.status}, not with an error")
        start = self.position(folder, set())
        attempt = self.attempt(folder)
        self.check(name, attempt, start, "disk")
        if attempt.status:
            what = f"with space again the attempt exited with {attempt.status}: {last_line(attempt.log)}"
            raise Different(name, what)
        self.compare_end(folder, name)
        if not self.keep:
            shutil.rmtree(folder)

    def room(self, folder: Path) -> int:
        """Bytes of the largest file of the checkpoint there, or about those of a part of a download.

        Not of the quiet run's last one: the first checkpoints are smaller, without the weights of the best validation.
        """
        if self.stage not in TRAINING:
            return LEAST_PART
        return max(file.stat().st_size for file in compare.checkpoints(folder, self.stage)[0].iterdir())

    def contents(self, folder: Path) -> dict[str, str]:
        """Digests of what a full disk must leave alone: checkpoints, or parts of a download."""
        names = [path.relative_to(folder).as_posix() for path in compare.checkpoints(folder, self.stage)]
        names += [
            path.relative_to(folder).as_posix() for path in folder.glob(".athanor/slots/*/*/tasks/[!.]*/*.parquet")
        ]
        return {name: sha256_file(path) for name, path in compare.files(folder, names).items()}


def unit(stage: str, params: dict[str, Any]) -> int:
    """Tokens of a step; 1 where a stage counts rows."""
    return int(params[stage].get("batch_tokens", 1))


def _rows_of_whole_tasks(folder: Path) -> int:
    """Rows that a download has up to the first task that is missing or damaged."""
    rows = 0
    for number, task in enumerate(sorted(folder.glob(".athanor/slots/download/*/tasks/[!.]*"))):
        facts: Any = read_json(task / "facts.json") if (task / "facts.json").is_file() else {"shards": [{"sha256": ""}]}
        files = [task / f"{shard:05d}.parquet" for shard in range(len(facts["shards"]))]
        hashes = [sha256_file(file) if file.is_file() else None for file in files]
        if not task.name.startswith(f"{number:06d}") or hashes != [shard["sha256"] for shard in facts["shards"]]:
            break
        rows += facts["rows"]
    return rows


def identity(path: Path) -> tuple[Path, int, int]:
    """A checkpoint's folder, and which one of that name: it may be written again, and get the inode of the one before."""
    found = path.stat()
    return path, found.st_ino, found.st_ctime_ns

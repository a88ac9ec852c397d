"""Shows why a training run hangs, and ends it: signs of life, stack dumps, a heartbeat file.

Each step is a sign of life; so is a file that changes in a checkpoint folder,
because a large checkpoint takes minutes. A thread waits for the next sign. When
it is overdue, the stacks of all threads go to `stacks.rank0.txt` in the run's
journal folder, those of the other processes that torchrun started here to a
file for each rank. After twice that time the process ends with status 75, and
the next one goes on from the last checkpoint.

`kill -USR2 PID` dumps the stacks of any stage at any time: the handler is C
code (faulthandler), so it needs neither Python's lock nor ptrace. Should
something hold that lock for ever, the thread cannot run either; a timer of
faulthandler's own then dumps the stacks, but nothing ends the process.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

from athanor.runtime.journal import now_ms
from athanor.runtime.progress import Progress, duration
from athanor.runtime.terminal import say

T = TypeVar("T")
HEARTBEAT = "heartbeat.json"
HEARTBEAT_SECONDS = 1.0
HANG_STEPS, MIN_HANG_SECONDS = 10, 300.0  # steps and seconds without a sign of life, whichever is longer
GRACE = 3600.0  # s for what may compile (the first steps) or go through much data (a validation)
FIRST_STEPS = 3
LAST_WORDS = 10.0  # s for the journal's end, which may hang on the same disk
STATUS = 75


class Watch:
    """A stage's signs of life: the thread that waits for them, and what it leaves behind.

    `alarm(text, facts)` and `end(text)` are called in the watching thread.
    Without `end` the process is not ended: one that only helps another one is
    ended with it.
    Nothing is watched before the first step has ended: data are loaded, another
    process's lock is waited for, kernels are compiled for as long as it takes.
    """

    def __init__(
        self,
        seconds: float,
        slots: list[Path],
        alarm: Callable[[str, Mapping[str, Any]], None],
        end: Callable[[str], None] | None,
    ) -> None:
        self.phase, self.step_number, self.bar = "working", 0, Progress(None, "", "")
        self._seconds, self._slots, self._alarm, self._end = seconds, slots, alarm, end
        self._beats = 0
        self._steps: collections.deque[float] = collections.deque(maxlen=64)  # s from one step's end to the next
        self._stepped: float | None = None
        self._longest: dict[str, float] = {}
        self._folder: Path | None = None
        self._written = float("-inf")
        self._stacks: TextIO | None = None
        self._thread: threading.Thread | None = None
        self._watching, self._closed = False, threading.Event()

    # -- called by the stage --------------------------------------------------

    def begin(self) -> None:
        """Dump stacks on SIGUSR2, and watch the steps to come. For a process that is a stage and nothing else."""
        self._watching = True
        self._register(sys.stderr)

    def use_folder(self, folder: Path) -> None:
        """Heartbeat and stacks go to the run's journal folder from now on."""
        self._folder = folder
        if self._watching:
            self._open_stacks(folder)

    def beat(self, phase: str = "") -> None:
        """A sign of life, and what the stage is at."""
        self._beats += 1
        changed, self.phase = phase not in ("", self.phase), phase or self.phase
        now = time.monotonic()
        if self._folder is not None and (changed or now - self._written >= HEARTBEAT_SECONDS):
            self._written = now
            self._write_heartbeat(self._folder / HEARTBEAT)

    def step(self) -> None:
        """A step of training is done."""
        now = time.monotonic()
        if self._stepped is not None:
            self._steps.append(now - self._stepped)
        if self._watching and self._stacks is None:
            self._open_stacks_of_slot()
        self._stepped = now
        self.beat("training")
        if self._thread is None and self._watching and self._seconds:
            self._thread = threading.Thread(target=self._wait, name="watchdog", daemon=True)
            self._thread.start()

    def long_operation(self, phase: str, work: Callable[..., T]) -> Callable[..., T]:
        """Wrap `work` as an operation that may take long: a validation takes many times as long as a step."""

        def wrapped(*args: Any) -> T:
            before, started = self.phase, time.monotonic()
            self.beat(phase)
            try:
                return work(*args)
            finally:
                self._longest[phase] = max(self._longest.get(phase, 0.0), time.monotonic() - started)
                self.beat(before)

        return wrapped

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None and threading.current_thread().name != "last words":
            self._thread.join(LAST_WORDS)
            faulthandler.cancel_dump_traceback_later()
        if self._folder is not None:
            (self._folder / HEARTBEAT).unlink(missing_ok=True)
        if self._stacks is not None:
            path, empty = Path(self._stacks.name), os.fstat(self._stacks.fileno()).st_size == 0
            self._register(sys.stderr)
            self._stacks.close()
            self._stacks = None
            if empty:
                path.unlink(missing_ok=True)

    # -- the thread ---------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for signs of life. Only time in which this thread ran counts: a stopped process does not hang."""
        tick = min(1.0, self._seconds / 10) if self._seconds > 0 else 1.0
        beats, waited, last, alarmed = self._beats, 0.0, time.monotonic(), False
        files: Any = None
        while not self._closed.wait(tick):
            now = time.monotonic()
            waited += min(now - last, 2 * tick)
            last, allowed = now, self.allowed()
            with contextlib.suppress(ValueError):  # the file was closed: the run has just ended
                faulthandler.dump_traceback_later(2 * allowed + tick, file=self._stacks or sys.stderr)
            if self._beats != beats or self._all_steps_done():
                if alarmed:
                    self._alarm(f"the step ended after {duration(waited)}; it goes on", {})
                beats, waited, alarmed, files = self._beats, 0.0, False, None
                continue
            if waited > allowed / 2:
                files_now = self._files()
                if files is not None and files_now != files:
                    waited = 0.0
                files = files_now
            if waited >= allowed and not alarmed:
                alarmed = True
                self._raise_alarm(waited)
            if waited >= 2 * allowed and self._end is not None:
                self._give_up(waited, self._end)
        if alarmed and self._beats != beats:  # the run ended before another look
            self._alarm(f"the step ended after {duration(waited)}; it goes on", {})

    def allowed(self) -> float:
        """Seconds without a sign of life that are no reason for an alarm now."""
        steps = list(self._steps)
        usual = statistics.median(steps) if steps else 0.0
        allowed = self._seconds if self._seconds > 0 else max(HANG_STEPS * usual, MIN_HANG_SECONDS)
        if self.phase != "training":
            return max(allowed, GRACE, HANG_STEPS * self._longest.get(self.phase, 0.0))
        return max(allowed, GRACE) if len(steps) < FIRST_STEPS - 1 else allowed

    def _all_steps_done(self) -> bool:
        """Whether all steps are done: what follows, such as writing the weights, has no steps."""
        return self.bar.total is not None and self.bar.done >= self.bar.total

    def _files(self) -> list[tuple[str, int, int]]:
        """Sizes and times below the checkpoint folders: they change while a checkpoint is written."""
        files = []
        for slot in list(self._slots):
            for folder, _, names in os.walk(slot):
                for name in names:
                    with contextlib.suppress(OSError):
                        stat = os.stat(os.path.join(folder, name))
                        files.append((os.path.join(folder, name), stat.st_size, stat.st_mtime_ns))
        return sorted(files)

    def _raise_alarm(self, waited: float) -> None:
        folder = self._folder or Path("the terminal")
        what = f"no sign of life for {duration(waited)} ({self.phase}, after step {self.step_number})"
        file = self._stacks or sys.stderr
        say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {what}", file)
        faulthandler.dump_traceback(file=file, all_threads=True)
        sibling_pids = siblings()
        for pid in sibling_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        stacks_name = f"{folder}/stacks.rank*.txt" if sibling_pids else getattr(self._stacks, "name", folder)
        facts = {"seconds": round(waited, 1), "phase": self.phase, "step": self.step_number, "stacks": str(stacks_name)}
        consequence = "; it ends if that lasts as long again" if self._end else ""
        bounded(lambda: self._alarm(f"{what}; the stacks are in {stacks_name}{consequence}", facts))

    def _give_up(self, waited: float, end: Callable[[str], None]) -> None:
        text = f"no sign of life for {duration(waited)} ({self.phase}, after step {self.step_number}): ended"
        bounded(lambda: end(f"{text}; the same command goes on from the last checkpoint"))
        os._exit(STATUS)

    # -- files ------------------------------------------------------------------

    def _write_heartbeat(self, path: Path) -> None:
        heartbeat = {"pid": os.getpid(), "host": platform.node(), "time_ms": now_ms(), "phase": self.phase}
        bar = self.bar
        heartbeat |= {"step": self.step_number, "done": bar.done, "total": bar.total, "progress": bar.line()}
        temporary = path.with_name(f".{path.name}.tmp")
        with contextlib.suppress(OSError):  # a full disk is reported by the work itself
            # Not flushed to the disk: after a power loss nobody is alive anyway, and a flush can take seconds.
            temporary.write_text(json.dumps(heartbeat) + "\n")
            os.replace(temporary, path)

    def _open_stacks(self, folder: Path) -> None:
        self._stacks = open(folder / f"stacks.rank{os.environ.get('RANK', '0')}.txt", "a", encoding="utf-8")
        self._register(self._stacks)

    def _open_stacks_of_slot(self) -> None:
        """Send a worker's stacks to the journal folder of the process that has the slot: it has none of its own."""
        for slot in self._slots:
            with contextlib.suppress(OSError, ValueError, KeyError):
                run = json.loads((slot / "run.json").read_text(encoding="utf-8"))["run"]
                self._open_stacks(slot.parents[2] / "runs" / run)
                return

    def _register(self, file: TextIO) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no SIGUSR2 here, or no terminal
            faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def bounded(work: Callable[[], None]) -> None:
    """Do something that may hang, for at most LAST_WORDS seconds."""
    thread = threading.Thread(target=work, name="last words", daemon=True)
    thread.start()
    thread.join(LAST_WORDS)


def siblings() -> list[int]:
    """The other processes that torchrun started on this host and that dump their stacks on SIGUSR2."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < 2:
        return []
    pids = []
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, ValueError):
            facts = dict(line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line)
            caught = int(facts["SigCgt"], 16) >> (signal.SIGUSR2 - 1) & 1  # whom it would not kill
            if int(facts["PPid"]) == os.getppid() and caught and int(path.parent.name) != os.getpid():
                pids.append(int(path.parent.name))
    return sorted(pids)

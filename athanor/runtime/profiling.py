"""A profile of a few steps of a training that runs: which operations take its time and memory.

    .athanor/PROFILE             holds the number of steps       (python -m athanor profile)
    .athanor/PROFILE.<process>   the same file while that process works on it

A training looks for the file between two steps. The first step behind the
request is not recorded, because the tools of a GPU take long to begin. What
was recorded goes to `files/profile-step-<first>/` of the run's journal, which
becomes artifacts of its MLflow run:

    trace.json.gz     for https://ui.perfetto.dev
    operations.tsv    every operation with its share of the time, calls, milliseconds and, on a GPU, memory
    tensors.json      the largest tensors between two steps (memory_snapshot.py)
    memory.pickle     GPU only: torch's own history of its allocator, for https://docs.pytorch.org/memory_viz

The profiler reads clocks and counters. It changes no number of the training
and draws none.

Where several processes train together, the main one is profiled: all do the
same work, and the time for which it waits for the others is in the trace as
communication.
"""

from __future__ import annotations

import contextlib
import csv
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from athanor.base.artifacts import new_dir, write_json
from athanor.runtime.guards import Request
from athanor.runtime.memory_snapshot import take

PROFILE = "PROFILE"
TRACE, OPERATIONS, TENSORS, MEMORY = "trace.json.gz", "operations.tsv", "tensors.json", "memory.pickle"
COLUMNS = ("share", "calls", "cpu_ms", "device_ms", "memory_mb", "operation")
MAX_STEPS = 100  # a trace of more is too large to look at
ALLOCATIONS = 200_000  # that torch's history of a GPU's memory keeps


class Profiler:
    """Answers the requests for a profile of one run. `note` tells the user."""

    def __init__(self, home: Path, note: Callable[[str], None], *, main: bool) -> None:
        self.main, self._note, self._request = main, note, Request(home / PROFILE)
        self._work: _Recording | None = None
        self._logged = self._steps_since = 0

    def after_step(self, logged: int, journal_folder: Callable[[], Path]) -> None:
        """Called after each step; `logged` is the last step whose numbers are known, which may be some steps back."""
        if not self.main:
            return
        self._steps_since = 1 + (self._steps_since if logged == self._logged else 0)
        self._logged = logged
        try:
            if self._work is None:
                if self._request.is_pending(time.monotonic()):
                    self._begin(journal_folder())
            elif self._work.step_done():
                self._note(f"a profile of {self._work.steps} steps is in {self._work.folder}")
                self.close()
        except Exception as error:  # a tool that fails must not end a training
            self._note(f"no profile: {error!r}; the training goes on")
            self.close()

    def _begin(self, journal_folder: Path) -> None:
        claimed = self._request.path.with_name(f"{PROFILE}.{os.getpid()}")
        try:
            os.replace(self._request.path, claimed)
        except FileNotFoundError:  # another stage was faster
            return
        text, first = claimed.read_text(encoding="utf-8").strip(), self._logged + self._steps_since + 2
        steps = min(MAX_STEPS, max(1, int(text))) if text.isdigit() else 3
        self._work = _Recording(steps, journal_folder / "files" / f"profile-step-{first:08d}", claimed)
        self._work.begin()

    def close(self) -> None:
        """End what is being recorded; a run that ends before its last step leaves no profile."""
        if self._work is not None:
            work, self._work = self._work, None
            with contextlib.suppress(Exception):  # said already
                work.close()


class _Recording:
    """torch's profiler at work on `steps` steps, whose results go to `folder`."""

    def __init__(self, steps: int, folder: Path, claimed: Path) -> None:
        self.steps, self.folder, self._claimed = steps, folder, claimed
        self._done, self._gpu = 0, False
        self._torch: Any = None

    def begin(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes to the terminal when it begins and ends
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile, schedule

        self._gpu = torch.cuda.is_available()
        self._torch = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])],
            schedule=schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=self._write,
            profile_memory=self._gpu,
            acc_events=True,
            # On a CPU micro-batches run in threads of their own; torch 2.13 then reports no memory.
            experimental_config=_ExperimentalConfig(profile_all_threads=not self._gpu),
        )
        if self._gpu:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
        self._torch.start()

    def step_done(self) -> bool:
        """A step has ended; True after the last one, when the results are written."""
        self._done += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own internals
            self._torch.step()
        return self._done > self.steps

    def _write(self, recorded: Any) -> None:
        if self._done <= self.steps:  # the run ended before
            return
        with new_dir(self.folder) as out:
            recorded.export_chrome_trace(str(out / TRACE))
            with open(out / OPERATIONS, "w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, delimiter="\t", lineterminator="\n")
                writer.writerow(COLUMNS)
                writer.writerows(operations(recorded))
            write_json(out / TENSORS, take({}))
            if self._gpu:
                import torch

                torch.cuda.memory._dump_snapshot(str(out / MEMORY))

    def close(self) -> None:
        try:
            if self._torch is not None:
                self._torch.stop()
            if self._gpu:
                import torch

                torch.cuda.memory._record_memory_history(enabled=None)
        finally:
            self._claimed.unlink(missing_ok=True)


def operations(recorded: Any) -> list[tuple[float, int, float, float, float, str]]:
    """Rows of COLUMNS, the operation with the largest share of the time first.

    Time is that of the operation without those inside of it: on the device if anything ran there, else of all
    threads of the CPU. Memory is what it allocated on the device and did not free.
    """
    events = [event for event in recorded.key_averages() if not event.key.startswith("ProfilerStep")]
    device_us = sum(event.self_device_time_total for event in events)
    total_us = device_us or sum(event.self_cpu_time_total for event in events) or 1.0
    rows = [
        (
            round((event.self_device_time_total if device_us else event.self_cpu_time_total) / total_us, 5),
            event.count,
            round(event.self_cpu_time_total / 1e3, 3),
            round(event.self_device_time_total / 1e3, 3),
            round(event.self_device_memory_usage / 1e6, 3),
            event.key,
        )
        for event in events
    ]
    return sorted(rows, key=lambda row: (-row[0], row[-1]))

"""Measures where the time of training goes, and how much memory it takes.

Parts are stamped as they begin and end, and stamps are compared at the log
points only. On a CPU a stamp is the clock; on a CUDA device it is an event in
the stream, so that no step waits for the device, and a part's time is what
the device spent on it or idled for it. Loading data while the device is still
busy therefore costs nothing, as it should.

A step's parts are data, forward_backward, optimizer and other (the rest);
forward and backward are told apart by the share that each has of the threads'
own time. Evaluation, samples, checkpoints, readings of vital signs and the
writing of the journal are not part of a step.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from athanor.base.host import peak_bytes

STEP_PARTS = ("data", "forward_backward", "optimizer", "other")
OUTSIDE_STEP = ("evaluation", "sample", "checkpoint", "vitals", "log")


class Meter:
    """Times of one process's training. `clock` in seconds replaces the stamps of the device."""

    def __init__(self, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        self.device = device
        self._events = device.type == "cuda" and clock is None
        self._clock = clock or time.perf_counter
        self._open: list[tuple[str, Any, Any]] = []  # stamped, not yet compared; appended to by several threads
        self._steps: list[tuple[Any, Any]] = []
        self._begin: Any = None
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.steps, self.step_seconds, self.first_step = 0, 0.0, 0.0
        self._queue = queue()
        self._counts = (0, 0, 0)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """What runs inside counts as `part`. Parts of a step do not nest, but `forward` and `backward` do in theirs."""
        subtract_queued = part == "data" and self._clock is time.perf_counter and not self._events
        begin = self._stamp()
        # Read between the stamps, or more than the time between them would be subtracted.
        queued = -_queued_seconds() if subtract_queued else 0.0
        try:
            yield
        finally:
            queued += _queued_seconds() if subtract_queued else 0.0
            end = self._stamp()
            if subtract_queued:  # that other programs had the processor is no fault of the data
                end -= min(end - begin, max(0.0, queued))
            self._open.append((part, begin, end))

    def begin_step(self) -> None:
        self._begin = self._stamp()

    def end_step(self) -> None:
        """After the step's result was fetched, if it was; before evaluation, samples and checkpoints."""
        self._steps.append((self._begin, self._stamp()))

    def count(self, tokens: int, pairs: int, targets: int) -> None:
        """The work of a step: tokens, pairs of query and key, and targets."""
        self._counts = (self._counts[0] + tokens, self._counts[1] + pairs, self._counts[2] + targets)

    def _stamp(self) -> Any:
        if not self._events:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if not self._events:
            return end - begin
        end.synchronize()  # of the past already: the loop has just fetched what came after
        return begin.elapsed_time(end) / 1000

    def window(self, gflop: Callable[[int, int, int], dict[str, float]] = lambda *_: {}) -> dict[str, float]:
        """Times since the last call: `time.<part>_s`, seconds per step, and of an evaluation or checkpoint in between.

        Empty without a step. `time.step_s` is the sum of the step's parts. `cpu.wait_share`, where the system tells
        it: of the time that this process wanted processors, the share for which others had them. `gflop` says what
        arithmetic the work that was counted is, and the window what is done of it per second.
        """
        spans, steps = self._open, self._steps
        self._open, self._steps = [], []
        seconds, calls = defaultdict(float), defaultdict(int)
        for part, begin, end in spans:
            seconds[part] += self._between(begin, end)
            calls[part] += 1
        walls = [self._between(begin, end) for begin, end in steps]
        wall = sum(walls)
        seconds["other"] = wall - sum(seconds[part] for part in STEP_PARTS[:-1])
        threads = seconds["forward"] + seconds["backward"]
        if threads:  # of several threads at once: what counts is their share
            for part in ("forward", "backward"):
                seconds[part] *= seconds["forward_backward"] / threads
        for part, value in seconds.items():
            self.totals[part] += value
        if walls and not self.steps:
            self.first_step = walls[0]
        self.steps += len(walls)
        self.step_seconds += wall
        if not walls:
            return {}
        work, self._counts = gflop(*self._counts), (0, 0, 0)
        row = {"time.step_s": wall / len(walls)} | {name: value / max(wall, 1e-9) for name, value in work.items()}
        for part in (*STEP_PARTS, "forward", "backward"):
            if part in seconds:
                row[f"time.{part}_s"] = seconds[part] / len(walls)
        before, self._queue = self._queue, queue()
        waited, ran = (max(0.0, now - then) for now, then in zip(self._queue, before, strict=True))
        if waited + ran > 0:
            row["cpu.wait_share"] = waited / (waited + ran)
        return row | {f"time.{part}_s": seconds[part] / calls[part] for part in OUTSIDE_STEP if calls[part]}

    def summary(self) -> dict[str, float]:
        """Seconds of this process by part; `compile`: what the first step took beyond the mean of the others."""
        self.window()
        seconds = {part: value for part, value in self.totals.items() if value}
        if self.steps > 1:
            mean_step_seconds = (self.step_seconds - self.first_step) / (self.steps - 1)
            seconds["compile"] = max(0.0, self.first_step - mean_step_seconds)
        return seconds


def _queued_seconds() -> float:
    """For how long this thread was ready and waited for a processor; 0 where the system does not tell."""
    try:
        return float(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def queue() -> tuple[float, float]:
    """Nanoseconds for which this process's threads waited for a processor, and for which they ran; Linux only."""
    waited = ran = 0.0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # a thread that has just ended
            ran_ns, waited_ns, _ = map(float, path.read_text().split())
            waited, ran = waited + waited_ns, ran + ran_ns
    return waited, ran


def memory(device: torch.device) -> dict[str, float]:
    """`memory.bytes`: the peak of the device so far; `memory.host_bytes`: what this process holds on the host now, if told."""
    readings = {"memory.bytes": float(peak_bytes())} if device.type == "cpu" else {}
    status = Path("/proc/self/status")
    if status.is_file():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        readings["memory.host_bytes"] = 1024.0 * int(lines["VmRSS"].split()[0])
        if device.type == "cpu" and "VmHWM" in lines:
            readings["memory.bytes"] = 1024.0 * int(lines["VmHWM"].split()[0])
    if device.type == "cuda":
        readings["memory.bytes"] = float(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":  # its cache gives nothing back, so what it has taken is the most it has needed
        readings["memory.bytes"] = float(torch.mps.driver_allocated_memory())
    return readings

"""Progress on long work: a bar on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import math
import sys
import time

from athanor.runtime.terminal import say

QUIET_SECONDS = 30.0
SMOOTHED = 20


class Mean:
    """The mean of about the last twenty finite values."""

    def __init__(self) -> None:
        self.value, self.count = math.nan, 0

    def add(self, value: float) -> float:
        if math.isfinite(value):
            self.count = min(self.count + 1, SMOOTHED)
            self.value = value if self.count == 1 else self.value + (value - self.value) / self.count
        return self.value


class Progress:
    """A counter with rate and time left. Use as a context manager."""

    def __init__(self, total: float | None, desc: str, unit: str) -> None:
        self.total, self.desc, self.unit, self.note = total, desc, unit, ""
        self.done = self.start_done = 0.0
        self.started = self.last_said = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=desc, unit=unit, unit_scale=True, leave=False, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def resume_at(self, done: float) -> None:
        """Count `done` as finished before this process began, so that the rate stays honest."""
        self.done = self.start_done = done
        say(f"{self.desc}: continues from {self._amount(done)}")
        if self.bar is not None:
            self.bar.initial = self.bar.n = done
            self.bar.refresh()

    def expect(self, amount: float) -> None:
        """Add to the total, where it becomes known piece by piece."""
        self.total = (self.total or 0.0) + amount
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.refresh()

    def update(self, amount: float, note: str = "") -> None:
        self.done += amount
        self.note = note
        if self.bar is not None:
            if note:
                self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(amount)
            return
        now = time.monotonic()
        if now - self.last_said >= QUIET_SECONDS:
            self.last_said = now
            say(self.line())

    def line(self) -> str:
        rate = (self.done - self.start_done) / max(time.monotonic() - self.started, 1e-9)
        texts = [f"{self.desc}: {self._amount(self.done)}"]
        if self.total:
            seconds_left = (self.total - self.done) / rate if rate > 0 else float("inf")
            done = self._amount(self.done).removesuffix(f" {self.unit}")
            texts = [f"{self.desc}: {done} of {self._amount(self.total)} ({self.done / self.total:.0%})"]
            texts += [f"{duration(seconds_left)} left"]
        if rate >= 1:
            texts += [f"{self._amount(rate)}/s"]
        return ", ".join([*texts, *filter(None, [self.note])])

    def _amount(self, value: float) -> str:
        return f"{value / 1e6:,.1f} MB" if self.unit == "B" else f"{value:,.0f} {self.unit}"


def duration(seconds: float) -> str:
    """4.2 s, 3 min 05 s, 2 h 10 min: the largest two units that say something."""
    if seconds == float("inf"):
        return "unknown time"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(int(round(seconds)), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"

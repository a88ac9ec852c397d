"""Robust statistics that cost microseconds per value."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable

SIGMA = 1.4826  # standard deviation of a normal distribution, in median absolute deviations
NINTH_TENTH = 1.2816  # standard deviations above the mean of a normal distribution, a tenth of which lies above
MEDIAN_ERROR = 1.2533  # standard error of a median of n normal values, times sigma / sqrt(n)


class Window:
    """The last `size` values, also kept sorted: the median is a look-up, an entry a shift of one small list."""

    __slots__ = ("_ordered", "size", "values")

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        if len(self.values) == self.size:
            del self._ordered[bisect_left(self._ordered, self.values.popleft())]
        self.values.append(value)
        insort(self._ordered, value)

    def clear(self) -> None:
        self.values.clear()
        self._ordered.clear()

    @property
    def median(self) -> float:
        return _median_of_sorted(self._ordered)

    @property
    def sigma(self) -> float:
        """Scale of the values without regard to outliers; 0 when more than half of them are equal."""
        center = self.median
        return SIGMA * _median_of_sorted(sorted([abs(value - center) for value in self._ordered]))

    @property
    def sigma_above(self) -> float:
        """Scale of the upper half alone, by the value that a tenth lies above; for noise that is not symmetric."""
        return (self._ordered[len(self._ordered) * 9 // 10] - self.median) / NINTH_TENTH


def _median_of_sorted(ordered: list[float]) -> float:
    half, odd = divmod(len(ordered), 2)
    return ordered[half] if odd else (ordered[half - 1] + ordered[half]) / 2


def median(values: Iterable[float]) -> float:
    return _median_of_sorted(sorted(values))


class Curve:
    """A smoothed series that can be read at earlier steps, in at most `max_points` points."""

    __slots__ = ("_count", "_points", "_steps", "_stride", "max_points", "smooth", "value")

    def __init__(self, smooth: int = 50, max_points: int = 512) -> None:
        self.smooth, self.max_points = smooth, max_points
        self.value, self._count = 0.0, 0
        self._steps: list[int] = []
        self._points: list[float] = []
        self._stride = 1

    def add(self, step: int, value: float) -> None:
        """Steps rise; the mean of the first values, then an exponential one of about `smooth`."""
        self._count += 1
        self.value += (value - self.value) / min(self._count, self.smooth)
        if self._steps and step < self._steps[-1] + self._stride:
            return
        self._steps.append(step)
        self._points.append(self.value)
        if len(self._steps) > self.max_points:
            self._steps, self._points, self._stride = self._steps[::2], self._points[::2], 2 * self._stride

    def drop_from(self, step: int) -> None:
        """Drop what is known of `step` and later ones."""
        index = bisect_left(self._steps, step)
        del self._steps[index:], self._points[index:]

    def at(self, step: int) -> float | None:
        """The value at the last kept step that is not after `step`."""
        index = bisect_right(self._steps, step)
        return self._points[index - 1] if index else None


class Alarm:
    """Decides when bad readings are reported: `need` of the last `window` readings raise it, and an event is reported once.

    It is reported again when it got worse, or when it came back after `calm`
    good readings in a row and `cooldown` steps since the last report.
    """

    __slots__ = ("_bad", "_counts", "_good", "_last", "_number", "_reported", "calm", "cooldown", "need", "window")

    def __init__(self, need: int = 1, window: int = 1, calm: int = 100, cooldown: int = 200) -> None:
        self.need, self.window, self.calm, self.cooldown = need, window, calm, cooldown
        # (number of the reading, level) of the bad ones among the last `window`; and how many there are of each level.
        self._bad: deque[tuple[int, int]] = deque()
        self._counts = [0] * 4
        self._number = self._reported = self._good = 0
        self._last = 0

    def see(self, step: int, level: int, at_once: bool = False) -> int:
        """The level to report at this reading, 0 for nothing new. `at_once`: one reading is enough."""
        self._number += 1
        while self._bad and self._bad[0][0] <= self._number - self.window:
            self._counts[self._bad.popleft()[1]] -= 1
        if not level:
            self._good += 1
            if self._reported and self._good >= self.calm and step - self._last >= self.cooldown:
                self._reported = 0
            return 0
        self._bad.append((self._number, level))
        self._counts[level] += 1
        self._good = 0
        if not at_once:
            level = self._agreed()
        if level <= self._reported:
            return 0
        self._reported, self._last = level, step
        return level

    def _agreed(self) -> int:
        """The highest level that enough of the last readings had at least."""
        readings = 0
        for level in (3, 2, 1):
            readings += self._counts[level]
            if readings >= self.need:
                return level
        return 0

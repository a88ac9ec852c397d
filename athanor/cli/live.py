"""A run on a terminal: what the stages say scrolls by, and below it stands what is at work now.

The stages write into a pipe. Lines of their progress are marked (athanor/runtime/progress.py) and drawn in place: stage,
share, time left, and of a training the smoothed loss with its curve. Every other line is shown as it is.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from athanor.runtime.progress import LIVE, MARK, duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

CURVE, COLUMNS = "▁▂▃▄▅▆▇█", 40
SMOOTHED = 0.9  # the most that the mean so far weighs in the next one
LAST_LINES_SECONDS = 2.0


class View:
    """What is known of the stage at work."""

    def __init__(self) -> None:
        self.begin("")

    def begin(self, stage: str) -> None:
        """Another stage, or none, is at work from now on."""
        self.stage, self.started, self.text = stage, time.monotonic(), ""
        self.share: float | None = None
        self.losses: list[float] = []

    def take(self, line: str) -> bool:
        """Whether a line is to be shown as it is; else it is part of the view."""
        if line.startswith(MARK):
            share, _, self.text = line[len(MARK) :].partition(MARK)
            self.share = float(share) if share else None
            if loss := re.search(r"\bloss (\d+\.\d+)", self.text):
                before = min(SMOOTHED, len(self.losses) / (len(self.losses) + 1))
                self.losses.append(before * (self.losses or [0.0])[-1] + (1 - before) * float(loss[1]))
            return False
        if stage := re.match("Running stage '(.+)':", line):
            self.begin(stage[1])
        elif line.startswith("Updating lock file"):
            self.begin("")
        return True

    def curve(self) -> str:
        """The losses as one line of blocks: the means of as many pieces as it has columns."""
        pieces = [self.losses[number * len(self.losses) // COLUMNS :] for number in range(COLUMNS)]
        size = max(1, len(self.losses) // COLUMNS)
        means = (
            [sum(piece[:size]) / len(piece[:size]) for piece in pieces] if len(self.losses) >= COLUMNS else self.losses
        )
        low, high = min(means), max(means)
        return "".join(CURVE[round((mean - low) / ((high - low) or 1.0) * (len(CURVE) - 1))] for mean in means)

    def __rich__(self) -> RenderableType:
        from rich.columns import Columns
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        if not self.stage:
            return Text("")
        head: list[RenderableType] = [Text(f"{self.stage}, {duration(time.monotonic() - self.started)}", style="bold")]
        if self.share is not None:
            head.append(ProgressBar(1.0, min(1.0, self.share), width=COLUMNS))
        rows: list[RenderableType] = [Text(""), Columns(head)]
        if self.text:
            rows.append(Text(self.text, overflow="ellipsis", no_wrap=True))
        if len(self.losses) > 1:
            rows.append(Text(f"loss {self.losses[-1]:.3f} (smoothed)  {self.curve()}", no_wrap=True))
        return Group(*rows)


def possible() -> bool:
    """Whether somebody looks at both streams on a terminal that can be drawn on."""
    return sys.stderr.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def call(run_command: Callable[..., int], command: list[str], env: dict[str, str], **options: Any) -> int:
    """Run a command that way, with its output in the view; returns its status."""
    from rich.console import Console
    from rich.live import Live

    view, console = View(), Console(stderr=True)
    read_end, write_end = os.pipe()
    reader = threading.Thread(target=follow, args=(read_end, view, console), daemon=True)
    with Live(view, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
        reader.start()
        try:
            return run_command(command, env={**env, LIVE: "1"}, stdout=write_end, stderr=write_end, **options)
        finally:
            os.close(write_end)
            reader.join(LAST_LINES_SECONDS)  # a process that outlives the command may hold the other end


def follow(read_end: int, view: View, console: Console) -> None:
    """Show what comes until nobody can write any more."""
    with open(read_end, encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            text = line.rstrip("\r\n").rpartition("\r")[2]
            if view.take(text):
                console.print(text, markup=False, highlight=False, soft_wrap=True)

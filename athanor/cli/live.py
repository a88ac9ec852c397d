"""A run on a terminal: what DVC and the stages say scrolls by, and at the foot stands what is at work now.

They write into a file, .athanor/repro.log, so they neither wait for this view nor end with it, however it ends. The
view follows that file, and of the stage at work the heartbeat and the journal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from athanor.cli import side, summary
from athanor.runtime.journal import read_after, rows
from athanor.runtime.progress import Mean, duration
from athanor.runtime.terminal import say
from athanor.runtime.watchdog import HEARTBEAT

LOG = Path(".athanor/repro.log")
PERIOD = 0.3  # s from one drawing to the next
# No wider, for terminals break lines when they become narrower, and tell programs a moment later.
COLUMNS, CURVE_ROWS, CELLS = 80, 4, 960
BRAILLE, DOTS = 0x2800, ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
HELD_OUT = {"val_bpb.all": "bits per byte", "val_loss": "nats per token"}
# What the foot says better, progress among it (athanor/runtime/progress.py: line).
PASSED_OVER = re.compile(
    r"$|> |Running stage|Generating lock file|Updating lock file|Use `dvc push`|.*: [\d,.]+ .*/s(,.*)?$"
)
HINT = "Ctrl-C stops it and loses nothing: the same command goes on"


class Training:
    """The numbers of a run that trains, read from its journal as it grows."""

    def __init__(self) -> None:
        self.offset, self.total_tokens, self.mean = 0, 0.0, Mean()
        self.cells: dict[int, float] = {}  # piece of the training to the smoothed loss at its end
        self.held_out: dict[str, list[float]] = {}
        self.finding = ""

    def read(self, folder: Path) -> None:
        data = read_after(folder, self.offset)
        self.offset += len(data)
        for row in rows(data):
            values = row.get("m", {})
            if row.get("event") == "training":
                self.total_tokens = row["schedule"]["total_tokens"]
            elif row.get("event") == "finding":
                self.finding = f"{row['level'].upper()} at step {row['step']}, {row['rule']}: {row['diagnosis']}"
            elif self.total_tokens and "loss" in values:
                cell = int(values["tokens"] / self.total_tokens * CELLS)
                self.cells[min(cell, CELLS - 1)] = self.mean.add(float(values["loss"]))
            for name in HELD_OUT.keys() & values.keys():
                self.held_out.setdefault(name, []).append(float(values[name]))

    def curve(self, columns: int) -> Iterator[tuple[str, str]]:
        """The smoothed loss over the whole training, on a logarithmic scale, in rows of dots with its bounds beside them."""
        logs = {cell * 2 * columns // CELLS: math.log(max(loss, 1e-3)) for cell, loss in self.cells.items()}
        low, high, log = min(logs.values()), max(logs.values()), next(iter(logs.values()))
        grid = [[BRAILLE] * columns for _ in range(CURVE_ROWS)]
        for x in range(max(logs) + 1):
            log = logs.get(x, log)
            y = round((high - log) / (high - low or 1.0) * (4 * CURVE_ROWS - 1))
            grid[y // 4][x // 2] |= DOTS[y % 4][x % 2]
        for number, row in enumerate(grid):
            label = {0: f"{math.exp(high):.2f}", 1: "loss", CURVE_ROWS - 1: f"{math.exp(low):.2f}"}.get(number, "")
            yield label, "".join(map(chr, row))


class View:
    """Follows a run. `stages`: those to come, in order, if that is known. `signals`: those that asked it to stop."""

    def __init__(self, root: Path, stages: Iterable[str], signals: Sequence[int]) -> None:
        self.root, self.stages, self.signals = root, list(stages), signals
        self.seconds = {stage: facts["seconds"] for stage in self.stages if (facts := summary.leaf(root, stage))}
        path = root / LOG
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)  # and not cut: another run may write there
        self.log = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
        self.offset = 0
        self.ended: dict[str, str] = {}
        self.foot: list[str] = []  # as drawn last, without colours
        self.begin("")

    def begin(self, stage: str) -> None:
        self.stage, self.started, self.training = stage, time.time(), Training()
        self.heartbeat: dict[str, Any] = {}

    def wait(self, child: subprocess.Popen[bytes]) -> int:
        """Draw until a process has ended; returns its status."""
        try:
            while child.poll() is None:
                self.draw()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(PERIOD)
            self.draw(last=True)
        except Exception as error:  # trouble of the view's own never stops a run
            say(f"the view of the run stopped ({error!r}); the run goes on, and {LOG} has what it says")
        return child.wait()

    def draw(self, last: bool = False) -> None:
        """Write what was said since, and the foot below it in the place of the one before."""
        try:
            told = os.get_terminal_size(sys.stderr.fileno())  # rich prefers COLUMNS, which does not follow it
        except OSError:  # it was closed
            return
        with contextlib.suppress(OSError):  # it is not the one that started us
            if not last and os.tcgetpgrp(sys.stderr.fileno()) != os.getpgrp():  # a shell has the terminal
                self.foot = []
                return
        from rich.console import Console

        # `script` and `docker exec -t` may give a terminal no size.
        width, height = told.columns or 80, told.lines or 24
        console = Console(stderr=True, width=width, height=height, markup=False, highlight=False)
        # A terminal that became narrower has broken the lines of the foot.
        before = sum(1 + max(0, len(line) - 1) // width for line in self.foot)
        said = [line for line in self.lines(last) if self.take(line)]
        self.follow()
        with console.capture() as capture:
            if not last:
                self.print_foot(console, min(width - 1, COLUMNS))
        foot = capture.get().splitlines()[: height - 1]
        self.foot = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in foot]
        text = "".join(f"{line}\x1b[K\n" for line in (*said, *foot))
        print_over = f"\x1b[{before}F" if before else ""
        say(f"{print_over}{text}\x1b[J", end="")

    def lines(self, last: bool) -> list[str]:
        """The whole lines that were said since; of one that was overwritten, its last text."""
        data = os.pread(self.log, os.fstat(self.log).st_size - self.offset, self.offset)
        data = data if last else data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        text = data.decode(errors="replace").replace("\r\n", "\n").removesuffix("\n")
        return [line.rpartition("\r")[2] for line in text.split("\n")] if data else []

    def take(self, line: str) -> bool:
        """Learn from a line; whether it is to be shown."""
        if match := re.match(r"Running stage '(?:.*:)?(.+)':", line):
            self.begin(match[1])
        elif match := re.match(r"(\S+): done in (.+)", line):
            self.ended[match[1]] = match[2]
            self.begin("")
        elif match := re.match(r"Stage '(?:.*:)?(.+)' (didn't change|is cached)", line):
            self.ended[match[1]] = "kept" if match[2] == "didn't change" else "restored"
        return not PASSED_OVER.match(line)

    def follow(self) -> None:
        """Read what the stage at work has left since."""
        pattern = f".athanor/runs/{self.stage.replace('-', '_')}-*/{HEARTBEAT}"
        for path in self.root.glob(pattern) if self.stage else ():
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                if path.stat().st_mtime >= self.started:
                    self.heartbeat = json.loads(path.read_text(encoding="utf-8"))
                    self.training.read(path.parent)

    def print_foot(self, console: Any, width: int) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        out = functools.partial(console.print, width=width)
        out()
        if self.ended:
            ended = "  ".join(f"{name} {how}".replace(" ", "\xa0") for name, how in self.ended.items())
            out(textwrap.fill(ended, width, break_on_hyphens=False), style="green")
        place = f"{self.stages.index(self.stage) + 1} of {len(self.stages)}" if self.stage in self.stages else ""
        words = (self.stage, place, duration(time.time() - self.started), self.heartbeat.get("phase", ""))
        out(", ".join(filter(None, words)) if self.stage else "DVC is at work", style="bold")
        grid = Table.grid(padding=(0, 1))
        if total := self.heartbeat.get("total"):
            share = min(1.0, self.heartbeat["done"] / total)
            grid.add_row(f"{share:5.0%}", ProgressBar(1.0, share, width=width - 6))
        if self.training.cells and console.height > 20:
            for label, dots in self.training.curve(width - 6):
                grid.add_row(f"{label:>5}", dots)
        if grid.row_count:
            out(grid)
        if self.heartbeat.get("done"):
            out(self.heartbeat["progress"])
        for name, values in self.training.held_out.items():
            out(f"held out, {HELD_OUT[name]}: {', '.join(f'{value:.3f}' for value in values[-8:])}")
        if self.training.finding:
            out(self.training.finding, style="yellow", no_wrap=True, overflow="ellipsis")
        if coming := [stage for stage in self.stages if stage not in self.ended and stage != self.stage]:
            known = [self.seconds[stage] for stage in coming if stage in self.seconds]
            past = f": {duration(sum(known))} the last time" if len(known) == len(coming) else ""
            out(f"then {', '.join(coming)}{past}", style="dim")
        out("stopping: the stage at work saves and ends" if self.signals else HINT, style="dim")


def command_runner(
    root: Path, arguments: Sequence[str], stages: Iterable[str], signals: list[int]
) -> Callable[..., int]:
    """As that of `side`, with the view where somebody looks at a terminal. `arguments`: those of `dvc repro`."""
    terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    asks = any(re.match(r"-\w*i|--i|--pd", word) for word in arguments)  # --interactive and --pdb
    if asks or not terminal or not sys.stderr.encoding.lower().startswith("utf"):
        return side.command_runner(signals)
    whole = not set(arguments) - {"-f", "--force"}
    view = View(root, stages if whole else (), signals)
    return functools.partial(side.command_runner(signals, view.wait), stdout=view.log, stderr=view.log)

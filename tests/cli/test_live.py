"""The view of a running repro, in a real pseudo-terminal: what it draws, and that the run needs nothing of it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from rich.console import Console

from athanor.cli import live
from athanor.runtime.progress import Mean
from tests.runtime.toy_pipeline import PATIENCE, Toy, until

ROWS, COLUMNS = 24, 50


class Terminal:
    """`athanor repro` of a toy as the leader of a terminal of its own, and what that has shown."""

    def __init__(self, toy: Toy, *words: str, term: str = "xterm") -> None:
        self.toy, self.text = toy, ""
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
        command = [sys.executable, "-m", "athanor", "repro", *words]
        env = {**toy.environment(), "TERM": term, "COLUMNS": "120"}
        self.process = subprocess.Popen(command, cwd=toy.path, env=env, preexec_fn=lambda: os.login_tty(theirs))
        os.close(theirs)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        try:
            while part := os.read(self.ours, 65536):
                self.text += part.decode(errors="replace")
        except OSError:  # how a terminal without processes ends
            pass

    def wait(self) -> int:
        status = self.process.wait(PATIENCE)
        self.reader.join(5)
        return status

    def left(self) -> list[str]:
        """The lines that stand there in the end, as a terminal of endless height shows them."""
        lines, row = [""], 0
        for code, text in re.findall(r"\x1b\[([\d;?]*[A-Za-z])|([^\x1b]+)", self.text):
            if code.endswith("F"):
                row -= int(code[:-1])
            elif code == "J":
                del lines[row + 1 :]
            for number, piece in enumerate(text.split("\n") if text else ()):
                row += number > 0
                lines += [""] * (row + 1 - len(lines))
                lines[row] = piece.rstrip("\r") or lines[row] * (number == 0)
        return lines


def test_a_run_shows_the_stage_at_work_and_leaves_what_was_said_and_the_summary(toy: Toy) -> None:
    toy.hold(6)
    terminal = Terminal(toy)
    toy.wait_held()
    until(lambda: "count, 1 of 2, 1." in terminal.text, "the stage is shown", toy)
    toy.release()
    assert terminal.wait() == 0, terminal.text
    foot = re.sub(r"\x1b\[[\d;]*[mK]", "", terminal.text)
    assert "then report" in foot and live.HINT in " ".join(foot.split())
    assert max(len(line) for line in foot.splitlines() if "Ctrl-C" in line) < COLUMNS
    left = terminal.left()
    assert [line for line in left if line.startswith("count: step")] == [f"count: step {n}" for n in range(1, 13)]
    assert "Stages" in str(left) and not [line for line in left if re.match("Ctrl-C|Running stage", line)], left
    assert "Running stage 'count'" in (toy.path / live.LOG).read_text()


def test_the_error_of_a_stage_stands_last(toy: Toy) -> None:
    path = toy.path / "stages/report.py"
    path.write_text(path.read_text().replace('    say("report"', '    raise ValueError("no words")\n    say("report"'))
    terminal = Terminal(toy)
    assert terminal.wait() not in (0, 75)
    left = "\n".join(terminal.left()).strip()
    assert (
        left.endswith("ValueError('no words')")
        and "Traceback" in left
        and "ERROR: failed to reproduce 'report'" in left
    )


@pytest.mark.parametrize("how", ["ctrl-c", "hang-up"])
def test_a_stop_reaches_the_stage_which_saves(toy: Toy, how: str) -> None:
    toy.hold(6)
    terminal = Terminal(toy)
    toy.wait_held()
    os.write(terminal.ours, b"\x03") if how == "ctrl-c" else os.close(terminal.ours)
    status = terminal.wait()
    until(lambda: list(toy.path.glob(".athanor/runs/*/end.json")), "the stage has ended", toy)
    end = json.loads(next(toy.path.glob(".athanor/runs/*/end.json")).read_text())
    assert end["status"] == "KILLED" and "stopped after step" in end["error"]
    assert "progress is kept" in (toy.path / live.LOG).read_text()
    if how == "ctrl-c":
        assert status == 75 and terminal.left()[-2].startswith("count: stopped after step"), terminal.text


@pytest.mark.parametrize("words", [("--interactive",), ()], ids=["it asks", "dumb"])
def test_otherwise_dvc_has_the_terminal(toy: Toy, words: tuple[str, ...]) -> None:
    terminal = Terminal(toy, *words, term="xterm" if words else "dumb")
    if words:
        until(lambda: "count" in terminal.text and "[y/n]" in terminal.text, "DVC asks", toy)
        os.write(terminal.ours, b"n\n")
    terminal.wait()
    assert "Ctrl-C" not in terminal.text and not (toy.path / live.LOG).exists()


# -- what it draws --------------------------------------------------------------------------------------------------


@pytest.fixture
def view(tmp_path: Path) -> live.View:
    view = live.View(tmp_path, ["sft-data", "pretrain", "sft"], [])
    view.seconds = {"sft": 65.0}
    assert [view.take(line) for line in ("Running stage 'sft-data':", "sft-data: done in 2.0 s", "Running stage 'pretrain':")] == [
        False, True, False,
    ]  # fmt: skip
    folder = tmp_path / ".athanor/runs/pretrain-1"
    folder.mkdir(parents=True)
    rows = [{"event": "training", "schedule": {"total_tokens": 1000}}]
    rows += [{"s": n, "m": {"tokens": 10.0 * n, "loss": "nan" if n == 5 else 8.0 * 0.98**n}} for n in range(1, 51)]
    rows += [{"s": 50, "m": {"val_bpb.all": 1.5}}]
    rows += [
        {"event": "finding", "level": "warning", "step": 9, "rule": "loss_spike", "diagnosis": "The loss is high. " * 9}
    ]
    (folder / "journal.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"torn')
    beat = {
        "phase": "validation",
        "done": 500,
        "total": 1000,
        "progress": "pretrain: 500 tokens of 1,000 tokens, loss 3.000",
    }
    (folder / "heartbeat.json").write_text(json.dumps(beat))
    view.started -= 1
    return view


@pytest.mark.parametrize(("width", "height"), [(59, 24), (79, 24), (59, 18)])
def test_a_training(view: live.View, width: int, height: int) -> None:
    console = Console(width=width + 1, height=height, color_system=None, force_terminal=True)
    with console.capture() as capture:
        view.follow()
        view.print_foot(console, width)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width and len(lines) <= 16
    text = " ".join(capture.get().split())
    assert "sft-data 2.0 s pretrain, 2 of 3, " in text and "s, validation 50% ━" in text
    assert (
        "loss 3.000 held out, bits per byte: 1.500 WARNING at step 9" in text
        and "then sft: 1 min 05 s the last time" in text
    )
    curve = [line[6:] for line in lines if line[5:6] == " " and "⠀" in line]
    assert len(curve) == (0 if height < 20 else live.CURVE_ROWS)
    if curve:
        drawn = [max((n for n, dot in enumerate(row) if dot != "⠀"), default=0) for row in curve]
        assert drawn == sorted(drawn) and abs(drawn[-1] - (width - 6) / 2) <= 1  # it falls, as far as the bar goes
        assert " 7.84 " in f" {text} " and "nan" not in text


def test_bars_of_others_progress_and_unfinished_lines(view: live.View) -> None:
    os.write(view.log, b"10%\r50%\r100%\npretrain: 5 tokens of 9 tokens, 1 s left, 3 tokens/s, loss 3.000\n\nhal")
    assert [line for line in view.lines(False) if view.take(line)] == ["100%"]
    os.write(view.log, b"f a line")
    assert view.lines(True) == ["half a line"] and view.lines(True) == []


def test_a_terminal_without_a_size_is_taken_for_a_usual_one(view: live.View, monkeypatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    view.draw()
    assert any("pretrain, 2 of 3" in line for line in view.foot) and max(map(len, view.foot)) < 80


def test_trouble_of_the_view_is_none_of_the_run(view: live.View, monkeypatch, capfd) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((80, 24)))
    view.started = None
    assert view.wait(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); exit(7)"])) == 7
    assert "the run goes on" in capfd.readouterr().err


def test_the_mean_follows_finite_values() -> None:
    mean = Mean()
    assert [mean.add(value) for value in (float("inf"), 4.0, 2.0, float("nan"))][1:] == [4.0, 3.0, 3.0]
    for _ in range(200):
        mean.add(1.0)
    assert abs(mean.value - 1.0) < 1e-3

"""The view of a running repro: what it draws, what it lets through, and that a terminal is needed for it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from athanor.cli.live import COLUMNS, View
from athanor.runtime.progress import LIVE, MARK, Progress
from tests.runtime.toy_pipeline import Toy


def drawn(view: View, width: int = 100) -> list[str]:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


def test_a_training_is_drawn_with_its_smoothed_loss_and_other_lines_pass() -> None:
    view = View()
    assert view.take("Running stage 'pretrain':")
    for step in range(1, 121):
        loss = 6.0 - step / 40
        assert not view.take(
            f"{MARK}{step / 120:.3f}{MARK}pretrain: {step} tokens of 120, 3 s left, 9/s, loss {loss:.3f}"
        )
    assert view.take("pretrain: WARNING at step 7: loss_spike") and view.take("")
    lines = drawn(view)
    assert lines[1].startswith("pretrain, ") and "120 tokens of 120, 3 s left" in lines[2]
    smoothed, curve = re.fullmatch(r"loss ([\d.]+) \(smoothed\)  (\S+)\s*", lines[3]).groups()
    assert 3.0 < float(smoothed) < 3.5 and len(curve) == COLUMNS and curve[0] == "█" and curve[-1] == "▁"
    assert max(map(len, drawn(view, 60))) <= 60
    assert view.take("Updating lock file 'dvc.lock'") and "".join(drawn(view)).strip() == ""


def test_one_value_and_equal_values_are_drawn_too() -> None:
    view = View()
    view.take("Running stage 'sft':")
    for _ in range(3):
        view.take(f"{MARK}{MARK}sft: 4 tokens, 9/s, loss 2.000")
        assert drawn(view)
    assert view.losses == [2.0] * 3


@pytest.mark.parametrize("live", [True, False])
def test_progress_is_marked_under_the_view_only(live, monkeypatch, capsys) -> None:
    monkeypatch.setenv(LIVE, "1") if live else monkeypatch.delenv(LIVE, raising=False)
    monkeypatch.setattr("time.monotonic", iter(range(0, 10_000, 40)).__next__)
    with Progress(10, "sft", "tokens") as bar:
        bar.update(5, "loss 2.000")
    said = capsys.readouterr().err
    assert said.startswith(
        f"{MARK}0.500{MARK}sft: 5 tokens of 10 tokens (50%)" if live else "sft: 5 tokens of 10 tokens (50%)"
    )


def test_a_real_run_on_a_terminal_draws_its_stage_and_ends_with_the_summary(toy: Toy) -> None:
    """Output of the stages goes through a pipe: it must all arrive, and the cursor must be back at the end."""
    main, inner = pty.openpty()
    command = [sys.executable, "-m", "athanor", "repro"]
    env = {**toy.environment(), "TERM": "xterm-256color"}
    child = subprocess.Popen(command, cwd=toy.path, env=env, stdin=subprocess.DEVNULL, stdout=inner, stderr=inner)
    os.close(inner)
    seen = b""
    try:
        while part := os.read(main, 65536):
            seen += part
    except OSError:  # how a terminal without processes ends
        pass
    os.close(main)
    text = seen.decode()
    assert child.wait(60) == 0, text
    assert "count, " in text and "count: step 4" in text and MARK not in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l") and "Stages" in text[text.rindex("\x1b[?25h") :]

"""Work beside a training takes next to nothing of a core that is wanted; about 4 s."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BUSY = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"
HUMBLE = "from athanor.runtime.machine import step_back; step_back(); "
AUTOGROUP = Path("/proc/self/autogroup")


def test_a_session_that_stepped_back_leaves_the_core_to_another():
    """With nice alone each of two sessions gets half: scoring checkpoints made a training's steps 1.35 times as long."""
    core = min(os.sched_getaffinity(0))
    processes = [
        subprocess.Popen([sys.executable, "-c", code % core], start_new_session=True) for code in (BUSY, HUMBLE + BUSY)
    ]
    try:
        time.sleep(1)  # both are past their imports
        before = [_ticks(process.pid) for process in processes]
        time.sleep(3)
        usual, humble = (_ticks(process.pid) - was for process, was in zip(processes, before, strict=True))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert usual > 0 and humble < usual / 5


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this Linux does not group processes by session")
def test_the_group_of_a_session_that_is_not_its_own_stays_as_it_is():
    """The training may be in it."""
    before = AUTOGROUP.read_text()
    subprocess.run([sys.executable, "-c", HUMBLE], check=True)
    assert AUTOGROUP.read_text() == before


def _ticks(pid: int) -> int:
    """Processor time so far; 14th and 15th field of proc(5)'s stat, after the name in parentheses."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])

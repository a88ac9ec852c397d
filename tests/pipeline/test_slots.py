"""Slots: one configuration, one directory, one process at a time."""

from __future__ import annotations

import subprocess
import sys
import time

from athanor.pipeline.slots import Slot

HOLD = """
import sys, time
from pathlib import Path
from athanor.pipeline.slots import Slot
with Slot(Path(sys.argv[1]), {"lr": 1}) as slot:
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
    slot.mark_done()
"""


def test_other_facts_are_another_slot(tmp_path):
    with Slot(tmp_path, {"lr": 1}) as one, Slot(tmp_path, {"lr": 2}) as two:
        assert one.path != two.path
        one.mark_done()
    with Slot(tmp_path, {"lr": 1}) as again, Slot(tmp_path, {"lr": 2}) as other:
        assert again.done and not other.done


def test_second_process_waits_for_the_holder_and_finds_its_work_done(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), "1.5"], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    started = time.monotonic()
    with Slot(tmp_path, {"lr": 1}) as slot:
        assert slot.done and time.monotonic() - started > 0.8
    child.wait()


def test_lock_dies_with_its_process(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), "60"], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    child.kill()
    child.wait()
    started = time.monotonic()
    with Slot(tmp_path, {"lr": 1}) as slot:
        assert not slot.done and time.monotonic() - started < 5

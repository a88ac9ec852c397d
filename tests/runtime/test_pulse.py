"""When work in the background that nobody waits for ends itself: a hang, and not a machine without a free core."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.clone import ROOT

BEGIN = """
import time
from athanor.runtime.pulse import pulse

def work(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

with pulse(1.0, lambda: False) as beat:
    begun = time.monotonic()
"""
SLOWLY = """
    while time.monotonic() - begun < 3:  # without a beat, a hundredth of a core
        work(0.002)
        time.sleep(0.2)
"""
LONG = """
    for _ in range(4):  # more processor time than it may take between two beats
        work(0.5)
        beat()
        time.sleep(0.5)
"""


@pytest.mark.parametrize(
    ("body", "status"), [(SLOWLY, 0), (LONG, 0), ("    time.sleep(600)", 1), ("    work(600)", 1)],
    ids=["little of a core", "beats", "a hang", "a loop without end"],
)  # fmt: skip
def test_only_what_hangs_is_ended(body, status):
    done = subprocess.run([sys.executable, "-c", BEGIN + body], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert ("this shipper ends" in done.stderr) == bool(status)

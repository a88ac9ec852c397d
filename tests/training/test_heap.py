"""The heap that stays, in processes of its own: what an allocator keeps, a process keeps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = """
import resource, sys, torch
from athanor.training.heap import keep_heap
if sys.argv[1] == "kept":
    assert keep_heap(64 << 20)
def work():
    for _ in range(20):
        x = torch.ones(1 << 20) * 2  # 4 MiB each
        y = torch.ones(2 << 20) * 2
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_memory_is_used_again_without_a_page_fault():
    usual = faults("usual")
    if usual < 1000:
        pytest.skip(f"this allocator keeps its memory anyway ({usual} faults)")
    assert faults("kept") < usual / 20


def test_elsewhere_it_is_left_alone(monkeypatch):
    from athanor.training import heap

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())  # another C library
    assert not heap.keep_heap(1 << 20)

"""The main path without what only Linux has; elsewhere/sitecustomize.py says what is taken away."""

from __future__ import annotations

import sys

from tests.e2e.clone import ELSEWHERE, make_clone
from tests.e2e.test_micro import lock

WANTED = ("/proc/cpuinfo", "/proc/meminfo", "/proc/self/status", "/proc/vmstat", "gnu_get_libc_version", "the sandbox")
# The battery's items of kind code have no score where nothing would confine that code.
SCORED = {"data/eval", "metrics/eval.json", "metrics/summary/eval.json", "plots/eval_battery.tsv", "models/export"}


def test_micro_is_the_same_bytes_but_for_code_that_is_not_run(micro, tmp_path):
    asked, path = tmp_path / "asked", tmp_path / "clone"
    path.mkdir()
    clone = make_clone(path)
    done = clone.run(sys.executable, "-m", "athanor", "repro", PYTHONPATH=str(ELSEWHERE), ELSEWHERE=str(asked))
    assert "no system call filter" in done.stdout + done.stderr
    assert [what for what in WANTED if what not in asked.read_text()] == []  # else nothing was taken away
    here, there = lock(micro), lock(clone)
    assert {path for path in here | there if here.get(path) != there.get(path)} <= SCORED

"""Whom the process that mends dvc.lock waits for."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGE = """
import json, pathlib, sys, time
import psutil
from athanor.runtime import dvc_lock

answer = pathlib.Path(sys.argv[1])
dvc_lock.watch(answer.parent)
own, until = psutil.Process(), time.monotonic() + 60
while not all(child.cmdline() for child in own.children()) and time.monotonic() < until:
    time.sleep(0.01)  # a process that is only just becoming another program has none
watchers = [child.cmdline()[-1] for child in own.children()]
for child in own.children():
    child.kill()
answer.with_suffix(".part").write_text(json.dumps([[above.pid for above in own.parents()], watchers]))
answer.with_suffix(".part").rename(answer)
"""


@pytest.mark.parametrize("orphan", [False, True], ids=["run by DVC", "run by a shell whose parent is gone"])
def test_watcher_waits_for_the_process_above_the_shells_and_for_nobody_where_there_is_none(tmp_path, orphan):
    answer, run_code = tmp_path / "answer.json", [sys.executable, "-c", STAGE, str(tmp_path / "answer.json")]
    # ":" keeps each shell from giving its place to the last command.
    inner = f"sleep 1; {shlex.join(run_code)}; :" if orphan else f"{shlex.join(run_code)}; :"
    line = f"sh -c {shlex.quote(inner)} >/dev/null 2>&1 &" if orphan else inner
    subprocess.run(["sh", "-c", line], cwd=ROOT, env={**os.environ, "DVC_STAGE": "pretrain"}, check=True)
    until = time.monotonic() + 120
    while not answer.exists() and time.monotonic() < until:
        time.sleep(0.05)
    above, watched = json.loads(answer.read_text())
    if orphan and above[1:] != [1]:
        pytest.skip("an orphan's parent is not process 1 here")
    assert watched == ([] if orphan else [str(os.getpid())])

"""What a command and everything it starts uses: CPU seconds, wall seconds, peak memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_SECONDS = 0.05
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Usage:
    """Bytes of resident memory are peaks: of the command's own process, and of the largest it started."""

    cpu_seconds: float  # user and system, of the command and its descendants
    wall_seconds: float
    peak_bytes: int
    worker_peak_bytes: int  # 0 without other processes
    processes: int  # other processes seen


class CommandFailed(RuntimeError):
    """The command's last lines of output are the message."""


def run(command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> Usage:
    """Run a command to its end and measure it; CommandFailed when it fails."""
    with tempfile.TemporaryFile() as output:
        started = time.monotonic()
        process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
        seen: dict[int, tuple[float, int]] = {}  # process -> its CPU seconds and peak memory so far
        over = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, seen, over))
        watcher.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            over.set()
            watcher.join()
        wall = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            tail = output.read().decode(errors="replace")[-3000:]
            raise CommandFailed(f"{' '.join(command)} ended with {process.returncode}:\n{tail}")
    others = {pid: facts for pid, facts in seen.items() if pid != process.pid}
    # The kernel counts descendants that were waited for; of others the last sample is what is known.
    sampled = sum(cpu for cpu, _ in seen.values())
    return Usage(
        cpu_seconds=max(used.ru_utime + used.ru_stime, sampled),
        wall_seconds=wall,
        peak_bytes=seen.get(process.pid, (0.0, 0))[1],
        worker_peak_bytes=max((peak for _, peak in others.values()), default=0),
        processes=len(others),
    )


def _watch(pid: int, seen: dict[int, tuple[float, int]], over: threading.Event) -> None:
    known: dict[int, psutil.Process] = {}
    while not over.wait(SAMPLE_SECONDS):
        try:
            root = known.setdefault(pid, psutil.Process(pid))
            for process in [root, *root.children(recursive=True)]:
                known.setdefault(process.pid, process)
        except psutil.Error:
            pass
        for number, process in known.items():
            try:
                times, memory = process.cpu_times(), _peak(process)
            except (psutil.Error, OSError):
                continue
            seen[number] = (times.user + times.system, max(seen.get(number, (0.0, 0))[1], memory))


def _peak(process: psutil.Process) -> int:
    """Bytes the process has held at most so far, where the kernel says so; else what it holds now.

    Not `ru_maxrss`: Linux starts a child's with what its parent held when it was forked.
    """
    status = Path(f"/proc/{process.pid}/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return process.memory_info().rss

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
    files: int  # open at once in one process, at most
    mappings: int  # of one process, at most


class CommandFailed(RuntimeError):
    """The command's last lines of output are the message."""


def run(command: Sequence[str], cwd: Path, environment: Mapping[str, str], max_files: int | None = None) -> Usage:
    """Run a command to its end, with at most `max_files` open files a process, and measure it; CommandFailed when it fails."""
    with tempfile.TemporaryFile() as output:
        started = time.monotonic()
        limited = ["bash", "-c", 'ulimit -n "$0"; exec "$@"', str(max_files), *command] if max_files else command
        process = subprocess.Popen(
            limited, cwd=cwd, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
        # process -> its CPU seconds so far, and the most bytes of memory, open files and mappings that it had
        seen: dict[int, tuple[float, int, int, int]] = {}
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
    sampled = sum(cpu for cpu, *_ in seen.values())
    return Usage(
        cpu_seconds=max(used.ru_utime + used.ru_stime, sampled),
        wall_seconds=wall,
        peak_bytes=seen.get(process.pid, (0.0, 0))[1],
        worker_peak_bytes=max((row[1] for row in others.values()), default=0),
        processes=len(others),
        files=max((row[2] for row in seen.values()), default=0),
        mappings=max((row[3] for row in seen.values()), default=0),
    )


def _watch(pid: int, seen: dict[int, tuple[float, int, int, int]], over: threading.Event) -> None:
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
                times, now = process.cpu_times(), (_peak(process), process.num_fds(), _mappings(process))
            except (psutil.Error, OSError):
                continue
            most = (max(pair) for pair in zip(seen.get(number, (0.0, 0, 0, 0))[1:], now, strict=True))
            seen[number] = (times.user + times.system, *most)


def _mappings(process: psutil.Process) -> int:
    maps = Path(f"/proc/{process.pid}/maps")
    return maps.read_bytes().count(b"\n") if maps.is_file() else 0


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

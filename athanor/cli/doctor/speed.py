"""Checks of `athanor doctor` that measure: cores for each process, clocks, the checkout's disk.

What they measured is in `--json` under `measured`, also where nothing is wrong with it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from athanor.cli.doctor.main import Checkout, Finding
from athanor.runtime.machine import cores, machine
from athanor.troubles.world import here

MIB = 2**20
PIECE_BYTES, DISK_PIECES, DISK_SECONDS = 4 * MIB, 16, 2.0
ROOM_BYTES = 2**30  # below it nothing is written to try
# A second: the default's checkpoint of 40 MB then takes four, that of 700 M parameters a quarter of an hour.
SLOW_MIB = 10.0
SKEW_SECONDS = 1.0
TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


def processors(checkout: Checkout) -> Iterator[Finding]:
    """Cores for each process of a training, by affinity and by the share that the control group allows."""
    settings, allowed = machine(), float(cores())
    share = _share(here({}, checkout.root).root)
    usable = min(allowed, share or allowed)
    processes = settings.launch.processes or max(1, len(here({"device": settings.device}, checkout.root).cards()))
    wanted = settings.threads or int(allowed)
    checkout.measured["processors"] = {"cores": int(allowed), "share": share, "processes": processes, "threads": wanted}
    if processes > usable:
        what = f"{processes} processes would train on {usable:g} cores, and each needs one at least"
        command = f"more cores, or launch: {{processes: {int(usable) or 1}}}"
        yield Finding("processors", "launch.processes", what, command)
    elif wanted > usable + 0.5:
        reason = "the control group allows no more" if share and share < allowed else "this process may use no more"
        what = f"{wanted} threads would compute on {usable:g} cores ({reason}), so they wait for each other"
        yield Finding("processors", "threads", what, f"threads: {max(1, int(usable))} in machine.yaml", note=True)


def _share(root: Path) -> float | None:
    """Cores' worth of time that the control group allows; None without a limit."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def disk(checkout: Checkout) -> Iterator[Finding]:
    """How fast the checkout's file system writes (with fsync) and reads, and whether its clock is this machine's.

    The file has no name where the system allows that, so nothing stays behind whatever happens.
    """
    room = os.statvfs(checkout.root)
    if room.f_bavail * room.f_frsize < ROOM_BYTES:
        return
    with tempfile.TemporaryFile(dir=checkout.root, prefix=".doctor.", suffix=".tmp") as file:
        measured = _disk_speed(file)
    checkout.measured["disk"] = measured
    where = str(checkout.root)
    if measured["write_mib"] < SLOW_MIB:
        what = f"writes {measured['write_mib']:.1f} MiB a second with fsync, so checkpoints and outputs take long"
        yield Finding(
            "disk-speed", where, what, "work on a local disk; athanor bench hardware times a checkpoint", note=True
        )
    if abs(measured["skew_s"]) > SKEW_SECONDS:
        what = f"its clock is {measured['skew_s']:+.1f} s from this machine's; DVC and make compare times of files"
        yield Finding(
            "clock", where, what, "set both clocks by NTP: timedatectl set-ntp true, here and on the file server"
        )
    if machine().launch.nodes > 1 and sys.platform == "linux":
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
        checkout.measured["ntp"] = state != TIME_ERROR
        if state == TIME_ERROR:
            what = "no NTP sets this machine's clock, and several machines train: their logs cannot be compared by time"
            yield Finding("clock", "this machine", what, "timedatectl set-ntp true (or chrony)", note=True)


def _disk_speed(file: IO[bytes]) -> dict[str, Any]:
    """Of 64 MiB or what two seconds allow; writing by the fastest piece, since others may use the disk now.

    skew_s: how far the time that the file got is outside of its writing.
    """
    piece, started, seconds = os.urandom(PIECE_BYTES), time.monotonic(), list[float]()
    while len(seconds) < DISK_PIECES and time.monotonic() - started < DISK_SECONDS:
        before, begun = time.time(), time.monotonic()
        file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        seconds.append(time.monotonic() - begun)
    after, stamp = time.time(), os.fstat(file.fileno()).st_mtime
    if sys.platform == "linux":  # elsewhere the page cache is measured
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    started, read = time.monotonic(), 0
    while (count := len(file.read(PIECE_BYTES))) and time.monotonic() - started < DISK_SECONDS:
        read += count
    read_seconds = time.monotonic() - started
    skew = min(0.0, stamp - before) or max(0.0, stamp - after)
    return {
        "write_mib": round(PIECE_BYTES / MIB / min(seconds), 1),
        "read_mib": round(read / MIB / max(read_seconds, 1e-9), 1),
        "skew_s": round(skew, 3),
    }

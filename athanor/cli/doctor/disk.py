"""Checks of `athanor doctor` that write something: whose clock the checkout's disk has, and how fast it keeps what it is given."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from athanor.cli.doctor.main import Checkout, Finding
from athanor.cli.render import size

CHUNK, MOST_BYTES, MOST_SECONDS = 4 << 20, 64 << 20, 2.0
SLOW_BYTES_PER_SECOND = 20e6  # a checkpoint of 100M parameters (1.2 GB) takes a minute then
MOST_SKEW = 2.0  # s; coarse file systems round to that


def _folder(root: Path) -> Path:
    return root / ".athanor" if (root / ".athanor").is_dir() else root


def clock(checkout: Checkout) -> Iterator[Finding]:
    """A file server may have another time than this machine."""
    folder = _folder(checkout.root)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()
        skew = os.fstat(file.fileno()).st_mtime - time.time()
    if abs(skew) > MOST_SKEW:
        what = f"its file system's clock is {skew:+.0f} s from this machine's, so which file is newer is misjudged"
        yield Finding("clock", str(folder), what, "sudo timedatectl set-ntp true, there and here")


def speed(checkout: Checkout) -> Iterator[Finding]:
    """Writes up to 64 MB, for two seconds at most, and removes them."""
    folder = _folder(checkout.root)
    with tempfile.TemporaryFile(dir=folder) as file:
        written, started = 0, time.perf_counter()
        while written < MOST_BYTES and time.perf_counter() - started < MOST_SECONDS:
            written += file.write(os.urandom(CHUNK))  # some file systems store zeros as nothing
            file.flush()
            os.fsync(file.fileno())
        rate = written / (time.perf_counter() - started)
    if rate < SLOW_BYTES_PER_SECOND:
        command = "another disk, or a longer save_every_seconds in machine.yaml"
        yield Finding(
            "disk",
            str(folder),
            f"keeps {size(rate)}/s of what is written, so checkpoints take long",
            command,
            note=True,
        )

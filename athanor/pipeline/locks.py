"""Locks of processes on files: they end with their process, so none goes stale."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Yields True while holding the lock of a file, made if need be; False when another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield _taken(handle)
    finally:
        os.close(handle)


def locked(path: Path) -> bool:
    """Whether a process holds the lock of a file; of one that is not there, none does."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _taken(handle)
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

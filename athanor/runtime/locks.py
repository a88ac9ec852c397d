"""Locks of processes on files: they end with their process, so none goes stale."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

TRIES = 1000  # a folder that is removed as often while one tries to lock a file in it is no race any more


def lock(path: Path, on_wait: Callable[[str], None], mode: int = 0o644) -> int:
    """Lock a file and return its handle; the folder is made if need be.

    Where another process holds it, `on_wait` is called with what the file says
    of that process, and then this one waits. A file or folder that somebody
    removed meanwhile is no lock, because others would lock the new one of that
    name; then it starts over.
    """
    for tries_left in reversed(range(TRIES)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, mode)
        except (FileNotFoundError, FileExistsError):
            if not tries_left:
                raise
            continue
        try:
            if not _acquire(handle):
                on_wait(os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown")
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_at(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    raise FileNotFoundError(f"{path} is removed all the time")


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Yields True while holding the lock of a file, made if need be; False when another process has it.

    False, too, where the file is removed meanwhile, or its folder is not there.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _acquire(handle) and _is_at(handle, path)
    finally:
        os.close(handle)


def locked(path: Path) -> bool:
    """Whether a process holds the lock of a file; False for a file that does not exist."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _acquire(handle)
    finally:
        os.close(handle)


def process_exists(pid: int) -> bool:
    """Whether there is a process with this id on this machine; it may be another one by now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _acquire(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False

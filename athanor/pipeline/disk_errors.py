"""What the operating system says about a disk, in words that name the file and what to do."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk is full as far as the quota goes",
    errno.EFBIG: "the file is larger than a limit allows (ulimit -f, or the file system)",
}
BROKEN = {
    errno.EIO: "the disk cannot be read or written here (input/output error)",
    errno.EUCLEAN: "the file system is damaged here",
    errno.ESTALE: "the file server has lost this file",
    errno.EROFS: "the file system is read-only, as Linux makes it after an error",
}


def in_words(error: OSError) -> str | None:
    """One line for an error that is the disk's fault; None for any other."""
    where = Path(error.filename if isinstance(error.filename, str) and error.filename else Path.cwd())
    if error.errno in NO_ROOM:
        there = next(path for path in (where, *where.resolve().parents) if path.exists())
        free = shutil.disk_usage(there).free / 2**20
        return f"{where}: {NO_ROOM[error.errno]} ({free:.0f} MiB free). Fix: free some space and run the same command again"
    if error.errno in BROKEN:
        fix = "see dmesg for what the kernel says, then run the same command again; python -m athanor doctor --deep finds damage"
        return f"{where}: {BROKEN[error.errno]}. Fix: {fix}"
    return None

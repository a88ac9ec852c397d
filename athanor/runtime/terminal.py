"""Messages to the user, among them the operating system's errors of disks and rights, with the file and what to do.

A message may go unread: a closed terminal, or a `| tee` that ended, is no reason to end the work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import TextIO

from athanor.runtime.redact import redact

READER_GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that was closed
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk is full as far as the quota goes",
    errno.EFBIG: "the file is larger than a limit allows (ulimit -f, or the file system)",
}
BROKEN = {
    errno.EIO: "the disk cannot be read or written here (input/output error)",
    getattr(errno, "EUCLEAN", -1): "the file system is damaged here",
    errno.ESTALE: "the file server has lost this file",
    errno.EROFS: "the file system is read-only, as Linux makes it after an error",
}


def say(text: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Show a line on standard error (or `file`), without secrets. That it cannot be written is never an error.

    Once nobody reads any more, the stream is redirected to /dev/null: bars and libraries would raise, and Python's
    last flush would turn the exit status into 120.
    """
    stream = sys.stderr if file is None else file
    try:
        print(redact(text), file=stream, end=end, flush=True)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a signal came while another line was written
        if getattr(error, "errno", None) in READER_GONE:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a process to save and end. A closed terminal is one, unless started with `nohup`."""
    return STOP if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*STOP, signal.SIGHUP)


def in_words(error: OSError) -> str | None:
    """One line for an error of the disk, of rights, or of a folder in a file's place; None for any other."""
    # A rename has two names; the first may be one of the moment. Calls on an open file have none.
    name = next((name for name in (error.filename2, error.filename) if name and isinstance(name, str)), "")
    path = Path(name) if name else Path.cwd()
    where = str(path) if name else f"a file that the system does not name, perhaps below {path}"
    existing = next(folder for folder in (path, *path.resolve().parents) if os.path.exists(folder))
    if isinstance(error, (IsADirectoryError, NotADirectoryError)):
        expected = "a folder, and a file" if isinstance(error, IsADirectoryError) else "below a file, and a folder"
        return f"{where}: is {expected} is expected here. Fix: move it away"
    if isinstance(error, PermissionError):
        owner, user = existing.stat().st_uid, os.getuid()
        what = f"belongs to user {owner}, this is user {user}" if owner != user else "is closed to its owner, too"
        fix = f"work as user {owner}, or: sudo chown -R {user} {shlex.quote(str(Path.cwd()))}"
        return f"{where}: permission denied; {existing} {what}. Fix: {fix if owner != user else f'chmod -R u+rwX {existing}'}"
    if error.errno in NO_ROOM:
        free = shutil.disk_usage(existing).free / 2**20
        return f"{where}: {NO_ROOM[error.errno]} ({free:.0f} MiB free). Fix: free some space and run the same command again"
    if error.errno in BROKEN:
        fix = "see dmesg for what the kernel says, then run the same command again; python -m athanor doctor --deep finds damage"
        return f"{where}: {BROKEN[error.errno]}. Fix: {fix}"
    return None

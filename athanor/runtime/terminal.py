"""A line for the user. Nobody has to read it: a closed terminal, or `| tee` that ended, is no reason to end the work."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from typing import TextIO

from athanor.runtime.redact import redact

GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that was closed
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def say(text: str, file: TextIO | None = None) -> None:
    """Show a line on standard error (or `file`), without secrets. That it cannot be written is never an error.

    Once nobody reads any more, the stream leads to nowhere: for bars and libraries, which do raise, and for Python's
    last flush, which would turn the exit status into 120.
    """
    stream = sys.stderr if file is None else file
    try:
        print(redact(text), file=stream, flush=True)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a signal came while another line was written
        if getattr(error, "errno", None) in GONE:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def stop_signals() -> tuple[signal.Signals, ...]:
    """What asks a process to save and end. A closed terminal does, unless `nohup` says that it does not count."""
    return STOP if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*STOP, signal.SIGHUP)

"""Work beside a training that must not slow it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def step_back() -> None:
    """Leave the cores to whoever else wants them; for a process that leads a session of its own.

    Where Linux groups processes by session (sched(7), "The autogroup feature"), nice counts inside a session only: a
    second session gets as much of a full machine as the training, whatever its nice. Measured on one core: 299 ticks
    each with nice 19, 299 to 5 with this. So the group steps back as well, unless it is somebody else's.

    Not SCHED_IDLE: beside a trainer on every core that gets a fifth of nice's share.
    """
    os.nice(19)
    if os.getpid() == os.getsid(0):
        with contextlib.suppress(OSError):  # no groups here
            Path("/proc/self/autogroup").write_text("19")

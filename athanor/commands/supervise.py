"""Running DVC, telling how a stage died, and starting it again where that helps.

A stage that says why it ends (a refused parameter, a gate, a request to stop) would say the same again, or is wanted so.
One that dies does not: the kernel killed it for want of memory, a driver or a library crashed, it hung. Its checkpoints
are whole, so another start costs the steps since the last one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from athanor.commands import side
from athanor.pipeline import dvc_lock, lifetime
from athanor.pipeline.terminal import say

RESTARTS = 3
GIB = 2**30


def repro(root: Path, call: Callable[[], int], asked: list[int], restarts: int) -> tuple[int, list[str]]:
    """`call` DVC, again while stages die, up to `restarts` times; its status, and the deaths.

    Never again once a signal has come, which is in `asked`.
    """
    told: list[str] = []
    again = 0
    lifetime.deaths(root)  # of earlier commands
    while True:
        side.mend(root)
        before = oom_kills()
        status = call()
        dvc_lock.keep(root)
        deaths = [why(stage, said, oom_kills() > before) for stage, said in lifetime.deaths(root).items()]
        if status < 0:
            deaths.append(f"dvc itself was killed (signal {-status}, {signal.strsignal(-status)})")
        told += deaths
        if not status or not deaths or asked or again == restarts:
            return status, told
        again += 1
        say(f"\n{'; '.join(deaths)}\nathanor repro --supervise: starts it again, {again} of {restarts}\n")


def why(stage: str, said: str, kernel: bool) -> str:
    """How a stage died, in words, and what to do about it."""
    if said:
        return f"{stage} died: {said.splitlines()[0]}"
    held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / GIB
    memory = f"its largest process held {held:.1f} of {memory_bytes() / GIB:.1f} GiB"
    if kernel:
        cause = "the kernel has killed a process for want of memory meanwhile"
    else:
        cause = "most often the kernel does that for want of memory (dmesg knows)"
    return f"{stage} was killed and could say nothing; {cause}; {memory}. Fix: {lifetime.LEANER}"


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 where it does not count them."""
    with contextlib.suppress(OSError, ValueError):
        rows = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(rows.get("oom_kill", 0))
    return 0


def memory_bytes() -> int:
    """The machine's memory, or what its control group may use of it."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)

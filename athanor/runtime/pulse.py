"""An end for a process in the background that nobody waits for any more."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from athanor.runtime.terminal import say


@contextlib.contextmanager
def pulse(seconds: float, wanted: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """Within the block, ends this process with status 1 when it hangs and `wanted` is false; gives a function to beat.

    It hangs after so many seconds without a beat in which it did nothing, or after as many of processor time. A machine
    without a free core may give it a hundredth of the clock's.

    For work that may end at any moment, because the next process continues it.
    """
    over, beaten = threading.Event(), threading.Event()
    threading.Thread(target=_watch, args=(seconds, wanted, over, beaten), name="pulse", daemon=True).start()
    try:
        yield beaten.set
    finally:
        over.set()


def _watch(seconds: float, wanted: Callable[[], bool], over: threading.Event, beaten: threading.Event) -> None:
    look, idle = min(1.0, seconds / 4), 0.0  # in looks: the clock also counts while this thread waits for a core
    at_beat = at_work = time.process_time()
    while idle < seconds and at_work - at_beat < seconds:
        if over.wait(look):
            return
        idle, worked = idle + look, time.process_time() - time.thread_time()  # of the other threads
        if beaten.is_set() or wanted():
            beaten.clear()
            idle, at_beat = 0.0, worked
        if worked - at_work > seconds / 1000:
            idle, at_work = 0.0, worked
    say(f"nothing was delivered for {seconds:.0f} s, and no stage runs: this shipper ends, and the next one continues")
    os._exit(1)

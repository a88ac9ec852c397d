"""An end for a process in the background that nobody waits for any more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from athanor.runtime.terminal import say


class Pulse:
    """Within the block, ends this process with status 1 when it hangs and `wanted` is false.

    It hangs after so many seconds without a beat in which it did nothing, or after as many of processor time. A machine
    without a free core may give it a hundredth of the clock's.

    For work that may end at any moment, because the next process continues it.
    """

    def __init__(self, seconds: float, wanted: Callable[[], bool]) -> None:
        self.seconds, self.wanted, self._over, self._beaten = seconds, wanted, threading.Event(), False

    def __enter__(self) -> Pulse:
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def beat(self) -> None:
        self._beaten = True

    def _watch(self) -> None:
        look = min(1.0, self.seconds / 4)
        at_beat = at_work = time.process_time()
        idle = 0.0  # in looks: the clock also counts while this thread waits for a core
        while idle < self.seconds and at_work - at_beat < self.seconds:
            if self._over.wait(look):
                return
            idle, worked = idle + look, time.process_time() - time.thread_time()  # of the other threads
            if self._beaten or self.wanted():
                self._beaten, idle, at_beat = False, 0.0, worked
            if worked - at_work > self.seconds / 1000:
                idle, at_work = 0.0, worked
        say(
            f"nothing was delivered for {self.seconds:.0f} s, and no stage runs: this shipper ends, and the next one continues"
        )
        os._exit(1)

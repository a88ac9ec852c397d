"""An end for a process in the background that nobody waits for any more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from athanor.runtime.terminal import say


class Pulse:
    """Within the block, ends this process with status 1 when there is no beat for so many seconds and `wanted` is false.

    For work that may end at any moment, because the next process continues it.
    """

    def __init__(self, seconds: float, wanted: Callable[[], bool]) -> None:
        self.seconds, self.wanted, self._over = seconds, wanted, threading.Event()

    def __enter__(self) -> Pulse:
        self.beat()
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def beat(self) -> None:
        self._last = time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() - self._last < self.seconds:
            if self._over.wait(min(1.0, self.seconds / 4)):
                return
            if self.wanted():
                self.beat()
        say(
            f"nothing was delivered for {self.seconds:.0f} s, and no stage runs: this shipper ends, and the next one continues"
        )
        os._exit(1)

"""Work on shards in processes of this machine: joblib's loky.

loky itself and not joblib.Parallel, which gives the caller no turn between two
results: a stop would wait for a whole shard.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, wait

from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.process_executor import BrokenProcessPool

from athanor.pipeline.executor import KILLS, ONE_THREAD, POLL, Answers, killed, run_call


def in_processes(calls: Mapping[str, str], workers: int) -> Answers:
    """After one was killed the others start anew, half as many, with what is left."""
    left, kills = dict(calls), 0
    while left:
        workers = min(workers, len(left))
        pool = get_reusable_executor(workers, initializer=enter_worker, initargs=(os.getpid(),), env=ONE_THREAD)
        waiting, running = iter(list(left)), {}
        try:
            while True:
                for name in (name for name, _ in zip(waiting, range(2 * workers - len(running)), strict=False)):
                    running[pool.submit(run_call, left[name])] = name
                if not running:
                    break
                ended, _ = wait(running, timeout=POLL, return_when=FIRST_COMPLETED)
                for future in ended:
                    answer = future.result()
                    kills = 0
                    name = running.pop(future)
                    del left[name]
                    yield name, answer
                if not ended:
                    yield None
        except BrokenProcessPool:
            yield None  # a stop that came meanwhile wins
            kills += 1
            if kills >= KILLS:
                raise killed(f"with {workers} workers, {len(left)} shards are left") from None
            workers = max(1, workers // 2)
        except BaseException:
            pool.shutdown(wait=True, kill_workers=True)
            raise


def enter_worker(parent: int) -> None:
    """In a new worker: leave signals to the coordinator, and end soon after it, however it ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs started from here would inherit
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    os._exit(1)

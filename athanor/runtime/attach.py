"""A file for a run that has ended: kept in its journal, and delivered with it once more.

Delivering a run again changes nothing that has arrived, so the shipper is only
told that the run is not closed, as if it had been interrupted before the end.
"""

from __future__ import annotations

import time
from pathlib import Path

from athanor.base.artifacts import write_bytes, write_json
from athanor.base.errors import InputError
from athanor.runtime.locks import try_lock
from athanor.runtime.ship import LOCK_SECONDS, start_detached
from athanor.runtime.store import delivery


def attach_later(root: Path, run: str, name: str, data: bytes) -> bool:
    """Keep a small file with a run of the checkout `root`, and have it shipped; False where there is no such run.

    Waits for a shipper at work, because only one process may write down what was delivered.
    """
    folder = root / ".athanor" / "runs" / run
    if not (folder / "meta.json").is_file():
        return False
    write_bytes(folder / "files" / name, data)
    lock, deadline = root / ".athanor" / "ship.lock", time.monotonic() + LOCK_SECONDS
    while True:
        with try_lock(lock) as free:
            if free:
                state = delivery(folder)
                if state.get("closed"):
                    write_json(folder / "ship.json", {**state, "closed": False})
                break
        if time.monotonic() > deadline:
            raise InputError("a shipper is at work", where=str(lock), fix="run it again when it is done")
        time.sleep(0.2)
    start_detached(root)
    return True

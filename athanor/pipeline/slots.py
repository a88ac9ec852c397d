"""Checkpoint slots: where a long stage keeps its progress, outside DVC's outputs.

DVC deletes a stage's outputs before it runs, so checkpoints cannot live there.
A slot is a directory named by the fingerprint of everything that decides the
result (params, input digests, code). Another configuration is another slot, so
a stale checkpoint cannot be picked up, and going back to a configuration finds
its progress again.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from athanor.artifacts import digest, write_json, write_text
from athanor.pipeline.redact import redact

DONE, PINNED = "DONE", "PINNED"


class Slot:
    """One slot, locked for this process while the `with` block runs, or with `held` until `release`.

    Entering waits for another holder: when `dvc` was killed and its stage
    still trains, the next `dvc repro` joins the live run instead of starting a
    second one. flock dies with its process, so no lock goes stale.
    """

    def __init__(
        self,
        folder: Path,
        facts: dict[str, Any],
        on_enter: Callable[[Slot], None] | None = None,
        *,
        pinned: bool = False,
        held: bool = False,
    ) -> None:
        self.fingerprint = digest(facts)[:16]
        self.on_enter, self.pinned, self.held = on_enter, pinned, held
        self.path = folder / self.fingerprint
        self.facts = facts
        self._lock: int | None = None

    def __enter__(self) -> Slot:
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            print(
                f"process {holder} is already working on this configuration; waiting for it ({self.path})",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(handle, fcntl.LOCK_EX)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._lock = handle
        try:
            self._prepare()
        except BaseException:
            self.release()
            raise
        return self

    def _prepare(self) -> None:
        if not (self.path / "facts.json").is_file():
            if self.pinned:
                write_text(self.path / PINNED, "")
            write_json(self.path / "facts.json", redact(self.facts))
        if self.on_enter is not None:
            self.on_enter(self)

    def __exit__(self, *_: object) -> None:
        if not self.held:
            self.release()

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def done(self) -> bool:
        """True when the work finished earlier; its result is in `path` and only has to be emitted again."""
        return (self.path / DONE).is_file()

    def mark_done(self) -> None:
        write_text(self.path / DONE, "")

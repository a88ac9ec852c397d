"""Checkpoint slots: where a long stage keeps its progress, outside DVC's outputs.

DVC deletes a stage's outputs before it runs, so checkpoints cannot live there.
A slot is a directory named by the fingerprint of the parameters and inputs
that decide the result. Another configuration is another slot, so a stale
checkpoint cannot be picked up, and going back to a configuration finds its
progress again.

Code is no part of the name: the correction of an error must not cost the weeks
before it. What each file of the code was stands in the slot (`code.json`).
Where it differs now, the slot begins anew when it is finished or holds little
work; else the stage stops and asks: `athanor slots adopt`, or `drop`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from athanor.base.artifacts import digest, read_json, write_json, write_text
from athanor.base.errors import InputError
from athanor.runtime.closure import digest_of
from athanor.runtime.facts import flatten
from athanor.runtime.locks import lock
from athanor.runtime.progress import duration
from athanor.runtime.redact import redact
from athanor.runtime.terminal import say

DONE, PINNED, FACTS, CODE, SECONDS = "DONE", "PINNED", "facts.json", "code.json", "seconds"
LITTLE_SECONDS = 600.0  # of work; less than this is done again without a question
NAMES_SHOWN = 6
_PRESERVED = frozenset(("lock", "choices.json"))  # the choices for a machine may be there before the slot is entered
_NO_WORK = _PRESERVED | {DONE, PINNED, FACTS, CODE, SECONDS, "run.json"}


@dataclass(frozen=True)
class Code:
    """The files of a module and of what it imports, each with the digest of its syntax tree."""

    module: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return digest_of(self.files)


@dataclass(frozen=True)
class Record:
    """The code that worked in a slot. `code`: the last; `digests`: all, in order; `refused`: one that had to ask."""

    code: Code
    digests: tuple[str, ...]
    refused: Code | None = None

    @classmethod
    def read(cls, path: Path) -> Record:
        if not (path / CODE).is_file():  # removed by hand: nobody knows
            return cls(Code(), ("unknown",))
        content = read_json(path / CODE)
        refused = content["refused"] and Code(**content["refused"])
        return cls(Code(content["module"], content["files"]), tuple(content["digests"]), refused)

    def write(self, path: Path) -> None:
        refused = self.refused and vars(self.refused)
        write_json(path / CODE, {**vars(self.code), "digests": self.digests, "refused": refused})

    def changed(self, now: Code) -> str:
        """The files that differ, as a list for people."""
        names = sorted(n for n in {**self.code.files, **now.files} if self.code.files.get(n) != now.files.get(n))
        more = [f"{len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
        return ", ".join(names[:NAMES_SHOWN] + more)


class Slot:
    """One slot, locked for this process while the `with` block runs, or with `held` until `release`.

    Entering waits for another holder: when `dvc` was killed and its stage
    still trains, the next `dvc repro` joins the live run instead of starting a
    second one. flock dies with its process, so no lock goes stale.

    `shared`: other runs build upon what is in it, so that other code has to
    ask even where it is done. `before_done` may refuse to call the work done.
    """

    def __init__(
        self,
        folder: Path,
        facts: dict[str, Any],
        on_enter: Callable[[Slot], None] | None = None,
        *,
        code: Code = Code(),
        pinned: bool = False,
        held: bool = False,
        shared: bool = False,
        note: Callable[[str], None] = say,
        before_done: Callable[[], None] = lambda: None,
    ) -> None:
        self.fingerprint = digest(facts)[:16]
        self.on_enter, self.pinned, self.held = on_enter, pinned, held
        self.path = folder / self.fingerprint
        self.facts, self.code = facts, code
        self.digests: tuple[str, ...] = ()
        self._shared, self._note, self._before_done = shared, note, before_done
        self._lock: int | None = None
        self._entered = self._written = self._seconds = 0.0

    @property
    def identity(self) -> str:
        """What is the same in all processes that work on one thing: the slot's name and the code."""
        return f"{self.fingerprint}-{self.code.digest[:16]}"

    def __enter__(self) -> Slot:
        handle = lock(self.path / "lock", self._say_waiting)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._lock = handle
        try:
            note = self._prepare()
            self.digests = Record.read(self.path).digests
            self._entered = self._written = time.monotonic()
            known = seconds(self.path)
            self._seconds = LITTLE_SECONDS if known is None else known
            if self.on_enter is not None:
                self.on_enter(self)
            if note:
                self._note(note)
        except BaseException:
            self.release()
            raise
        return self

    def _say_waiting(self, holder: str) -> None:
        say(f"process {holder} is already working on this configuration; waiting for it ({self.path})")

    def _prepare(self) -> str:
        """Begin the slot, or see whether this code may go on in it; returns what is worth saying."""
        if not (self.path / FACTS).is_file():
            self._begin()
            return ""
        record = Record.read(self.path)
        if record.code.files == self.code.files:
            if record.refused:
                Record(record.code, record.digests).write(self.path)
            return ""
        refusal = question(self.path, self.code, self._shared)
        if refusal:
            Record(record.code, record.digests, self.code).write(self.path)
            # The parts of one work (the sources of a download) are adopted together.
            name = "" if self._shared and not self.pinned else f" {self.fingerprint[:8]}"
            raise InputError(
                refusal,
                where=str(self.path),
                fix=f"`athanor slots adopt{name}` goes on there with the new code, and the result's manifest says so; "
                f"`athanor slots drop{name}` begins anew; or undo the change",
            )
        work = "the finished work" if self.done and not self._shared else contents(self.path)
        seconds_spent = seconds(self.path) or 0.0
        self._begin()
        message = (
            f"begins anew: {work}, {duration(seconds_spent)} of work, was done by other code; changed since then: "
        )
        return work and message + record.changed(self.code)

    def _begin(self) -> None:
        """Make an empty slot. The facts come last and go first: killed in between, it is begun once more."""
        (self.path / FACTS).unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in _PRESERVED:
                path.unlink(missing_ok=True)
        if self.pinned:
            write_text(self.path / PINNED, "")
        write_text(self.path / SECONDS, "0")
        Record(self.code, (self.code.digest,)).write(self.path)
        write_json(self.path / FACTS, redact(self.facts))

    def tick(self, now: float | None = None) -> None:
        """Write down the time worked in this slot; cheap, to be called often. In place, because it need not be exact."""
        now = time.monotonic() if now is None else now
        if self._lock is None or now - self._written < 1.0:
            return
        self._written = now
        with contextlib.suppress(OSError):
            handle = os.open(self.path / SECONDS, os.O_WRONLY)
            try:
                os.pwrite(handle, f"{self._seconds + now - self._entered:012.1f}".encode(), 0)
            finally:
                os.close(handle)

    def __exit__(self, *_: object) -> None:
        if not self.held:
            self.release()

    def release(self) -> None:
        if self._lock is not None:
            if self._entered:
                self.tick()
            os.close(self._lock)
            self._lock = None

    @property
    def done(self) -> bool:
        """True when the work finished earlier; its result is in `path` and only has to be emitted again."""
        return (self.path / DONE).is_file()

    def mark_done(self) -> None:
        self._before_done()
        write_text(self.path / DONE, "")


def seconds(path: Path) -> float | None:
    """The seconds worked in a slot; None where they cannot be read (after a power loss)."""
    try:
        return float((path / SECONDS).read_text())
    except (OSError, ValueError):
        return None


def question(path: Path, code: Code, shared: bool) -> str:
    """The question before this code goes on in a slot of other code; "" where it needs none, or begins anew."""
    record, seconds_spent = Record.read(path), seconds(path)
    protected = shared or (path / PINNED).is_file()
    if record.code.files == code.files or (not protected and (path / DONE).is_file()):
        return ""
    work = contents(path)
    if not work or (seconds_spent is not None and seconds_spent < LITTLE_SECONDS):
        return ""
    time_spent = "an unknown time" if seconds_spent is None else duration(seconds_spent)
    changed = record.changed(code)
    return f"was worked on by other code, of which changed since then: {changed}. It holds {work}, {time_spent} of work"


def steps(path: Path) -> Iterator[int]:
    """The steps of a slot's checkpoints, those from further back included."""
    for _, folders, _ in os.walk(path):
        yield from (int(name[5:]) for name in folders if name.startswith("step_") and name[5:].isdigit())


def contents(path: Path) -> str:
    """The work in a slot, in words; "" where there is none."""
    step = max(steps(path), default=None)
    files = [file for top in path.iterdir() if top.name[0] != "." and top.name not in _NO_WORK for file in _files(top)]
    if step == 0 or not files:
        return ""
    if step is None:
        return f"{len(files):,} file{'s' * (len(files) > 1)} of {sum(map(os.path.getsize, files)) / 1e6:,.1f} MB"
    batch = next((value for name, value in flatten(read_json(path / FACTS)) if name.endswith("batch_tokens")), None)
    return f"{step:,} steps" + (f" ({step * batch:,} tokens)" if batch else "")


def _files(top: Path) -> list[Path]:
    return [file for file in (top, *top.rglob("*")) if file.is_file()]

"""Who is at work in a checkout: the process table as `athanor doctor` needs it.

The question is always whether something on disk may belong to a process that
lives. When that cannot be told (another user's process, another container),
the answer is yes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from athanor.cli.slots import busy

# Commands that only read: they may stay open for days and own nothing that a crash leaves behind.
READERS = ("ui", "chat", "doctor", "slots", "summary", "compare", "plan")


@dataclass(frozen=True)
class Process:
    pid: int
    started: float
    folder: Path | None  # None: not readable
    words: tuple[str, ...] | None
    user: int = -1

    @property
    def dvc(self) -> bool:
        return self.words is None or any(
            word == "dvc" or word.endswith(("/dvc", "/dvc/__main__.py", "\\dvc.exe")) for word in self.words
        )

    @property
    def git(self) -> bool:
        return self.words is not None and os.path.basename(self.words[0]).startswith("git")

    @property
    def writes(self) -> bool:
        """Whether it may be making files in a checkout: DVC, Git, a stage, one of its workers, an athanor command."""
        if self.words is None or self.dvc or self.git:
            return True
        if any(word.startswith("stages.") or "multiprocessing.spawn" in word for word in self.words):
            return True
        ours = [i for i, word in enumerate(self.words) if os.path.basename(word) == "athanor"]
        if ours:
            return self.words[ours[0] + 1 : ours[0] + 2] not in [(name,) for name in READERS]
        return any(word.startswith("athanor.") for word in self.words)

    def is_below(self, folder: Path) -> bool:
        return self.folder is not None and (self.folder == folder or folder in self.folder.parents)


@dataclass(frozen=True)
class Checkout:
    """A checkout and the processes that may be writing to it.

    unseen: slots whose lock is held by no process of this table. Their holder
    runs in another container, so the table cannot be trusted to show everyone.
    """

    root: Path
    workers: tuple[Process, ...]
    unseen: tuple[Path, ...]

    @property
    def dvc(self) -> tuple[Process, ...]:
        return tuple(process for process in self.workers if process.dvc)

    @property
    def trusted(self) -> bool:
        return not self.unseen

    def below(self, folder: Path) -> list[Process]:
        return [process for process in self.workers if process.is_below(folder)]

    def owned(self, path: Path) -> bool:
        """Whether a living process may have made this: one that was there when it was last written."""
        stat = path.lstat()
        written = max(stat.st_mtime, stat.st_ctime)
        return not self.trusted or any(process.started <= written + 1 for process in self.workers)


def table() -> list[Process]:
    """Every living process but this one and those that called it. One that is dead but not reaped does not live."""
    me = psutil.Process()
    mine = {me.pid, *(parent.pid for parent in me.parents())}
    found = []
    for process in psutil.process_iter(["pid", "create_time", "cwd", "cmdline", "status", "uids"]):
        info = process.info
        if info["pid"] in mine or info["status"] == psutil.STATUS_ZOMBIE:
            continue
        folder, words = Path(info["cwd"]) if info["cwd"] else None, tuple(info["cmdline"] or ()) or None
        user = info["uids"].effective if info["uids"] else -1
        found.append(Process(info["pid"], info["create_time"] or 0.0, folder, words, user))
    return found


def look(root: Path) -> Checkout:
    root = root.resolve()
    stat = root.stat()
    shared = bool(stat.st_mode & 0o022)
    workers = []
    for process in table():
        # Where another user's process works is hidden: DVC or a stage of one who could write here counts,
        # root in a container for instance. Git is everywhere, and over in a moment.
        hidden = process.folder is None and process.words is not None and not process.git
        could = shared or process.user in (-1, 0, stat.st_uid)
        if process.writes and (process.is_below(root) or hidden and could):
            workers.append(process)
    pids = {process.pid for process in workers}
    slots = [path for path in (root / ".athanor" / "slots").glob("*/[!.]*") if path.is_dir() and busy(path)]
    return Checkout(root, tuple(workers), tuple(path for path in slots if holder(path) not in pids))


def holder(slot: Path) -> int:
    """The process that a slot's lock names, 0 when it names none."""
    text = (slot / "lock").read_text(errors="replace").strip()
    return int(text) if text.isdigit() else 0


def author(pid: int, command: str) -> str:
    """What became of the process that wrote its pid and command line into a lock: lives, ended or reused."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return "ended"
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return "ended"
    except psutil.AccessDenied:
        return "lives"
    tail = command.split()[1:]
    same = bool(tail) and words[-len(tail) :] == tail
    # Anything that looks like DVC counts as the author: its lock ends with it.
    return "lives" if same or Process(pid, 0.0, None, tuple(words)).dvc and words else "reused"

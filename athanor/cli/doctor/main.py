"""What crashes left behind, and the command that repairs it.

    python -m athanor doctor [--fix] [--deep] [--json]

Works from files and the process table: it takes no lock that DVC waits for,
imports nothing of DVC and starts no DVC command, so that it can be asked while
a stage trains and when DVC itself is broken. `--fix` repairs what is safe: it
never deletes a result, a journal or a slot, and touches nothing that a living
process may own. `--deep` also hashes every file that dvc.lock names, in the
workspace and in the cache; with `--fix` the damaged ones go, and DVC makes them again.

Exit status: 0 healthy, 1 a problem is left.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from athanor.base.errors import AthanorError, InputError
from athanor.cli.slots import busy
from athanor.runtime.machine import anchor
from athanor.runtime.terminal import in_words

FIX = "python -m athanor doctor --fix"


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    kind: a stable word for scripts. command: what repairs it.
    repair: does so and returns what it did, given only when that is safe now.
    note: worth knowing, but nothing is wrong.
    """

    kind: str
    where: str
    what: str
    command: str = FIX
    repair: Callable[[], str] | None = None
    note: bool = False
    fixed: str | None = None

    def __str__(self) -> str:
        if self.fixed is not None:
            return f"fixed    {self.where}: {self.what}. Done: {self.fixed}"
        return f"{'note   ' if self.note else 'problem'}  {self.where}: {self.what}. Fix: {self.command}"


def examine(root: Path, deep: bool = False) -> tuple[list[Finding], dict[str, Any]]:
    """Every finding in the checkout at `root`, and what was measured; a check that cannot be made is a finding, too."""
    from athanor.cli.doctor import checks, files, peers, places, queue, speed

    # Before the processes are listed: what has no living owner by then never gets one.
    unpublished = files.unpublished_writes(root)
    checkout = inspect_checkout(root)
    rules: dict[str, Callable[[Checkout], Iterable[Finding]]] = {
        "task": queue.killed,  # first: a worker that starts from now on is not in the list of processes
        "git": places.repository,
        "name": places.names,
        "programs": places.programs,
        "experiments": places.experiments,
        "process": checks.unseen,
        "lock": checks.locks,
        "record": checks.torn_records,
        "head": files.experiment,
        "temp-dir": files.temp_dirs,
        "leftover": lambda checkout: files.leftovers(checkout, unpublished),
        "journal": checks.journals,
        "store": checks.store,
        "untracked": checks.untracked,
        "experiment": checks.experiments,
        "remote": checks.data,
        "queue": queue.same_name,
        "space": checks.space,
        "profile": lambda checkout: checks.hardware_profile(root),
        "trouble": checks.machine_troubles,
        "cards": peers.cards,
        "llama.cpp": checks.llama_cpp,
        "processors": speed.processors,
        "disk-speed": speed.disk,
        **({"cache": files.damaged} if deep else {}),
    }
    findings: list[Finding] = []
    for kind, check in rules.items():
        try:
            findings += check(checkout)
        except (OSError, ValueError, KeyError, TypeError, sqlite3.Error, AthanorError) as error:
            what = f"could not be checked: {type(error).__name__}: {error}".replace("\n", " ")
            words = in_words(error) if isinstance(error, OSError) else None
            what, _, command = (words or f"{what}. Fix: mend that file, then ask again").partition(". Fix: ")
            findings.append(Finding(kind, str(root), what, command))
    return findings, checkout.measured


def fix(findings: Iterable[Finding]) -> list[Finding]:
    """Repair what can safely be repaired; returns the findings, with what was done in `fixed`."""
    done = []
    for finding in findings:
        if finding.repair is not None:
            try:
                finding = dataclasses.replace(finding, fixed=finding.repair())
            except (OSError, AthanorError) as error:
                finding = dataclasses.replace(finding, what=f"{finding.what} (the repair failed: {error})")
        done.append(finding)
    return done


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fix", action="store_true", help="repair what is safe")
    explanation = "also hash all that dvc.lock names, in the workspace and in the cache"
    parser.add_argument("--deep", action="store_true", help=explanation)
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(args: argparse.Namespace) -> int:
    root = anchor()
    if not (root / "dvc.yaml").is_file():
        raise InputError("no dvc.yaml here", where=str(root), fix="run it in the checkout")
    findings, measured = examine(root, args.deep)
    if args.fix:
        findings = fix(findings)
    problems = [finding for finding in findings if finding.fixed is None and not finding.note]
    if args.json:
        fields = ("kind", "where", "what", "command", "note", "fixed")
        rows = [{name: getattr(finding, name) for name in fields} for finding in findings]
        print(json.dumps({"healthy": not problems, "findings": rows, "measured": measured}, indent=2))
    else:
        for finding in findings:
            print(finding)
        print(f"problems: {len(problems)}" if problems else "healthy")
    return 1 if problems else 0


# -- who is at work in a checkout -----------------------------------------------------------------------------------------

# The question is always whether something on disk may belong to a process that lives. When that cannot be told (another
# user's process, another container), the answer is yes.

# Commands that only read: they may stay open for days and own nothing that a crash leaves behind.
READERS = ("ui", "chat", "doctor", "slots", "summary", "compare", "plan")


@dataclass(frozen=True)
class Process:
    pid: int
    started: float
    folder: Path | None  # None: not readable
    arguments: tuple[str, ...] | None

    @property
    def dvc(self) -> bool:
        return self.arguments is None or any(
            word == "dvc" or word.endswith(("/dvc", "/dvc/__main__.py", "\\dvc.exe")) for word in self.arguments
        )

    @property
    def git(self) -> bool:
        return self.arguments is not None and os.path.basename(self.arguments[0]).startswith("git")

    @property
    def writes(self) -> bool:
        """Whether it may be making files in a checkout: DVC, Git, a stage, one of its workers, an athanor command."""
        if self.arguments is None or self.dvc or self.git:
            return True
        if any(word.startswith("stages.") or "multiprocessing.spawn" in word for word in self.arguments):
            return True
        positions = [i for i, word in enumerate(self.arguments) if os.path.basename(word) == "athanor"]
        if positions:
            return self.arguments[positions[0] + 1 : positions[0] + 2] not in [(name,) for name in READERS]
        return any(word.startswith("athanor.") for word in self.arguments)

    def is_below(self, folder: Path) -> bool:
        return self.folder is not None and (self.folder == folder or folder in self.folder.parents)


@dataclass(frozen=True)
class Checkout:
    """A checkout and the processes that may be writing to it.

    unseen: slots whose lock is held by no process of this table. Their holder
    runs in another container, so the table cannot be trusted to show everyone.
    measured: numbers of the machine, filled by the checks that take them.
    """

    root: Path
    workers: tuple[Process, ...]
    unseen: tuple[Path, ...]
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def dvc(self) -> tuple[Process, ...]:
        return tuple(process for process in self.workers if process.dvc)

    @property
    def trusted(self) -> bool:
        return not self.unseen

    def processes_below(self, folder: Path) -> list[Process]:
        return [process for process in self.workers if process.is_below(folder)]

    def abandoned(self, folder: Path) -> bool:
        """Whether no living process works in an experiment's checkout, or for it: DVC's own stands elsewhere."""
        return self.trusted and not (self.processes_below(folder) or self.dvc and self.may_be_owned(folder))

    def may_be_owned(self, path: Path) -> bool:
        """Whether a living process may have made this: one that was there when it was last written."""
        stat = path.lstat()
        written = max(stat.st_mtime, stat.st_ctime)
        return not self.trusted or any(process.started <= written + 1 for process in self.workers)


def inspect_checkout(root: Path) -> Checkout:
    """The checkout with the living processes that may write in it, other than this one and its ancestors."""
    root = root.resolve()
    stat, this_process = root.stat(), psutil.Process()
    shared = bool(stat.st_mode & 0o022)
    own_pids = {this_process.pid, *(parent.pid for parent in this_process.parents())}
    workers = []
    for entry in psutil.process_iter(["pid", "create_time", "cwd", "cmdline", "status", "uids"]):
        info = entry.info
        if info["pid"] in own_pids or info["status"] == psutil.STATUS_ZOMBIE:  # dead, but not reaped
            continue
        folder, arguments = Path(info["cwd"]) if info["cwd"] else None, tuple(info["cmdline"] or ()) or None
        process = Process(info["pid"], info["create_time"] or 0.0, folder, arguments)
        # Where another user's process works is hidden: DVC or a stage of one who could write here counts,
        # root in a container for instance. Git is everywhere, and over in a moment.
        hidden = folder is None and arguments is not None and not process.git
        may_write_here = shared or not info["uids"] or info["uids"].effective in (0, stat.st_uid)
        if process.writes and (process.is_below(root) or hidden and may_write_here):
            workers.append(process)
    pids = {process.pid for process in workers}
    slots = [path for path in (root / ".athanor" / "slots").glob("*/[!.]*") if path.is_dir() and busy(path)]
    return Checkout(root, tuple(workers), tuple(path for path in slots if lock_pid(path) not in pids))


def lock_pid(slot: Path) -> int:
    """The process that a slot's lock names, 0 when it names none."""
    text = (slot / "lock").read_text(errors="replace").strip()
    return int(text) if text.isdigit() else 0


def lock_author_state(pid: int, command: str) -> str:
    """What became of the process that wrote its pid and command line into a lock: lives, ended or reused."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return "ended"
        arguments = process.cmdline()
    except psutil.NoSuchProcess:
        return "ended"
    except psutil.AccessDenied:
        return "lives"
    tail = command.split()[1:]
    same = bool(tail) and arguments[-len(tail) :] == tail
    # Anything that looks like DVC counts as the author: its lock ends with it.
    return "lives" if same or Process(pid, 0.0, None, tuple(arguments)).dvc and arguments else "reused"

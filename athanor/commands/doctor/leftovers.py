"""Checks of `athanor doctor` on what killed processes left behind: halves of writes, experiments, their checkouts."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from athanor.artifacts import OLD, read_json
from athanor.commands import slots
from athanor.commands.doctor.main import FIX, Finding
from athanor.commands.doctor.processes import Checkout
from athanor.pipeline.facts import git

SCRAP_FOLDERS = ("data", "models", "metrics", "plots", ".athanor")
# DVC removes these refs when an experiment ends. EXEC_HEAD it leaves; queued experiments have refs of their own.
ACTIVE = ("refs/exps/exec/EXEC_BASELINE", "refs/exps/exec/EXEC_MERGE", "refs/exps/exec/EXEC_BRANCH", "refs/exps/stash")


def scraps(root: Path) -> list[Path]:
    """Temporary names of atomic writes (athanor.artifacts) that were never published."""
    found = [path for path in root.glob(".*.tmp") if path.is_file()]
    for top in SCRAP_FOLDERS:
        for folder, folders, names in os.walk(root / top):
            found += [Path(folder, name) for name in (*folders, *names) if _scrap(name)]
            folders[:] = [name for name in folders if not _scrap(name)]
    return found


def _scrap(name: str) -> bool:
    return name.startswith(".") and name.endswith((".tmp", OLD))


def leftovers(checkout: Checkout, found: list[Path]) -> Iterator[Finding]:
    for path in found:
        with contextlib.suppress(FileNotFoundError):  # finished in the meantime
            if not checkout.owned(path):
                size = slots.size(_bytes(path))
                where = path.relative_to(checkout.root).as_posix()
                what, repair = f"{size} of an unfinished write; its process has ended", _remove
                if path.name.endswith(OLD) and not _replaced(path).exists():
                    what, repair = f"the former {_replaced(path).name}, whose replacement was killed", _put_back
                yield Finding("leftover", where, what, FIX, lambda path=path, size=size, do=repair: do(path, size))


def _replaced(old: Path) -> Path:
    """What stood aside as `.NAME.*.old` while it was replaced (athanor.artifacts.new_dir)."""
    return old.with_name(old.name[1:].rsplit(".", 2)[0])


def _put_back(path: Path, size: str) -> str:
    if _replaced(path).exists():
        return _remove(path, size)
    path.rename(_replaced(path))
    return f"{_replaced(path).name} is back, {size}"


def _bytes(path: Path) -> int:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files)


def _remove(path: Path, size: str) -> str:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return f"removed, {size} freed"


def experiment(checkout: Checkout) -> Iterator[Finding]:
    """A detached HEAD and refs that a killed `dvc exp run` left in Git. Git commands put them right, not we."""
    listed = git(checkout.root, "for-each-ref", "--format=%(refname)", "refs/exps").split()
    refs = [name for name in listed if name in ACTIVE or name.startswith("refs/exps/temp/")]
    if checkout.dvc or not refs:
        return
    commands = [f"git update-ref -d {name}" for name in refs]
    detached = not git(checkout.root, "symbolic-ref", "-q", "HEAD")
    if detached:
        branch = git(checkout.root, "rev-parse", "-q", "--symbolic-full-name", "@{-1}") or "refs/heads/BRANCH"
        commands = [f"git symbolic-ref HEAD {branch}", "git reset -q", *commands]
    what = f"{'HEAD detached, and ' if detached else ''}{len(refs)} refs left, by a killed experiment"
    command = " && ".join(commands) + " (docs/outages.md, Killed experiments, says what each keeps)"
    yield Finding("head", "HEAD" if detached else refs[0], what, command)


def temp_dirs(checkout: Checkout) -> Iterator[Finding]:
    """Checkouts of --temp and queued experiments that no process works in."""
    exps = checkout.root / ".dvc" / "tmp" / "exps"
    for folder in sorted((*exps.glob("tmp*"), *(exps / "standalone").glob("tmp*"))):
        # While DVC prepares one or collects from it, its own process stands elsewhere.
        setting_up = checkout.dvc and checkout.owned(folder)
        if not folder.is_dir() or not checkout.trusted or checkout.below(folder) or setting_up:
            continue
        size = slots.size(_bytes(folder))
        what = f"checkout of a killed experiment, {size}; its slot is kept elsewhere"
        where = folder.relative_to(checkout.root).as_posix()
        yield Finding("temp-dir", where, what, FIX, lambda f=folder, s=size: _remove_checkout(exps, f, s))


def _remove_checkout(exps: Path, folder: Path, size: str) -> str:
    for info in exps.glob("standalone/run/*/*.run"):  # or DVC would show it as running
        if read_json(info).get("root_dir") == str(folder):
            shutil.rmtree(info.parent)
    return _remove(folder, size)

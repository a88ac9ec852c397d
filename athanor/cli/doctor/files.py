"""Checks of `athanor doctor` on files: unfinished writes, what killed experiments left, and (`--deep`) damaged bytes.

DVC takes a file of the same time, size and inode for unchanged, and a hard-linked file of the workspace is its own
object in the cache: what damages one in place damages both.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from athanor.base.artifacts import OLD, read_json
from athanor.cli import slots
from athanor.cli.doctor.checks import recorded_stages
from athanor.cli.doctor.main import FIX, Checkout, Finding
from athanor.runtime import dvc_lock, intact
from athanor.runtime.facts import git
from athanor.runtime.sharing import cache_folder

WRITTEN_FOLDERS = ("data", "models", "metrics", "plots", ".athanor")
# DVC removes these refs when an experiment ends. EXEC_HEAD it leaves; queued experiments have refs of their own.
REFS = ("refs/exps/exec/EXEC_BASELINE", "refs/exps/exec/EXEC_MERGE", "refs/exps/exec/EXEC_BRANCH", "refs/exps/stash")


def unpublished_writes(root: Path) -> list[Path]:
    """Temporary files of atomic writes (athanor.base.artifacts) that never got their final name."""
    paths = [path for path in root.glob(".*.tmp") if path.is_file()]
    for top_folder in WRITTEN_FOLDERS:
        for folder, folders, names in os.walk(root / top_folder):
            paths += [Path(folder, name) for name in (*folders, *names) if _is_temporary(name)]
            folders[:] = [name for name in folders if not _is_temporary(name)]
    return paths


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith((".tmp", OLD))


def leftovers(checkout: Checkout, paths: list[Path]) -> Iterator[Finding]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # finished in the meantime
            if not checkout.may_be_owned(path):
                size = slots.size(slots.bytes_of(path))
                where = path.relative_to(checkout.root).as_posix()
                what, repair = f"{size} of an unfinished write; its process has ended", _remove
                if path.name.endswith(OLD) and not _replaced(path).exists():
                    what, repair = f"the former {_replaced(path).name}, whose replacement was killed", _put_back
                yield Finding("leftover", where, what, FIX, lambda path=path, size=size, do=repair: do(path, size))


def _replaced(old: Path) -> Path:
    """What stood aside as `.NAME.*.old` while it was replaced (athanor.base.artifacts.new_dir)."""
    return old.with_name(old.name[1:].rsplit(".", 2)[0])


def _put_back(path: Path, size: str) -> str:
    if _replaced(path).exists():
        return _remove(path, size)
    path.rename(_replaced(path))
    return f"{_replaced(path).name} is back, {size}"


def _remove(path: Path, size: str) -> str:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return f"removed, {size} freed"


def experiment(checkout: Checkout) -> Iterator[Finding]:
    """A detached HEAD and refs that a killed `dvc exp run` left in Git. Git commands put them right, not we."""
    root = checkout.root
    listed = git(root, "for-each-ref", "--format=%(refname)", "refs/exps").split()
    refs = [name for name in listed if name in REFS or name.startswith("refs/exps/temp/")]
    detached = not git(root, "symbolic-ref", "-q", "HEAD")
    if checkout.dvc or not (refs or detached and _detached_by_dvc(root)):
        return
    commands = [f"git update-ref -d {name}" for name in refs]
    if detached:
        branch = git(root, "rev-parse", "-q", "--symbolic-full-name", "@{-1}") or "refs/heads/BRANCH"
        made = git(root, "log", "--format=%s", f"{branch}..HEAD").splitlines()
        own = any(not subject.startswith("dvc: ") for subject in made) and not git(root, "log", f"HEAD..{branch}")
        # Not `git reset`: it keeps the index's times, and takes a file that DVC wrote within that second for unchanged.
        back = [f"git symbolic-ref HEAD {branch}", "git read-tree HEAD"]
        # Commits that were made since belong on the branch.
        commands[:0] = [f"git switch -C {branch.removeprefix('refs/heads/')}"] if own else back
    what = " and ".join(["HEAD detached"] * detached + [f"{len(refs)} refs left"] * bool(refs))
    command = " && ".join(commands) + " (docs/outages.md, Killed experiments, says what each keeps)"
    yield Finding("head", "HEAD" if detached else refs[0], f"{what}, by a killed experiment", command)


def _detached_by_dvc(root: Path) -> bool:
    """Whether the log of HEAD says that a DVC went from a branch to its commit, by the full hash, and never back.

    Later commands of DVC find HEAD detached and leave it so, after which no ref tells of the kill.
    """
    if not git(root, "for-each-ref", "refs/exps/exec"):
        return False
    log = [line.partition(" ")[::2] for line in git(root, "log", "-g", "--format=%H %gs", "HEAD").splitlines()]
    for (commit, message), (before, _) in itertools.pairwise(log):
        if message.startswith("checkout: moving from "):
            return commit == before and message.endswith(f" to {commit}")
        if message.startswith("rebase") or re.match(r"dvc: Restore HEAD to '(?![0-9a-f]{40}')", message):
            return False
    return False


def temp_dirs(checkout: Checkout) -> Iterator[Finding]:
    """Checkouts of --temp and queued experiments that no process works in."""
    exps = checkout.root / ".dvc" / "tmp" / "exps"
    for folder in sorted((*exps.glob("tmp*"), *(exps / "standalone").glob("tmp*"))):
        if folder.is_dir() and checkout.abandoned(folder):
            size = slots.size(slots.bytes_of(folder))
            what = f"checkout of a killed experiment, {size}; its slot is kept elsewhere"
            where = folder.relative_to(checkout.root).as_posix()
            yield Finding("temp-dir", where, what, FIX, lambda f=folder, s=size: _remove_checkout(exps, f, s))


def _remove_checkout(exps: Path, folder: Path, size: str) -> str:
    for info in exps.glob("standalone/run/*/*.run"):  # or DVC would show it as running
        if read_json(info).get("root_dir") == str(folder):
            shutil.rmtree(info.parent)
    return _remove(folder, size)


# -- bytes, in the workspace and in DVC's cache, that are not what dvc.lock says they are --------------------------------

Hashes = dict[tuple[int, int], str]  # MD5 by device and inode: hard links are read once


def damaged(checkout: Checkout) -> Iterator[Finding]:
    """Files of dvc.lock whose bytes changed without DVC's knowledge; a newer version of an output is not damaged."""
    root, cache, hashes = checkout.root, cache_folder(checkout.root) / "files" / "md5", Hashes()
    locks = [path.stat().st_mtime for path in dvc_lock.files(root) if path.is_file()]
    for stage, row in recorded_stages(checkout).items():
        for out in row.get("outs", ()):
            for name, md5 in _objects(cache, out["path"], out.get("md5", "")):
                file, cached = root / name, cache / md5[:2] / md5[2:]
                damaged_paths = _damaged_copies(file, cached, md5, max(locks), hashes)
                # What was written since may be somebody's edit, through a hard link; a list of files has no twin.
                repairable = checkout.trusted and not checkout.dvc and not md5.endswith(".dir")
                safe = repairable and all(path.stat().st_mtime < max(locks) for path in damaged_paths)
                if damaged_paths:
                    yield _damage_finding(root, file, cached, damaged_paths, stage, safe)


def _damaged_copies(file: Path, cached: Path, md5: str, recorded_at: float, hashes: Hashes) -> list[Path]:
    """Which of the cache's object and the workspace's file, that dvc.lock calls `md5`, are damaged."""
    copies = [cached] if cached.is_file() and _md5(cached, hashes) != md5.removesuffix(".dir") else []
    if file.is_dir():  # where the cache has no list of its files, the manifest has one
        return copies if cached.is_file() else [entry.path for entry, _ in intact.problems(intact.listed(file))]
    if file.is_file() and _md5(file, hashes) != md5:
        entry = next((entry for entry in intact.listed(file) if entry.path == file), None)
        unseen = bool(entry.problem()) if entry else file.stat().st_mtime < recorded_at
        if unseen or (copies and file.samefile(cached)):
            copies.append(file)
    return copies


def _damage_finding(root: Path, file: Path, cached: Path, damaged_paths: list[Path], stage: str, safe: bool) -> Finding:
    names = [os.path.relpath(path, root) for path in damaged_paths]

    def repair() -> str:
        for path in damaged_paths:
            path.unlink(missing_ok=True)
        if file in damaged_paths or not file.is_file():
            return "removed; dvc pull or dvc repro brings it back"
        copy = cached.with_name(f".{cached.name}.tmp")
        shutil.copyfile(file, copy)
        copy.chmod(0o444)
        copy.replace(cached)
        return "made again from the workspace"

    label = f"the cache object of {os.path.relpath(file, root)}" if cached in damaged_paths else names[0]
    what = f"{label} is damaged: its bytes are not those that dvc.lock names"
    # The copy in the workspace may be the same inode, so both have to go before the stage runs.
    command = f"{FIX} --deep" if safe else f"rm {' '.join(names)}, then dvc pull or dvc repro {stage}"
    return Finding("cache", names[0], what, command, repair if safe else None)


def _objects(folder: Path, name: str, md5: str) -> Iterator[tuple[str, str]]:
    """(workspace path, MD5) of every file of an output; a directory is a cached list of its files."""
    if md5:
        yield name, md5
    path = folder / md5[:2] / md5[2:]
    if md5.endswith(".dir") and path.is_file():
        with contextlib.suppress(ValueError):  # damaged: reported for the list itself
            yield from ((f"{name}/{row['relpath']}", row["md5"]) for row in json.loads(path.read_bytes()))


def _md5(path: Path, hashes: Hashes) -> str:
    """MD5 of a file; a text that is no hash when the file cannot be read."""
    stat = path.stat()
    key = (stat.st_dev, stat.st_ino)
    if key not in hashes:
        try:
            with open(path, "rb") as file:
                hashes[key] = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        except OSError as error:
            hashes[key] = f"cannot be read ({error.strerror})"
    return hashes[key]

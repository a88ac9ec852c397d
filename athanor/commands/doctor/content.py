"""Check of `athanor doctor --deep`: bytes, in the workspace and in DVC's cache, that are not what dvc.lock says they are.

DVC takes a file of the same time, size and inode for unchanged, and a hard-linked file of the workspace is its own
object in the cache: what damages one in place damages both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from athanor.commands.doctor.checks import cache_folder, recorded
from athanor.commands.doctor.main import FIX, Finding
from athanor.commands.doctor.processes import Checkout
from athanor.pipeline import dvc_lock, intact

Hashes = dict[tuple[int, int], str]  # MD5 by device and inode: hard links are read once


def damaged(checkout: Checkout) -> Iterator[Finding]:
    """Files of dvc.lock whose bytes changed without DVC's knowledge. Another version of an output is none."""
    root, cache, known = checkout.root, cache_folder(checkout.root) / "files" / "md5", Hashes()
    locks = [path.stat().st_mtime for path in dvc_lock.files(root) if path.is_file()]
    for stage, row in recorded(checkout).items():
        for out in row.get("outs", ()):
            for name, md5 in _objects(cache, out["path"], out.get("md5", "")):
                file, cached = root / name, cache / md5[:2] / md5[2:]
                bad = _bad(file, cached, md5, max(locks), known)
                # What was written since may be somebody's edit, through a hard link; a list of files has no twin.
                ours = checkout.trusted and not checkout.dvc and not md5.endswith(".dir")
                safe = ours and all(path.stat().st_mtime < max(locks) for path in bad)
                if bad:
                    yield _finding(root, file, cached, bad, stage, safe)


def _bad(file: Path, cached: Path, md5: str, recorded_at: float, known: Hashes) -> list[Path]:
    """Which of the cache's object and the workspace's file, that dvc.lock calls `md5`, are damaged."""
    bad = [cached] if cached.is_file() and _md5(cached, known) != md5.removesuffix(".dir") else []
    if file.is_dir():  # where the cache has no list of its files, the manifest has one
        return bad if cached.is_file() else [part.path for part, _ in intact.problems(intact.listed(file))]
    if file.is_file() and _md5(file, known) != md5:
        entry = next((entry for entry in intact.listed(file) if entry.path == file), None)
        unseen = bool(entry.problem()) if entry else file.stat().st_mtime < recorded_at
        if unseen or (bad and file.samefile(cached)):
            bad.append(file)
    return bad


def _finding(root: Path, file: Path, cached: Path, bad: list[Path], stage: str, safe: bool) -> Finding:
    names = [os.path.relpath(path, root) for path in bad]

    def repair() -> str:
        for path in bad:
            path.unlink(missing_ok=True)
        if file in bad or not file.is_file():
            return "removed; dvc pull or dvc repro brings it back"
        copy = cached.with_name(f".{cached.name}.tmp")
        shutil.copyfile(file, copy)
        copy.chmod(0o444)
        copy.replace(cached)
        return "made again from the workspace"

    thing = f"the cache object of {os.path.relpath(file, root)}" if cached in bad else names[0]
    what = f"{thing} is damaged: its bytes are not those that dvc.lock names"
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


def _md5(path: Path, known: Hashes) -> str:
    """MD5 of a file; a word of its own for one that cannot be read."""
    stat = path.stat()
    key = (stat.st_dev, stat.st_ino)
    if key not in known:
        try:
            with open(path, "rb") as file:
                known[key] = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        except OSError as error:
            known[key] = f"cannot be read ({error.strerror})"
    return known[key]

"""dvc.lock, read and kept: DVC writes the file anew in place, so a kill meanwhile leaves it empty or torn.

DVC (3.67.1) opens the file with truncation and then dumps into it, after each stage. Every stage keeps a copy when it
begins, which is a moment when DVC is not writing. Only a file that DVC itself cannot read is ever replaced by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from athanor.artifacts import write_bytes
from athanor.errors import InputError
from athanor.pipeline.closure import FOREIGN, SIDE
from athanor.pipeline.locks import try_lock

LOCK = "dvc.lock"
COPIES = Path(".athanor/locks")
GUARD = Path(".dvc/tmp/lock")  # what a DVC command holds while it writes
FIX = "python -m athanor doctor --fix"


def stages(path: Path) -> dict[str, Any]:
    """What a dvc.lock has of each stage, nothing where the file is missing; InputError when DVC could not read it."""
    if not path.is_file():
        return {}
    data = path.read_bytes()
    found = _parsed(data)
    if found is None:
        if _conflict(data):
            fix = f"git checkout --ours {LOCK}, then run dvc repro"
            raise InputError("has the marks of a Git conflict", where=str(path), fix=fix)
        what = "is empty" if not data.strip() else "is torn"
        raise InputError(f"{what}: DVC was killed while it wrote this file", where=str(path), fix=FIX)
    return found


def outputs(path: Path) -> dict[str, str]:
    """Path to MD5 of every output that a dvc.lock names."""
    rows = (out for entry in stages(path).values() for out in entry.get("outs", ()))
    return {out["path"]: out.get("md5", "") for out in rows}


def torn(root: Path) -> Iterator[Path]:
    """Each dvc.lock of the checkout, its side graphs' included,, that DVC cannot read."""
    for path in files(root):
        if path.is_file() and _parsed(data := path.read_bytes()) is None and not _conflict(data):
            yield path


def keep(root: Path) -> None:
    """Copy what is whole, for a time when it is not."""
    for path in files(root):
        copy = _copy(root, path)
        if path.is_file() and (data := path.read_bytes()) and _parsed(data) is not None:
            if not copy.is_file() or copy.read_bytes() != data:
                write_bytes(copy, data)


def mend(root: Path) -> list[str]:
    """Put the copies in the place of torn files; says what was done. Leaves them while a DVC command may be writing.

    Without a copy the file is removed: DVC then takes the results of all stages from its run-cache.
    """
    lock, done = root / GUARD, []
    # Not made where it is missing: for DVC's other kind of lock (core.hardlink_lock) the file itself is the lock.
    with try_lock(lock) if lock.exists() else nullcontext(True) as free:
        for path in torn(root) if free else ():
            name, copy = path.relative_to(root), _copy(root, path)
            if copy.is_file():
                write_bytes(path, copy.read_bytes())
                done.append(f"{name} was torn by a kill; the copy from before is back")
            else:
                path.unlink()
                done.append(f"{name} was torn by a kill and is removed; DVC finds the results in its run-cache")
    return done


def files(root: Path) -> list[Path]:
    """Where DVC writes one: beside the graph, and beside those of side stages and of a foreign base."""
    return [root / LOCK, *(root / folder / LOCK for folder in (SIDE, FOREIGN))]


def _copy(root: Path, path: Path) -> Path:
    return root / COPIES / path.relative_to(root)


def _conflict(data: bytes) -> bool:
    return b"<<<<<<< " in data


def _parsed(data: bytes) -> dict[str, Any] | None:
    """The stages of a lock file, or None where DVC's schema refuses it."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found = YAML(typ="safe").load(data)
        if found["schema"] != "2.0":
            return None
        entries = found.get("stages", {})
        for entry in entries.values():
            rows = [*entry.get("deps", ()), *entry.get("outs", ())]
            hashes = [row.get("md5", "") for row in rows]
            values = entry.get("params", {}).values()
            if not all(isinstance(text, str) for text in (*(row["path"] for row in rows), *hashes)):
                return None
            if not isinstance(entry["cmd"], (str, list)) or not all(isinstance(value, dict) for value in values):
                return None
    except (YAMLError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(entries)

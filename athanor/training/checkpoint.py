"""Checkpoints are complete or ignored: a folder `step_00000123/` with tensors, state and checksums.

`anchors/` holds older ones, for a run that has to roll back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from athanor.base.artifacts import digest, new_dir, read_json, sha256_file, write_json
from athanor.base.errors import InputError
from athanor.model.tensorfile import read_tensors, write_tensors

TENSORS, STATE = "tensors.safetensors", "state.json"
ANCHORS = "anchors"
KEEP = 2
# A bad sector, a lost server, a broken file system, which not every system has a number for.
UNREADABLE = (errno.EIO, errno.ESTALE, getattr(errno, "EUCLEAN", errno.EIO))
_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    path: Path


def save(
    folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, pinned: bool = False
) -> Path:
    """Write the checkpoint of a step, then drop all before it but one, and the pinned.

    Later steps stay: a shorter run may pass through a folder in which a longer
    one has been, and both make the same bytes.
    Appears under its name only when every byte is on the disk; an error (a
    full disk) leaves the earlier ones as they were.
    """
    path = folder / f"step_{step:08d}"
    with new_dir(path) as temporary:
        checksum = write_tensors(temporary / TENSORS, tensors)
        _write_state(temporary, {"step": step, "pinned": pinned, "tensors_sha256": checksum, "state": dict(state)})
    for old in [path for path in steps(folder) if step_of(path) <= step][KEEP:]:
        if not _pinned(old):
            shutil.rmtree(old)
    return path


def pin(folder: Path, step: int) -> None:
    """Keep the checkpoint of a step, if it is there, from being dropped for later ones."""
    path = folder / f"step_{step:08d}"
    if (path / STATE).is_file() and not _pinned(path):
        _write_state(path, {**_state(path), "pinned": True})


def steps(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first, without looking inside."""
    folders = [path for path in folder.glob("step_*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(folders, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def load(path: Path) -> Checkpoint:
    """Read one checkpoint; InputError if any byte of it is missing or changed."""
    content = _state(path)
    tensors = path / TENSORS
    with _unreadable_is_damaged(tensors):
        if not tensors.is_file() or sha256_file(tensors) != content["tensors_sha256"]:
            raise InputError("missing or damaged", where=str(tensors))
        return Checkpoint(content["step"], read_tensors(tensors), content["state"], path)


def latest(
    folder: Path,
    on_damaged: Callable[[str], None],
    max_step: int | None = None,
    usable: Callable[[Checkpoint], bool] = lambda saved: True,
) -> Checkpoint | None:
    """The newest complete checkpoint or anchor up to `max_step` that is `usable`, or None.

    Damaged ones are reported to `on_damaged` and moved aside; what a killed
    writer left unfinished is deleted. The caller must be the folder's only writer.
    """
    parents = (folder, folder / ANCHORS)
    for leftover in [path for parent in parents for path in parent.glob(".step_*.tmp")]:
        shutil.rmtree(leftover)
    for path in sorted((path for parent in parents for path in steps(parent)), key=step_of, reverse=True):
        if max_step is not None and step_of(path) > max_step:
            continue
        try:
            saved = load(path)
        except InputError as error:
            on_damaged(f"checkpoint ignored ({error}); using the one before it")
            # Out of the way, or it would count as one of the two that are kept; cleared at the next start.
            with contextlib.suppress(OSError):  # not where the disk cannot even do that
                os.replace(path, path.parent / f".{path.name}.damaged.tmp")
            continue
        if usable(saved):
            return saved
    return None


def drop(folder: Path, after: int, dead: Callable[[dict[str, Any]], bool]) -> None:
    """Remove checkpoints and anchors of steps past `after` whose state is `dead`; the pinned stay."""
    for path in [path for parent in (folder, folder / ANCHORS) for path in steps(parent)]:
        if step_of(path) <= after:
            continue
        try:
            content = _state(path)
        except InputError:
            continue  # `latest` puts it aside
        if not content["pinned"] and dead(content["state"]):
            shutil.rmtree(path)


def _write_state(path: Path, content: Mapping[str, Any]) -> None:
    write_json(path / STATE, {**content, "checksum": digest(content)})


def _state(path: Path) -> dict[str, Any]:
    with _unreadable_is_damaged(path / STATE):
        content = read_json(path / STATE)
    claimed = content.pop("checksum", None) if isinstance(content, dict) else None
    if claimed is None or claimed != digest(content):
        raise InputError("damaged", where=str(path / STATE))
    return content


@contextlib.contextmanager
def _unreadable_is_damaged(path: Path) -> Iterator[None]:
    """Raise InputError for a file that the disk cannot read any more, so that another checkpoint is used."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        raise InputError(f"cannot be read ({error.strerror})", where=str(path)) from None


def _pinned(path: Path) -> bool:
    try:
        return bool(_state(path)["pinned"])
    except InputError:
        return False

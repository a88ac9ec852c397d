"""Reads dvc.lock and keeps copies of it: DVC rewrites the file in place, so a kill during that leaves it empty or torn.

DVC (3.67.1) opens the file with truncation and then dumps into it, after each stage. Every stage keeps a copy when it
begins, which is a moment when DVC is not writing. Only a file that DVC itself cannot read is ever replaced by it.

Who runs plain `dvc repro` has nobody to put the copy back, and DVC does not start with a torn file. So the first stage
starts a process in a session of its own, which a kill of DVC's process group does not reach:

    python -m athanor.runtime.dvc_lock ROOT PID    wait for the end of DVC's process, then mend what it has torn
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from athanor.base.artifacts import write_bytes
from athanor.base.errors import InputError
from athanor.base.strict import read_yaml
from athanor.runtime.closure import PROBES, SIDE
from athanor.runtime.locks import locked, try_lock

LOCK = "dvc.lock"
COPIES = Path(".athanor/locks")
GUARD = Path(".dvc/tmp/lock")  # what a DVC command holds while it writes
RWLOCKS = (Path(".dvc/tmp/rwlock"), Path(".dvc/tmp/exps/rwlock"))  # DVC's lists of who reads and writes which path
FIX = "python -m athanor doctor --fix"
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")  # between DVC and its stage, where the shell does not exec
AFTER_A_KILL_SECONDS = 600.0
POLL_SECONDS = 0.2  # dvc needs longer than that to start and read the file


def stages(path: Path) -> dict[str, Any]:
    """The entry of each stage in a dvc.lock, none where the file is missing; InputError when DVC could not read it."""
    if path.is_dir():
        raise InputError("is a folder", where=str(path), fix=f"rm -r {shlex.quote(str(path))} && git checkout {LOCK}")
    if not path.is_file():
        return {}
    data = path.read_bytes()
    entries = parsed(data)
    if entries is None:
        if _conflict(data):
            fix = f"git checkout --ours {LOCK}, then run dvc repro"
            raise InputError("has the marks of a Git conflict", where=str(path), fix=fix)
        what = "is empty" if not data.strip() else "is torn"
        raise InputError(f"{what}: DVC was killed while it wrote this file", where=str(path), fix=FIX)
    return entries


def inputs(entries: Mapping[str, Any]) -> dict[str, str]:
    """Path to MD5 of what stages read and none of them made: code, texts, corrections, questions."""
    outs = [Path(out["path"]) for entry in entries.values() for out in entry.get("outs", ())]
    deps = {dep["path"]: dep.get("md5", "") for entry in entries.values() for dep in entry.get("deps", ())}
    made = {name for name in deps for out in outs if Path(name).is_relative_to(out) or out.is_relative_to(name)}
    return {name: md5 for name, md5 in deps.items() if name not in made}


def outputs(path: Path) -> dict[str, str]:
    """Path to MD5 of every output that a dvc.lock names."""
    rows = (out for entry in stages(path).values() for out in entry.get("outs", ()))
    return {out["path"]: out.get("md5", "") for out in rows}


def built_params(root: Path, stage: str) -> dict[str, Any]:
    """The sections of params.yaml that a stage was last run with (dvc.lock), else those of params.yaml now."""
    recorded = stages(root / LOCK).get(stage, {}).get("params", {}).get("params.yaml")
    if recorded:
        return dict(recorded)
    return dict(read_yaml(root / "params.yaml")) if (root / "params.yaml").is_file() else {}


def torn(root: Path) -> Iterator[Path]:
    """Each dvc.lock of the checkout, its side graphs' included, that DVC cannot read."""
    for path in files(root):
        if path.is_file() and parsed(data := path.read_bytes()) is None and not _conflict(data):
            yield path


def keep(root: Path) -> None:
    """Copy each lock file that is not torn, to restore it from when it is."""
    for path in files(root):
        copy = _copy(root, path)
        if path.is_file() and (data := path.read_bytes()) and parsed(data) is not None:
            if not copy.is_file() or copy.read_bytes() != data:
                write_bytes(copy, data)


def mend(root: Path) -> list[str]:
    """Put the copies in the place of torn files; says what was done. Leaves them while a DVC command may be writing.

    Without a copy the file is removed: DVC then takes the results of all stages from its run-cache. A torn list of
    DVC's locks is removed, too.
    """
    for path in filter(Path.is_dir, files(root)):
        stages(path)  # raises
    lock, repairs = root / GUARD, []
    # Not made where it is missing: for DVC's other kind of lock (core.hardlink_lock) the file itself is the lock.
    with try_lock(lock) if lock.exists() else nullcontext(True) as free:
        for path in torn(root) if free else ():
            name, copy = path.relative_to(root), _copy(root, path)
            if copy.is_file():
                write_bytes(path, copy.read_bytes())
                repairs.append(f"{name} was torn by a kill; the copy from before is back")
            else:
                path.unlink()
                repairs.append(f"{name} was torn by a kill and is removed; DVC finds the results in its run-cache")
    for path in (root / name for name in RWLOCKS):
        guard = path.with_name("rwlock.lock")
        with try_lock(guard) if guard.exists() else nullcontext(True) as free:
            if free and not _is_list_of_locks(path):
                path.unlink(missing_ok=True)
                repairs.append(f"{path.relative_to(root)} was torn by a kill and is removed")
    return repairs


def watch(root: Path) -> None:
    """Start the process that mends after the DVC that runs this stage; does nothing if DVC does not run it.

    Where it cannot be started (no memory) the stage runs all the same.
    """
    import psutil

    if "DVC_STAGE" not in os.environ:
        return
    with contextlib.suppress(OSError, psutil.Error):
        # An orphan's parent is process 1, whose end is not to be waited for.
        ancestors = [
            process for process in psutil.Process().parents() if process.pid != 1 and process.name() not in SHELLS
        ]
        if not ancestors:
            return
        dvc = ancestors[0]
        command = [sys.executable, "-m", "athanor.runtime.dvc_lock", str(root), str(dvc.pid)]
        devnull, checkout = subprocess.DEVNULL, Path(__file__).resolve().parents[2]
        subprocess.Popen(command, cwd=checkout, stdin=devnull, stdout=devnull, stderr=devnull, start_new_session=True)


def main() -> int:
    import psutil

    root, pid = Path(sys.argv[1]), int(sys.argv[2])
    own_lock = root / COPIES / f"dvc-{pid}"
    own_lock.parent.mkdir(parents=True, exist_ok=True)
    with try_lock(own_lock) as free:  # else an earlier stage's process watches it
        if free:
            with contextlib.suppress(psutil.NoSuchProcess):
                dvc = psutil.Process(pid)
                while dvc.is_running() and dvc.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(POLL_SECONDS)
            # A DVC that was not killed removes its locks. One that was may hold them a moment longer than it is seen:
            # the kernel ends its threads one by one.
            repairs, rwlock = mend(root), root / RWLOCKS[0]
            if repairs or any(torn(root)) or not _is_list_of_locks(rwlock) or pid in _holders(rwlock):
                _keep_mending(root)
            own_lock.unlink(missing_ok=True)
    return 0


def _keep_mending(root: Path) -> None:
    """Mend after the next DVC, too: it may take everything from the run-cache and be killed before it runs a stage.

    Until one has come and gone, or `doctor --fix`, and left nothing to mend.
    """
    stamps, pending, mended, deadline = _file_stamps(root), True, True, time.monotonic() + AFTER_A_KILL_SECONDS
    while time.monotonic() < deadline and root.is_dir():
        time.sleep(POLL_SECONDS)
        new_stamps = _file_stamps(root)
        stamps, pending = new_stamps, pending or new_stamps != stamps
        if pending and not locked(root / GUARD):  # no DVC is writing
            pending, before, mended = False, mended, bool(mend(root))
            rwlock = root / RWLOCKS[0]
            if not (mended or before or any(torn(root))) and _is_list_of_locks(rwlock) and not _holders(rwlock, ()):
                return


def _file_stamps(root: Path) -> list[tuple[int, int]]:
    stamps = []
    for path in (*files(root), *(root / name for name in RWLOCKS)):
        with contextlib.suppress(OSError):
            stamps.append((path.stat().st_mtime_ns, path.stat().st_size))
    return stamps


def _holders(path: Path, also: Iterable[str] = ("read",)) -> set[int]:
    """The processes in DVC's list of locks; ValueError and the like where it cannot be read.

    Without `read` those that write: DVC drops a dead reader only where it wants to write.
    """
    with contextlib.suppress(FileNotFoundError):
        lists = json.loads(path.read_text(encoding="utf-8"))
        readers = [entry for kind in also for row in lists.get(kind, {}).values() for entry in row]
        return {int(entry["pid"]) for entry in (*lists.get("write", {}).values(), *readers) if entry["cmd"]}
    return set()


def files(root: Path) -> list[Path]:
    """The lock files that DVC writes: beside dvc.yaml, and beside those of side graphs."""
    return [root / LOCK, *(root / folder / LOCK for folder in (PROBES, SIDE))]


def _copy(root: Path, path: Path) -> Path:
    return root / COPIES / path.relative_to(root)


def _conflict(data: bytes) -> bool:
    return b"<<<<<<< " in data


def _is_list_of_locks(path: Path) -> bool:
    """Whether DVC can read its list of locks, or there is none."""
    try:
        return _holders(path) is not None
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def parsed(data: bytes) -> dict[str, Any] | None:
    """The stages of a lock file, or None where DVC's schema refuses it."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="safe").load(data)
        if content["schema"] != "2.0":
            return None
        entries = content.get("stages", {})
        for entry in entries.values():
            rows = [*entry.get("deps", ()), *entry.get("outs", ())]
            hashes = [row.get("md5", "") for row in rows]
            values = entry.get("params", {}).values()
            if not all(isinstance(text, str) for text in (*(row["path"] for row in rows), *hashes)):
                return None
            if not isinstance(entry["cmd"], (str, list)) or not all(isinstance(value, dict) for value in values):
                return None
    except (YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return dict(entries)


if __name__ == "__main__":
    sys.exit(main())

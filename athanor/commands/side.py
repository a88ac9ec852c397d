"""Running a side stage: a stage that no other one needs, in a file of its own in probes/ (why: probes/lr.yaml)."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from athanor.errors import InputError
from athanor.pipeline import ship
from athanor.pipeline.closure import SIDE
from athanor.pipeline.locks import try_lock

DVC_FILE, LOCK = Path(SIDE) / "dvc.yaml", Path(SIDE) / "dvc.lock"
SHIP_SECONDS = 60.0


def repro(root: Path, file: Path, stage: str, force: bool) -> int:
    """Run the side stage of a file by DVC, one at a time in a checkout; returns DVC's exit status."""
    if not (root / file).is_file():
        raise InputError("file not found", where=file.as_posix(), fix=f"git checkout {file.as_posix()}")
    (root / ".athanor").mkdir(exist_ok=True)
    with try_lock(root / ".athanor" / "probe.lock") as free:
        if not free:
            raise InputError("another probe or synthesize is at work here", where=str(root), fix="wait for it")
        status = _repro(root, file, stage, force)
    ship.wait(root, SHIP_SECONDS if not status else 5.0)
    return status


def _repro(root: Path, file: Path, stage: str, force: bool) -> int:
    """`dvc repro`, for which the file has DVC's name only meanwhile."""
    shutil.copyfile(root / file, root / DVC_FILE)
    command = [sys.executable, "-m", "dvc", "repro", f"{DVC_FILE.as_posix()}:{stage}", *(["--force"] if force else [])]
    # A signal reaches DVC and its stage as well, or is passed on to them; this process must outlive them to tidy up.
    children: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in children])
    try:
        children.append(subprocess.Popen(command, cwd=root))
        return children[0].wait()
    finally:
        (root / DVC_FILE).unlink(missing_ok=True)

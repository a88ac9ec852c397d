"""The shipper: turns journals into MLflow runs, in its own process, as often as needed.

    python -m athanor.pipeline.ship [--wait SECONDS]

One shipper per checkout (flock), started by each stage and detached from it.
It follows the journals of live stages, gives up after a while when the
tracking server does not answer, and leaves what is not shipped for the next
one. Training therefore never imports mlflow and never waits for it.

State per run is `ship.json` in the run's directory: the MLflow run id and the
journal offset that arrived. MLflow drops exact duplicates of (key, timestamp,
step, value), so a batch that is sent twice after a crash does no harm.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from athanor.artifacts import read_json
from athanor.errors import AthanorError

IDLE_SECONDS = 6.0
POLL_SECONDS = 1.0
GIVE_UP_SECONDS = 60.0


def tracking_uri(root: Path) -> str:
    """MLFLOW_TRACKING_URI, else SQLite at the root of the main checkout."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root}/mlflow.db"


def start_detached(root: Path) -> None:
    """Start a shipper unless one holds the lock. ATHANOR_TRACKING=off switches tracking off."""
    if os.environ.get("ATHANOR_TRACKING") == "off":
        return
    state = root / ".athanor"
    state.mkdir(exist_ok=True)
    with try_lock(state / "ship.lock") as free:
        if not free:
            return
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_RUN_ID"}
    # The main checkout outlives the temporary directories that DVC runs experiments in.
    home = root if (root / "athanor").is_dir() else Path(__file__).resolve().parents[2]
    with open(state / "ship.log", "ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "athanor.pipeline.ship", "--root", str(root)],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Yields True while holding the lock, False when another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def run_folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in (root / ".athanor" / "runs").glob("*/meta.json"))


def shipped(folder: Path) -> bool:
    """True when the run is closed and everything it left has arrived."""
    state = folder / "ship.json"
    return state.is_file() and (folder / "end.json").is_file() and read_json(state).get("closed", False)


def alive(folder: Path) -> bool:
    """True while the process that writes the journal exists."""
    if (folder / "end.json").is_file():
        return False
    try:
        os.kill(read_json(folder / "meta.json")["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def ship_all(root: Path) -> None:
    """Ship until every journal is delivered and no stage has written for a while.

    A run whose process died without closing its journal (SIGKILL, power loss)
    is shipped as KILLED; resuming its slot opens it again.
    """
    from athanor.pipeline.tracking import Tracker

    tracker: Tracker | None = None
    last_work = last_success = time.monotonic()
    while time.monotonic() - last_work < IDLE_SECONDS:
        open_runs = [folder for folder in run_folders(root) if not shipped(folder)]
        live = [folder for folder in open_runs if alive(folder)]
        try:
            if open_runs and tracker is None:
                tracker = Tracker(root, tracking_uri(root))
            for folder in open_runs:
                tracker.ship(folder, live=folder in live)
            last_success = time.monotonic()
        except Exception as error:  # any tracking failure: the journal keeps everything, try again
            print(f"tracking is not reachable, the journal is kept: {type(error).__name__}: {error}", flush=True)
            tracker = None
            if time.monotonic() - last_success > GIVE_UP_SECONDS and not live:
                return
            time.sleep(5 * POLL_SECONDS)
        if live or any(not shipped(folder) and (folder / "end.json").is_file() for folder in open_runs):
            last_work = time.monotonic()
        time.sleep(POLL_SECONDS)


def wait(root: Path, seconds: float) -> int:
    """Wait until closed runs are shipped; returns the number that is not. Nothing to wait for with tracking off."""
    if os.environ.get("ATHANOR_TRACKING") == "off":
        return 0
    deadline = time.monotonic() + seconds
    while True:
        left = [folder for folder in run_folders(root) if (folder / "end.json").is_file() and not shipped(folder)]
        if not left or time.monotonic() > deadline:
            return len(left)
        start_detached(root)
        time.sleep(0.3)


def main() -> int:
    parser = argparse.ArgumentParser(description="ship journals to MLflow")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="only wait for the shipper to finish")
    args = parser.parse_args()
    root = args.root.resolve()
    if args.wait is not None:
        left = wait(root, args.wait)
        if left:
            print(f"{left} runs are not shipped yet; see {root / '.athanor' / 'ship.log'}", file=sys.stderr)
        return 1 if left else 0
    with try_lock(root / ".athanor" / "ship.lock") as free:
        if free:
            os.nice(10)
            try:
                ship_all(root)
            except AthanorError as error:
                print(error, file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

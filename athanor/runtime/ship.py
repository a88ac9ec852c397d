"""The shipper: turns journals into MLflow runs, in its own process, as often as needed.

    python -m athanor ship              deliver what is left, then stop
    python -m athanor ship --wait 60    only wait for the shipper in the background
    python -m athanor ship --rebuild    replace this checkout's runs in MLflow by new ones made from its journals

One shipper per checkout (flock), started by each stage and detached from it.
It follows the journals of live stages, gives up after a while when the
tracking server does not answer, and leaves what is not shipped for the next
one. Training therefore never imports mlflow and never waits for it.

State per run is `ship.json` in the run's directory: the MLflow run id and the
journal offset that arrived. MLflow drops exact duplicates of (key, timestamp,
step, value), so a batch that is sent twice after a crash does no harm. A store
that was deleted and begun anew gets every run again with the next stage.

The MLflow store is therefore disposable: after `rm mlflow.db`, or with another
MLFLOW_TRACKING_URI, --rebuild makes the same view again. Runs of other
checkouts in the store stay. Runs that --rebuild replaces go to MLflow's trash,
which `mlflow gc` empties.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from athanor.base.artifacts import write_bytes, write_json
from athanor.base.errors import AthanorError, InputError
from athanor.runtime import redact
from athanor.runtime.journal import Record, alive
from athanor.runtime.locks import try_lock
from athanor.runtime.machine import rank_session, step_back
from athanor.runtime.pulse import pulse
from athanor.runtime.store import StoreReplaced, delivery, identity, tracking_uri
from athanor.runtime.store_check import in_one_line, trouble
from athanor.runtime.terminal import in_words, say

if TYPE_CHECKING:
    from athanor.runtime.tracking import Tracker

IDLE_SECONDS = 6.0
POLL_SECONDS = 1.0
LIVE_SECONDS = 5.0  # between deliveries of a run that still writes: each costs the training a little
GIVE_UP_SECONDS = 30.0
STUCK_SECONDS = 120.0  # without a live run and without a step ahead: a store that hangs
LOCK_SECONDS = 60.0
ASK_SECONDS = 3.0  # between looks at a store that one waits for
JOURNAL_KEPT = "the journal is kept, and this shipper, the next stage's or `athanor ship` delivers it"


def start_detached(root: Path) -> None:
    """Start a shipper unless one holds the lock. ATHANOR_TRACKING=off switches tracking off.

    A stage calls this, so a machine that cannot start it (no memory, no space) gets one line and no error.
    """
    if os.environ.get("ATHANOR_TRACKING") == "off":
        return
    try:
        _start(root)
    except OSError as error:
        say(f"tracking is not started, the journal is kept: {error}")


def _start(root: Path) -> None:
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
            [sys.executable, "-m", "athanor.runtime.ship", "--root", str(root)],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def run_folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in (root / ".athanor" / "runs").glob("*/meta.json"))


def by_start(folders: Iterable[Path]) -> list[Path]:
    """The oldest first: a store that is built again then says what it said before."""
    return sorted(folders, key=_started)


def _started(folder: Path) -> int:
    try:
        return Record(folder / "meta.json")["started_ms"]
    except AthanorError:  # reported when the run is shipped
        return 0


def shipped(folder: Path) -> bool:
    """True when the run is closed and everything it left has arrived."""
    return (folder / "end.json").is_file() and delivery(folder).get("closed", False)


def unshipped(root: Path) -> list[Path]:
    """Runs that are open, or closed and not delivered; all of them when the database they were delivered to is gone."""
    uri = tracking_uri(root)
    missing_uri = redact.redact(uri) if identity(uri) == (0, 0) else ""
    return [
        folder
        for folder in run_folders(root)
        if not shipped(folder) or missing_uri and delivery(folder).get("uri") == missing_uri
    ]


def ship_all(root: Path, beat: Callable[[], None] = lambda: None) -> set[Path] | None:
    """Ship until every journal is delivered and no stage has written for a while.

    Returns the runs that cannot be shipped, or None when the store did not
    answer; calls `beat` with each step ahead. A run whose process died without closing its journal (SIGKILL,
    power loss) is shipped as KILLED; resuming its slot opens it again.
    """
    tracker: Tracker | None = None
    retry: dict[Path, tuple[int, float]] = {}  # failures of a run alone, and when to try it again
    last_work = time.monotonic()
    failures, outage, next_live_delivery = 0, 0.0, 0.0
    live: set[Path] = set()
    while failures or time.monotonic() - last_work < IDLE_SECONDS:
        try:
            undelivered = unshipped(root)
            live = {folder for folder in undelivered if alive(folder)}
            if undelivered and tracker is None:
                tracker = _connect(root)
                undelivered += [
                    folder for folder in run_folders(root) if tracker.lacks(folder) and folder not in undelivered
                ]
            beat()
            if tracker is not None:
                ship_live = time.monotonic() >= next_live_delivery
                chosen = [folder for folder in undelivered if ship_live or folder not in live]
                _ship_each(tracker, chosen, live, retry, beat)
                next_live_delivery = time.monotonic() + LIVE_SECONDS if ship_live else next_live_delivery
            failures = 0
        except Exception as error:  # any tracking failure: the journal keeps everything, try again
            if isinstance(error, StoreReplaced):
                raise
            outage = outage if failures else time.monotonic()
            failures += 1
            if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th ... of a long outage
                disk = isinstance(error, OSError) and in_words(error)
                what = (
                    "nothing is shipped"
                    if disk
                    else f"the tracking store {redact.redact(tracking_uri(root))} is not reachable"
                )
                say(f"{what}; {JOURNAL_KEPT}: {in_one_line(error)}")
            tracker, last_work = None, time.monotonic()
            if last_work - outage >= GIVE_UP_SECONDS and not live:
                return None
            time.sleep(5 * POLL_SECONDS)
        if live:
            last_work = time.monotonic()
        time.sleep(POLL_SECONDS)
    return set(retry)


def _connect(root: Path) -> Tracker:
    from athanor.runtime.tracking import Tracker

    return Tracker(root, tracking_uri(root))


def _ship_each(
    tracker: Tracker,
    folders: Iterable[Path],
    live: Collection[Path],
    retry: dict[Path, tuple[int, float]],
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Ship every run; one that cannot be shipped (deleted by the user, a broken file) does not hold up the others."""
    tracker.check()
    for folder in by_start(folders):
        failures, retry_at = retry.get(folder, (0, 0.0))
        if time.monotonic() < retry_at:
            continue
        try:
            tracker.ship(folder, live=folder in live)
            retry.pop(folder, None)
            beat()
        except Exception as error:
            tracker.check()
            if not tracker.explained(folder):
                retry[folder] = failures + 1, time.monotonic() + 2.0**failures
                say(f"{folder.name} is not shipped to {tracker.name}; {JOURNAL_KEPT}: {in_one_line(error)}")


@contextlib.contextmanager
def _shipper_lock(root: Path) -> Iterator[None]:
    """Hold the shippers' lock, after the one at work has ended: only one process may write down what was delivered."""
    lock, deadline = root / ".athanor" / "ship.lock", time.monotonic() + LOCK_SECONDS
    while True:
        with try_lock(lock) as free:
            if free:
                yield
                return
        if time.monotonic() > deadline:
            what = f"a stage or its shipper is at work (process {lock.read_text().strip() or 'unknown'})"
            raise InputError(what, where=str(lock), fix="run it again when it is done")
        time.sleep(0.2)


def attach_later(root: Path, run: str, name: str, data: bytes) -> bool:
    """Keep a small file with a run of the checkout `root`, and have it shipped; False where there is no such run.

    Delivering a run that has ended again changes nothing that has arrived, so it is only called not closed, as if it
    had been interrupted before the end.
    """
    folder = root / ".athanor" / "runs" / run
    if not (folder / "meta.json").is_file():
        return False
    write_bytes(folder / "files" / name, data)
    with _shipper_lock(root):
        if (state := delivery(folder)).get("closed"):
            write_json(folder / "ship.json", {**state, "closed": False})
    start_detached(root)
    return True


def rebuild(root: Path) -> int:
    """Make every run of this checkout's journals anew in the configured store; returns how many failed."""
    with _shipper_lock(root):
        failed = _rebuild(root)
    if any(alive(folder) for folder in run_folders(root)):
        start_detached(root)
    return failed


def _rebuild(root: Path) -> int:
    folders, retry = by_start(run_folders(root)), {}
    name = redact.redact(tracking_uri(root))
    try:
        tracker = _connect(root)
        for folder in folders:
            (folder / "ship.json").unlink(missing_ok=True)
        tracker.forget(folder.name for folder in folders)
        _ship_each(tracker, folders, {folder for folder in folders if alive(folder)}, retry)
    except Exception as error:
        what = f"the tracking store failed: {in_one_line(error)}"
        raise AthanorError(what, where=name, fix="see that it runs, then use ship --rebuild again") from error
    print(f"{len(folders) - len(retry)} of {len(folders)} runs are in {name}")
    return len(retry)


def wait(root: Path, seconds: float) -> int:
    """Wait until closed runs are shipped; returns the number that is not. Nothing to wait for with tracking off.

    A store in which something is wrong is not waited for, but for a moment in which it may start.
    """
    if os.environ.get("ATHANOR_TRACKING") == "off":
        return 0
    started = asked = time.monotonic()
    said = False
    while True:
        unshipped_runs = [folder for folder in unshipped(root) if (folder / "end.json").is_file()]
        now = time.monotonic()
        if not unshipped_runs or now > started + seconds:
            return len(unshipped_runs)
        start_detached(root)
        if now > asked + ASK_SECONDS:
            if why := trouble(root):
                say(f"{why}")
                return len(unshipped_runs)
            if not said:
                say(f"{len(unshipped_runs)} runs are on their way to MLflow; waiting for at most {seconds:.0f} s")
            asked, said = time.monotonic(), True
        time.sleep(0.3)


def main() -> int:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="athanor ship",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout (default: here)")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="only wait for the shipper in the background")
    parser.add_argument("--rebuild", action="store_true", help="make this checkout's runs anew from its journals")
    args = parser.parse_args()
    root = args.root.resolve()
    sys.excepthook = redact.excepthook
    with redact.streams():  # what libraries print to the log may hold the store's address
        try:
            if args.rebuild:
                return 1 if rebuild(root) else 0
            return _wait(root, args.wait) if args.wait is not None else _serve(root)
        except AthanorError as error:
            print(error, file=sys.stderr)
            return 1
        except OSError as error:
            say(f"nothing is shipped; {JOURNAL_KEPT}: {in_one_line(error)}")
            return 1


def _wait(root: Path, seconds: float) -> int:
    unshipped_count = wait(root, seconds)
    if unshipped_count:
        print(f"{unshipped_count} runs are not shipped yet; see {root / '.athanor' / 'ship.log'}", file=sys.stderr)
    return 1 if unshipped_count else 0


def _trains(root: Path) -> bool:
    """Whether a stage is at work. Only then the shipper comes after all others: somebody may wait for it."""
    live = any(alive(folder) for folder in run_folders(root))
    rank_session(19 if live else 0)
    return live


def _serve(root: Path) -> int:
    """Ship as the one shipper of this checkout; status 1 when something could not be delivered."""
    step_back()
    (root / ".athanor").mkdir(exist_ok=True)
    while True:
        with try_lock(root / ".athanor" / "ship.lock") as free:
            if not free:
                return 0
            (root / ".athanor" / "ship.lock").write_text(f"{os.getpid()}\n")
            try:
                with pulse(STUCK_SECONDS, lambda: _trains(root)) as beat:
                    unshippable = ship_all(root, beat)
            except StoreReplaced:
                os.execv(sys.executable, [sys.executable, "-m", "athanor.runtime.ship", "--root", str(root)])
        # A stage that ended between the last look and the release of the lock started no shipper.
        if unshippable is None or not any((f / "end.json").is_file() and f not in unshippable for f in unshipped(root)):
            return 0 if unshippable == set() else 1


if __name__ == "__main__":
    sys.exit(main())

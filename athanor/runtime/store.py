"""The address of the tracking store, and a lock that shippers of different checkouts share."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError
from athanor.runtime.redact import redact

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

EXPERIMENT = "athanor"


class StoreReplaced(Exception):
    """The SQLite file is not the one that this process opened; only a new process sees the new one."""


def tracking_uri(root: Path) -> str:
    """MLFLOW_TRACKING_URI, else SQLite at the root of the main checkout. Relative paths are relative to it."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    path = uri.removeprefix("sqlite:///")
    return uri if path == uri or path.startswith("/") else f"sqlite:///{root / path}"


def database(uri: str) -> Path | None:
    """The file of an SQLite store, None for any other."""
    path = uri.removeprefix("sqlite:///").partition("?")[0]
    return Path(path) if uri.startswith("sqlite:///") else None


def artifacts_of(path: Path) -> Path:
    """Where the runs of an SQLite store keep their files."""
    return path.parent / "mlartifacts"


@contextlib.contextmanager
def store_lock(uri: str) -> Iterator[None]:
    """Held while looking for and creating shared things (tables, the experiment, parents), by shippers of any checkout.

    An SQLite store is locked by its directory, so that every user who shares
    the file shares the lock; another store by a file in this user's home, where
    nobody else can make it first. Shippers that share no lock can make two
    parents at once, which the tracker merges.
    """
    path = database(uri)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.resolve().parent, os.O_RDONLY)
    else:
        name = f"{hashlib.sha256(redact(uri).encode()).hexdigest()[:16]}.lock"
        try:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "athanor"
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except (OSError, RuntimeError):  # a user without a home
            yield
            return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def identity(uri: str) -> tuple[int, int] | None:
    """Device and inode of an SQLite store's file, (0, 0) when there is none; None for any other store."""
    path = database(uri)
    if path is None:
        return None
    try:
        stat = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return stat.st_dev, stat.st_ino


def make_tables(path: Path) -> None:
    """Create an SQLite store atomically: one whose creation was cut short by a kill could never be opened again."""
    from mlflow.tracking import MlflowClient

    for leftover in path.parent.glob(f"{path.name}.*.new*"):
        leftover.unlink()
    draft = path.with_name(f"{path.name}.{os.getpid()}-{time.time_ns()}.new")  # mlflow remembers paths it has seen
    MlflowClient(tracking_uri=f"sqlite:///{draft}")
    os.replace(draft, path)


def at_work(client: MlflowClient, *run_ids: str) -> None:
    """These runs are running, whatever they were before. Their end is 0, which MLflow reads as none."""
    from mlflow.entities import RunStatus

    for run_id in run_ids:  # the public calls leave the end of an earlier attempt
        client._tracking_client.store.update_run_info(run_id, RunStatus.RUNNING, 0, None)


def delivery(folder: Path) -> dict[str, Any]:
    """What was delivered of a run, by its ship.json; nothing when it cannot be read, which costs a second delivery."""
    path = folder / "ship.json"
    try:
        stat = path.stat()
        return dict(_read(path, stat.st_ino, stat.st_mtime_ns))
    except (OSError, AthanorError, TypeError, ValueError):
        return {}


@functools.lru_cache(maxsize=100_000)
def _read(path: Path, inode: int, changed_ns: int) -> dict[str, Any]:
    """Shippers look at every run each second; a file that did not change is read once."""
    return read_json(path)


def without_traceback(record: logging.LogRecord) -> bool:
    """A filter of log records. MLflow logs a database error with its traceback and raises it; the shipper reports it."""
    return not record.exc_info

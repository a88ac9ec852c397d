"""What is wrong with the tracking store, found out in seconds and without MLflow, whose import takes as long."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import socket
import sqlite3
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote, urlsplit

from athanor.base.errors import AthanorError, InputError
from athanor.runtime.redact import redact
from athanor.runtime.store import database, tracking_uri
from athanor.runtime.terminal import in_words

SECONDS = 3.0
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
SQL_NOISE = ("[SQL:", "[parameters:", "(Background on", "(raised as a result")  # SQLAlchemy's, beside what happened
LATER = "no run is lost: athanor ship --wait 60 delivers them afterwards"


def trouble(root: Path) -> InputError | None:
    """Why the tracking store cannot be used, or None; within SECONDS, whatever a name server or a network does."""
    if os.environ.get("ATHANOR_TRACKING") == "off":
        return None
    uri, found = tracking_uri(root), list[InputError | None]()
    thread = threading.Thread(target=lambda: found.append(_trouble(uri)), name="store-check", daemon=True)
    thread.start()
    thread.join(SECONDS)
    return found[0] if found else _silent(uri, f"does not answer within {SECONDS:.0f} s")


def _trouble(uri: str) -> InputError | None:
    if (path := database(uri)) is not None:
        return _of_file(path)
    scheme = uri.partition("://")[0].partition("+")[0].lower()
    try:
        if scheme in ("http", "https"):
            urllib.request.urlopen(_without_login(uri).rstrip("/") + "/health", timeout=SECONDS).close()
        elif scheme in PORTS:
            try:
                place = urlsplit(uri)
                host, port = place.hostname, place.port or PORTS[scheme]
            except ValueError:  # several hosts, or a password with a slash: the driver reads it in its own way
                return None
            if host and not re.search(r"[?&](host|unix_socket)=", uri):  # else by a socket file
                socket.create_connection((host, port), SECONDS).close()
    except urllib.error.HTTPError as error:  # it answers; one that wants a login or has no such page may be right
        return _silent(uri, f"answers with status {error.code}") if error.code >= 500 else None
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # it answers; MLflow may trust another certificate
            return None
        return _silent(uri, f"is not reachable ({getattr(reason, 'strerror', None) or type(reason).__name__})")
    except Exception:  # of an address that cannot be read; its words may quote a password
        return _silent(uri, "has no usable address")
    return None


def _without_login(uri: str) -> str:
    return re.sub(r"//[^/]*@", "//", uri)


def _silent(uri: str, what: str) -> InputError:
    fix = f"start it, or name another one by MLFLOW_TRACKING_URI; {LATER}"
    return InputError(f"the tracking store {what}", where=redact(uri), fix=fix)


def _of_file(path: Path) -> InputError | None:
    if not path.exists():
        return None
    name, version, tables = shlex.quote(str(path)), "", set[str]()
    anew = f"mv {name} {name}.old && athanor ship --rebuild"
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=SECONDS / 2)
        ) as store:
            tables = {str(row[0]) for row in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if "alembic_version" in tables:
                version = str((store.execute("SELECT version_num FROM alembic_version").fetchone() or [""])[0])
    except sqlite3.OperationalError as error:
        if "locked" in str(error):  # somebody writes
            return None
        return InputError(
            f"the tracking store cannot be read ({error})", where=path, fix=f"make it readable, or {anew}"
        )
    except sqlite3.DatabaseError as error:
        return InputError(f"the tracking store is damaged ({error})", where=path, fix=anew)
    if not version or not (steps := _migrations()):
        return None
    if version not in steps:
        return InputError("the tracking store is of another MLflow, newer than the one here", where=path, fix=anew)
    at, missing = next(iter(steps.keys() - {before for before, _ in steps.values()})), set[str]()
    while at != version and at in steps:
        missing |= steps[at][1] - tables
        at = steps[at][0]
    if version not in {before for before, _ in steps.values()} or missing:
        return None  # the newest, or one that MLflow brings up to date by itself, as it does where tables are missing
    fix = f"mlflow db upgrade sqlite:///{path} (copy it first), or {anew}"
    return InputError("the tracking store is of an older MLflow", where=path, fix=fix)


def in_one_line(error: Exception) -> str:
    """What happened; MLflow hands on SQLAlchemy's errors with their statements."""
    if message := str(error) if isinstance(error, AthanorError) else isinstance(error, OSError) and in_words(error):
        return redact(message)
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(SQL_NOISE)]
    return redact(": ".join([type(error).__name__, *lines[:1]]))


def _migrations() -> dict[str, tuple[str, set[str]]]:
    """The versions of the database that the installed MLflow knows: the one before each, and the tables that it adds."""
    spec = importlib.util.find_spec("mlflow")
    folders = spec.submodule_search_locations if spec else None
    steps = {}
    for file in Path(folders[0], "store", "db_migrations", "versions").glob("*.py") if folders else ():
        text = file.read_text(encoding="utf-8", errors="replace")
        names = dict(re.findall(r"(?m)^(revision|down_revision) = (?:['\"](\w+)|None)", text))
        if "revision" in names:
            steps[names["revision"]] = (
                names.get("down_revision", ""),
                set(re.findall(r"create_table\(\s*['\"](\w+)", text)),
            )
    return steps

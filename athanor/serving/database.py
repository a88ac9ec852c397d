"""The file of the chats: its tables, opening it safely, and transactions. SQLite, used by one lock at a time."""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil

from athanor.base.errors import InputError

BUSY_SECONDS = 10.0  # how long a write waits for one of another process, such as `athanor chat accept`
APPLICATION = 0x41746863  # marks the file as ours, for `file` and for us
# The statements at place n bring version n to version n + 1. Never edit one that was released: add another.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE chats (
            id TEXT PRIMARY KEY, title TEXT NOT NULL, folded TEXT NOT NULL, system TEXT NOT NULL,
            models TEXT NOT NULL, sampling TEXT NOT NULL,
            leaf INTEGER REFERENCES messages(id) DEFERRABLE INITIALLY DEFERRED,
            created_at TEXT NOT NULL, updated_at TEXT NOT NULL)""",
        # No cascade from message to message: SQLite follows it 1,000 deep and then refuses, and a chat may be longer.
        # AUTOINCREMENT: the id of a deleted message must not come back as another one, commands name messages by it.
        """CREATE TABLE messages (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            chat TEXT NOT NULL REFERENCES chats(id) ON DELETE CASCADE,
            parent INTEGER REFERENCES messages(id) DEFERRABLE INITIALLY DEFERRED,
            role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
            content TEXT NOT NULL, folded TEXT NOT NULL, model TEXT, stats TEXT, created_at TEXT NOT NULL,
            verdict TEXT CHECK (verdict IN ('up', 'down')), correction TEXT,
            status TEXT CHECK (status IN ('candidate', 'accepted', 'rejected')))""",
        "CREATE INDEX messages_of_chat ON messages(chat)",
        "CREATE INDEX messages_of_parent ON messages(parent)",
        "CREATE INDEX corrections ON messages(id) WHERE correction IS NOT NULL",
        """CREATE TRIGGER turns_alternate BEFORE INSERT ON messages BEGIN
            SELECT RAISE(ABORT, 'user and assistant have to alternate') WHERE NOT (
                (NEW.role = 'user' AND NEW.parent IS NULL) OR EXISTS (
                    SELECT 1 FROM messages WHERE id = NEW.parent AND chat = NEW.chat AND role <> NEW.role));
        END""",
    ),
)


def timestamp(days_ago: float = 0.0) -> str:
    """A moment as the tables have it: these texts sort by time."""
    moment = datetime.now(UTC) - timedelta(days=days_ago)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def forget_empty(db: sqlite3.Connection) -> None:
    """Remove nameless chats of a day ago in which nothing was said: their first question failed, and no list has them."""
    unused = "title = '' AND updated_at < ? AND NOT EXISTS (SELECT 1 FROM messages WHERE chat = chats.id)"
    db.execute(f"DELETE FROM chats WHERE {unused}", [timestamp(days_ago=1)])


# File systems of other machines, as the kernel names them, in FUSE's case after the dot.
NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|afs|afpfs|webdav|9p|ceph|lustre|gpfs|beegfs|glusterfs|orangefs|pvfs2|ocfs2|gfs2|panfs|wekafs|davfs"
    r"|fuse\.(sshfs|glusterfs|rclone|s3fs|goofys|gcsfuse|juicefs|davfs2?|ceph(-fuse)?|beegfs|mount-s3)"
)


def on_network(path: Path) -> bool:
    """Whether a file lies on another machine's disk, as far as the table of mounts tells."""
    with suppress(OSError, psutil.Error):
        resolved = path.resolve()
        containing = [
            (len(Path(mounted.mountpoint).parts), number, mounted.fstype)
            for number, mounted in enumerate(psutil.disk_partitions(all=True))
            if resolved.is_relative_to(mounted.mountpoint)
        ]
        # The deepest mount point decides, and the last one of those at the same place.
        return bool(containing) and NETWORK.fullmatch(max(containing)[2]) is not None
    return False


class Unusable(InputError):
    """The file cannot be opened, read or written; the request is not at fault."""

    status = 503


class Database:
    """One open file. Use it from any thread: one block of `read` or `write` runs at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file, made if there is none, readable by its owner only.

        Unusable if it is damaged, somebody else's or of a newer version; nothing in it is changed then.
        """
        self.path = Path(path)
        self._lock = threading.RLock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Made by us before SQLite would make it with the umask's rights; its WAL gets the rights of the file.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(
                self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=64
            )
        except (OSError, sqlite3.Error) as error:
            fix = "make the folder writable, or name another file"
            raise Unusable(f"cannot be opened ({error})", where=str(self.path), fix=fix) from None
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        db = self._db
        db.row_factory = sqlite3.Row
        newest = len(MIGRATIONS)
        with self._as_unusable():
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
                raise Unusable("a database, but not of chats", where=str(self.path), fix="name another file")
            if self._version() > newest:
                what = f"written by a newer version (schema {self._version()}, this one knows {newest})"
                raise Unusable(what, where=str(self.path), fix="update the checkout, or name another file")
            with suppress(OSError):  # somebody else's, who lets us write: theirs to guard
                os.chmod(self.path, 0o600)
            # With WAL readers and a writer do not wait for each other, but all of them have to be on one machine.
            db.execute(f"PRAGMA journal_mode = {'DELETE' if on_network(self.path) else 'WAL'}")
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten in the file
        while self._version() < newest:
            with self.write():
                version = self._version()  # again: another process may have been quicker
                for statement in MIGRATIONS[version] if version < newest else ():
                    db.execute(statement)
                if version < newest:
                    db.execute(f"PRAGMA application_id = {APPLICATION}")
                    db.execute(f"PRAGMA user_version = {version + 1}")

    def _version(self) -> int:
        with self._as_unusable():
            return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def truncate_log(self) -> None:
        """Truncate the log beside the file, which still holds what was deleted; not while somebody reads there."""
        with self._lock, suppress(sqlite3.Error):  # what was deleted stays deleted, and the next one takes it out
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _as_unusable(self) -> Iterator[None]:
        """Turn faults of the file into Unusable, which names it."""
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):  # faults of the program
            raise
        except sqlite3.OperationalError as error:
            fix = "look for a full disk, missing rights, or another program that holds the file"
            raise Unusable(f"cannot be used ({error})", where=str(self.path), fix=fix) from None
        except sqlite3.DatabaseError as error:
            fix = f"keep it and begin a new one: mv {self.path} {self.path}.damaged (sqlite3's .recover may save it)"
            raise Unusable(f"damaged, or no database ({error})", where=str(self.path), fix=fix) from None

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """The lock and one view of the file for several statements."""
        with self._lock, self._as_unusable():
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of the block or nothing."""
        with self._lock, self._as_unusable():
            self._db.execute("BEGIN IMMEDIATE")  # a lock taken late may find that it read what is no longer so
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # some faults, a full disk for one, have rolled back already
                    self._db.execute("ROLLBACK")
                raise

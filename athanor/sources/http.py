"""Files of web servers: resumed by range, retried, checked, and published only when complete.

A file grows as `NAME.part` with what the server said of it in `NAME.json`. A part is continued only under the same ETag
or time of change, which If-Range confirms; a server that ignores the range, or whose file has changed, sends all of it
and the part begins again. Retries are ours: the client library's own would hide what was received before a cut.

A query may hold a signature that opens the file to everyone, so addresses are named without theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from athanor.base.artifacts import naming, read_json, sha256_bytes, sha256_file, write_json
from athanor.base.errors import InputError
from athanor.base.work import Facts, MapShards, check_stop
from athanor.sources.addresses import without_query
from athanor.sources.params import HttpSource, RemoteFile
from athanor.text.globs import Files

DONE = "fetched"  # the folder of what the executor knows of finished files
TRIES = 6  # in a row without one new byte
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 300.0
TIMEOUT_SECONDS = (30, 120)  # to connect; between two pieces
HEADERS = {"Accept-Encoding": "identity", "User-Agent": "athanor"}
PIECE_BYTES = 1 << 16  # a lost connection loses at most one piece
RESERVE_BYTES = 1 << 30  # of the disk, or a twentieth of a small one: what a body of unknown length leaves free
LOOK_BYTES = 1 << 24  # after so many bytes of such a body the free space is compared with the reserve
RETRYABLE_STATUSES = frozenset((408, 425, 429, 500, 502, 503, 504))
ADVICE = {
    401: "the server wants a login; fetch the file by hand and use a source of type files",
    403: "the server refuses the file; check its terms, or fetch it by hand and use a source of type files",
    410: "the file is gone; correct the url in params.yaml",
}


class RetryableError(Exception):
    """The request may be tried again.

    `after` is the pause in seconds that the server asked for; `charged` says that the failed try may cost money.
    """

    def __init__(self, why: str, after: float | None = None, *, charged: bool = False) -> None:
        super().__init__(why)
        self.why, self.after, self.charged = why, after, charged


def fetch(source: HttpSource, folder: Path, map_shards: MapShards) -> Files:
    """Bring every file of the source into `folder`, each by a task; returns (name for provenance, path) in order."""
    found = _paths(source, folder)
    for file, path in found:
        if not _is_complete(path, file):  # whatever an earlier task says
            shutil.rmtree(folder / DONE / path.name, ignore_errors=True)
    tasks = {path.name: {"file": file, "path": path} for file, path in found}
    map_shards(fetch_file, tasks, folder / DONE, desc=source.name)
    return [(without_query(file.url), path) for file, path in found]


def fetch_file(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: a file, at its own place: what came of it outlives the task's folder, which ends with a killed worker."""
    path: Path = task["path"]
    if not _is_complete(path, task["file"]):
        with open(path.with_name(f"{path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the worker of a run that was killed may live for some moments
            _File(task["file"], path).fetch()
    return {}


def probe(source: HttpSource, folder: Path) -> int:
    """Bytes that the servers announce of files that are not in `folder` yet; InputError for one that is refused.

    A server that is busy or cannot be reached now may be there when the file is fetched.
    """
    return sum(_File(file, path).announced() for file, path in _paths(source, folder) if not path.is_file())


def _paths(source: HttpSource, folder: Path) -> list[tuple[RemoteFile, Path]]:
    return [(file, folder / f"{number:05d}-{file_name(file.url)}") for number, file in enumerate(source.urls)]


def file_name(url: str) -> str:
    """A local file name: the last part of the address, without its query."""
    name = unquote(urlsplit(url).path).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[-100:] or "file"


def final_addresses(files: Files) -> dict[str, str]:
    """Where each file came from in the end, for those that a redirect led elsewhere."""
    final_urls = {name: read_json(_notes(path)).get("from", name) for name, path in files}
    return {name: final_url for name, final_url in final_urls.items() if final_url != name}


def facts(source: HttpSource, files: Files) -> Facts:
    """Provenance: address, size and hash of every file."""
    urls = [{"url": u, "bytes": p.stat().st_size, "sha256": read_json(_notes(p))["sha256"]} for u, p in files]
    return {"urls": urls, "license": source.license}


def _is_complete(path: Path, file: RemoteFile) -> bool:
    """Whether a finished file is unchanged since it was fetched, and has the requested checksum."""
    if not path.is_file() or not _notes(path).is_file():
        return False
    fetched = read_json(_notes(path)).get("sha256")
    return fetched is not None and fetched == sha256_file(path) and file.sha256 in (None, fetched)


def _notes(path: Path) -> Path:
    return path.with_name(path.name + ".json")


@dataclass
class _File:
    """The download of one file."""

    file: RemoteFile
    path: Path
    continued: bool = False

    def __post_init__(self) -> None:
        self.name = self.final_url = without_query(self.file.url)  # the address, and the one that redirects lead to
        self.part_path = self.path.with_name(self.path.name + ".part")

    def fetch(self) -> None:
        try:
            self._receive_all()
            if not self._publish():  # a part of older content, which the server took for the current one
                self._restart()
                self._receive_all()
                self._publish()
        finally:
            self.session.close()

    @functools.cached_property
    def session(self) -> Any:
        import requests

        session = requests.Session()
        session.hooks["response"].append(self._check_redirect)
        return session

    def _check_redirect(self, reply: Any, *_: Any, **__: Any) -> None:
        target = urljoin(reply.url, reply.headers.get("Location", "")) if reply.is_redirect else reply.url
        if reply.url.startswith("https:") and not target.lower().startswith("https:"):
            what = (
                f"the server leads from https to {without_query(target)}, where anyone can change the file on its way"
            )
            raise InputError(what, where=self.name, fix="fetch the file by hand and use a source of type files")

    def _receive_all(self) -> None:
        tries = 0
        while True:
            size_before = self._size()
            try:
                self._receive()
                return
            except RetryableError as error:
                tries = 0 if self._size() > size_before else tries + 1
                if tries >= TRIES:
                    what = f"{tries} tries in a row failed, the last: {error.why}"
                    fix = "check the network and the server; what was received is kept, run dvc repro again"
                    raise InputError(what, where=self.name, fix=fix) from None
                pause = error.after if error.after is not None else PAUSE_SECONDS * 2 ** max(tries - 1, 0)
                _wait(min(pause, MAX_PAUSE_SECONDS))

    def _size(self) -> int:
        return self.part_path.stat().st_size if self.part_path.is_file() else 0

    def _receive(self) -> None:
        """One request for all bytes after the part; RetryableError when not all of them came."""
        start, validator = self._size(), self._known_validator()
        with self._get({"Range": f"bytes={start}-", "If-Range": validator} if start and validator else {}) as reply:
            self._store(reply, start)

    def announced(self) -> int:
        """Bytes that the server says it would send; 0 where it does not say, or cannot be asked now."""
        with contextlib.closing(self.session), contextlib.suppress(RetryableError), self._get({}) as reply:
            return count(reply.headers.get("Content-Length")) or 0
        return 0

    @contextlib.contextmanager
    def _get(self, headers: dict[str, str]) -> Iterator[Any]:
        import requests

        options = {"headers": HEADERS | headers, "stream": True, "timeout": TIMEOUT_SECONDS}
        try:
            with self.session.get(self.file.url, **options) as reply:
                self._check_status(reply)
                self.final_url = without_query(reply.url)
                yield reply
        except requests.exceptions.InvalidURL:
            raise InputError("no usable address", where=self.name, fix="correct the url") from None
        except (requests.exceptions.RequestException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
                raise  # of our own disk
            raise _retry(error) from None

    def _known_validator(self) -> str | None:
        """What identifies the part's content to its server, if anything does."""
        return read_json(_notes(self.path)).get("validator") if _notes(self.path).is_file() else None

    def _check_status(self, reply: Any) -> None:
        code = reply.status_code
        if code in RETRYABLE_STATUSES:
            raise RetryableError(f"HTTP {code} {reply.reason}", retry_after(reply.headers.get("Retry-After")))
        if code == 416:  # the part is longer than the file is now
            self._restart()
            raise RetryableError("HTTP 416: the file has become shorter", 0.0)
        if code not in (200, 206):
            fix = ADVICE.get(code, "correct the url in params.yaml")
            raise InputError(f"HTTP {code} {reply.reason}", where=self.name, fix=fix)

    def _store(self, reply: Any, start: int) -> None:
        """Append the bytes of a reply to the part, or start over if the server sends the whole file."""
        if reply.status_code == 206:
            match = re.match(r"bytes ([0-9]{1,18})-[0-9]+/([0-9]{1,18}|\*)$", reply.headers.get("Content-Range", ""))
            same_content = validator(reply.headers) in (None, self._known_validator())
            if match is None or int(match[1]) != start or not same_content:
                self._restart()
                raise RetryableError("the server sent another range than was asked for", 0.0)
            total = None if match[2] == "*" else int(match[2])
            self.continued = True
        else:
            start, total = 0, count(reply.headers.get("Content-Length"))
            # Written before the bytes: a part without notes is never continued, one with another part's notes would be.
            self.part_path.unlink(missing_ok=True)
            write_json(_notes(self.path), {"url": self.name, "validator": validator(reply.headers)})
        self._check_room(total, start)
        size = start
        with naming(self.part_path), open(self.part_path, "ab") as out:
            while piece := self._piece(reply):
                out.write(piece)
                size += len(piece)
                if total is None and size // LOOK_BYTES > (size - len(piece)) // LOOK_BYTES:
                    self._check_reserve(size)
                elif total is not None and size > total:
                    break  # for ever, perhaps
                check_stop()
        if total is not None and (size := self._size()) != total:
            if size > total:
                self._restart()
            raise RetryableError(f"{size:,} of {total:,} bytes came")

    def _piece(self, reply: Any) -> bytes:
        """The next bytes as they are sent, not unpacked, because ranges count the bytes sent."""
        from urllib3.exceptions import HTTPError

        try:
            return reply.raw.read1(PIECE_BYTES, decode_content=False)
        except HTTPError as error:
            raise _retry(error) from None

    def _check_reserve(self, received: int) -> None:
        disk = shutil.disk_usage(self.part_path.parent)
        if disk.free < min(RESERVE_BYTES, disk.total // 20):
            self._restart()  # its length is not known, so it would not be complete next time either
            what = f"{received:,} bytes came, their number was not announced, and {disk.free:,} are free on the disk"
            raise InputError(what, where=self.name, fix="see what the server sends, and free some space")

    def _check_room(self, total: int | None, start: int) -> None:
        free = shutil.disk_usage(self.part_path.parent).free
        if total is not None and total - start > free:
            what = f"{total - start:,} bytes are to come, the disk has room for {free:,}"
            raise InputError(what, where=self.name, fix="free some space, then run dvc repro again")

    def _restart(self) -> None:
        self.part_path.unlink(missing_ok=True)

    def _publish(self) -> bool:
        """Check the part and move it to its final name; False for a wrong checksum that a restart may correct."""
        checksum = sha256_file(self.part_path) if self.part_path.is_file() else sha256_bytes(b"")
        if self.file.sha256 not in (None, checksum):
            if self.continued:
                self.continued = False
                return False
            self.part_path.unlink(missing_ok=True)
            what = f"the file has SHA-256 {checksum}, params.yaml says {self.file.sha256}"
            fix = "if the publisher changed the file on purpose, look at it and put the new hash there"
            raise InputError(what, where=self.name, fix=fix)
        self.part_path.touch()
        with open(self.part_path, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self.part_path, self.path)
        write_json(_notes(self.path), {"url": self.name, "from": self.final_url, "sha256": checksum})
        return True


def _wait(seconds: float) -> None:
    """Wait in steps of a second, so that a request to stop takes effect at once."""
    while seconds > 0:
        check_stop()
        time.sleep(min(seconds, 1.0))
        seconds -= 1.0
    check_stop()


def _retry(error: Exception) -> RetryableError:
    text = re.sub(r"\?[^\s'\")]+", "?...", " ".join(str(error).split()))  # the client library's words hold the query
    return RetryableError(f"{type(error).__name__}: {text[:200]}")


def validator(headers: Any) -> str | None:
    """A strong ETag, or the time of the last change; None for a weak ETag, which does not promise equal bytes."""
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else (headers.get("Last-Modified") if not tag else None)


def count(value: str | None) -> int | None:
    """The number in a header; None for anything but ASCII digits, because int() also reads digits of other scripts."""
    return int(value) if value is not None and re.fullmatch(r"\s*[0-9]{1,18}\s*", value) else None


def retry_after(value: str | None) -> float | None:
    """Seconds that a server asks to wait: a number or a date."""
    from urllib3 import Retry
    from urllib3.exceptions import InvalidHeader

    with contextlib.suppress(InvalidHeader, ValueError):
        return Retry().parse_retry_after(value or "")
    return None

"""What an attack must not reach, and whether it did: files, a process, listeners, and the processes it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
FOLDERS = (Path("/dev/shm"), Path("/tmp"))
LINGER_SECONDS = 3.0  # what ends by itself in this time after the evaluation is no survivor


class World:
    """Secrets and victims in a temporary folder that everyone may write. Orphans of attacks become our children."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.name = "matrix-" + secrets.token_hex(8)
        self.secret = "secret-" + secrets.token_hex(16)
        self.folder = Path(tempfile.mkdtemp(prefix="athanor-matrix-"))
        self.hits = 0
        self.victim: subprocess.Popen[bytes] | None = None
        self.port = self._listen(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)).getsockname()[1]
        self._listen(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", self.port))
        self._listen(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.name)
        self.unix = tempfile.mkdtemp(prefix="athanor-matrix-") + "/socket"
        self._listen(socket.AF_UNIX, socket.SOCK_STREAM, self.unix)
        os.chmod(self.unix, 0o777)
        os.chmod(Path(self.unix).parent, 0o755)

    def _listen(self, family: int, kind: int, address: Any) -> socket.socket:
        server = socket.socket(family, kind)
        server.bind(address)

        def serve() -> None:
            if kind == socket.SOCK_STREAM:
                server.listen()
            while True:
                with contextlib.suppress(OSError):
                    server.accept()[0].close() if kind == socket.SOCK_STREAM else server.recv(9)
                    self.hits += 1

        threading.Thread(target=serve, daemon=True).start()
        return server

    def reset(self, expected: str) -> dict[str, Any]:
        """Everything as new; what an attack is told of it."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self.folder.chmod(0o777)
        files = {
            "secret": self.secret,
            "victim": "still here",
            "battery.jsonl": f'{{"tests": ["{expected}"]}}\n',
            self.secret: "",
            "module_with_secret.py": f"SECRET = {self.secret!r}\n",
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o666)
        (self.folder / "link").symlink_to(self.secret)
        with contextlib.suppress(OSError):
            os.setxattr(self.folder / "secret", "user.secret", self.secret.encode())
        with contextlib.closing(sqlite3.connect(self.folder / "database")) as database:
            database.execute("create table t (secret)")
            database.execute("insert into t values (?)", (self.secret,))
            database.commit()
        (self.folder / "database").chmod(0o666)
        if self.victim is None or self.victim.poll() is not None:
            self.victim = subprocess.Popen(["sleep", "100000"], start_new_session=True)
            time.sleep(0.05)
        self.hits = 0
        self.before = self._state()
        names = {"secret": "secret", "victim_file": "victim", "database": "database", "link": "link"}
        return {
            "folder": str(self.folder), "pid": self.victim.pid, "port": self.port, "unix": self.unix,
            "abstract": self.name, "name": self.name, **{key: str(self.folder / name) for key, name in names.items()},
        }  # fmt: skip

    def changes(self) -> list[str]:
        """What is other than before the attack; survivors are ended."""
        found = []
        end = time.monotonic() + LINGER_SECONDS
        while (left := self._children()) and time.monotonic() < end:
            time.sleep(0.02)
        if left:
            found.append(f"{len(left)} processes left")
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        after = self._state()
        found += [key for key in after if after[key] != self.before[key]]
        for path in (path for folder in FOLDERS for path in folder.glob(f"*{self.name}*")):
            path.unlink()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.victim.pid, signal.SIGCONT)
        if found:
            self.victim.kill()
            self.victim.wait()
        return found

    def _state(self) -> dict[str, Any]:
        def describe(path: Path) -> tuple[Any, ...]:
            stat = path.lstat()
            attributes = {name: os.getxattr(path, name) for name in os.listxattr(path, follow_symlinks=False)}
            text = path.read_bytes() if path.is_file() and os.access(path, os.R_OK) else b""
            return stat.st_mode, stat.st_nlink, stat.st_mtime_ns, text, attributes

        pid = self.victim.pid
        state: dict[str, Any] = {
            "files": {path.name: describe(path) for path in sorted(self.folder.iterdir())},
            "shared files": sorted(str(path) for folder in FOLDERS for path in folder.glob(f"*{self.name}*")),
            "shared memory": [line.split()[:2] for line in Path("/proc/sysvipc/shm").read_text().splitlines()],
            "network": self.hits,
        }
        try:
            stopped = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ"
            state["process"] = (
                pid, stopped, os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid),
                os.sched_getscheduler(pid), resource.prlimit(pid, resource.RLIMIT_CORE),
            )  # fmt: skip
        except OSError:
            state["process"] = None
        return state

    def _children(self) -> list[int]:
        """Living children that we did not start; ended ones are taken leave of."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == os.getpid() and pid != self.victim.pid:
                    if state == "Z":
                        os.waitpid(pid, os.WNOHANG)
                    else:
                        found.append(pid)
        return found

    def close(self) -> None:
        if self.victim is not None:
            self.victim.kill()
        for folder in (self.folder, Path(self.unix).parent):
            shutil.rmtree(folder, ignore_errors=True)

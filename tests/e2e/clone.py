"""A real clone of this repository, to run commands in as a user would."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from athanor.base.strict import read_yaml
from athanor.runtime import presets

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = Path(__file__).with_name("elsewhere")  # in PYTHONPATH: what only Linux has is not there
STAGES = {name: stage["cmd"] for name, stage in read_yaml(ROOT / "dvc.yaml")["stages"].items()}


def environment(**more: str) -> dict[str, str]:
    """A user's environment: this Python's tools on PATH, none of the test run's own settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "MLFLOW_", "ATHANOR_", "OMP_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # What is wrong with the machine that runs the tests is not asked.
    return {**clean, "PATH": path, "ATHANOR_MACHINE_ROOT": "/nowhere", **more}


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """A web server on this machine that hands out a folder; yields its address."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Clone:
    """A checkout to run commands in."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(
        self, *command: str, check: bool = True, timeout: int = 600, **env: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, cwd=self.path, env=environment(**env), capture_output=True, text=True, timeout=timeout
        )
        if check and done.returncode:
            raise AssertionError(f"{command} exited {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return done

    def dvc(self, *words: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "dvc", *words, check=check, **env)


def make_clone(path: Path) -> Clone:
    """The files Git knows or would take, as one commit, with the micro preset as params.yaml."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and name != "dvc.lock" and not name.startswith(("metrics/", "plots/")):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path / name)
    (path / "params.yaml").write_text(presets.complete(ROOT / "presets" / "micro.yaml"))
    clone = Clone(path)
    clone.run("git", "init", "-q", "-b", "main")
    commit(clone, "start")
    return clone


def commit(clone: Clone, message: str) -> None:
    clone.run("git", "add", "-A")
    clone.run("git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qm", message)


def small_repo(path: Path, files: Mapping[str, str]) -> Clone:
    """A repository of Git and DVC with these files, whose pipeline ran once and was committed."""
    repo = Clone(path)
    path.mkdir()
    repo.run("git", "init", "-q", "-b", "main")
    for name, value in (("user.name", "t"), ("user.email", "t@localhost")):
        repo.run("git", "config", name, value)
    repo.dvc("init", "-q")
    for name, text in files.items():
        (path / name).write_text(text)
    repo.dvc("repro", "-q")
    commit(repo, "first")
    return repo

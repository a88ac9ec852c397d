"""A real `athanor serve` in a process of its own, on a free port, for the tests that speak to it over a socket."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 90.0  # seconds for what takes a moment on a quiet machine


def environment(**more: str) -> dict[str, str]:
    """Of a child: this checkout's code, one thread, no key from outside."""
    kept = {name: value for name, value in os.environ.items() if name not in ("ATHANOR_API_KEY", "DVC_ROOT")}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ATHANOR_THREADS": "1"} | more


def serve(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`athanor serve` that is expected to end by itself."""
    command = [sys.executable, "-m", "athanor", "serve", *words]
    return subprocess.run(
        command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=PATIENCE
    )


class Live:
    """A server in `folder`, started with `words`; leave the context to end it."""

    command: tuple[str, ...] = ("-m", "athanor", "serve")

    def __init__(self, folder: Path, *words: str, **more: str) -> None:
        self.errors = (folder / "stderr.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, *self.command, "--port", "0", *words],
            cwd=folder,
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.told = ""
        for line in self.process.stdout:
            self.told += line
            if found := re.search(r"open (http://(\S+):(\d+))/", line):
                self.url, self.host, self.port = found[1], found[2], int(found[3])
                break
        else:
            raise AssertionError(f"no server: {self.told} {self.said()}")

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *problem: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.stdout.close()
            self.errors.close()

    def said(self) -> str:
        """What it wrote to standard error."""
        self.errors.flush()
        return Path(self.errors.name).read_text()

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as answer:
            return answer.read()

    def post(self, path: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def metrics(self) -> dict[tuple[str, str], float]:
        """(name, value of the label "end" or "") -> number, summed over models."""
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").decode()):
            for sample in family.samples:
                key = (sample.name, sample.labels.get("end", ""))
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def under_way(self) -> float:
        return self.metrics()[("athanor_answers_under_way", "")]

    def made(self) -> float:
        """Tokens made so far, of all answers that have ended."""
        return self.metrics().get(("athanor_generated_tokens_total", ""), 0.0)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def connect(self, *, receive_bytes: int = 0) -> socket.socket:
        one = socket.socket()
        if receive_bytes:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        one.settimeout(PATIENCE)
        one.connect((self.host, self.port))
        return one

    def raw(self, body: Any, path: str = "/v1/chat/completions") -> bytes:
        """A request to complete a chat, as bytes for `connect`."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`; fails after long patience."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited in vain: {what}")


def lay_out(root: Path, *exports: tuple[str, Path]) -> Path:
    """Directories NAME/hf under `root`, each a copy of an export's directory."""
    for name, folder in exports:
        shutil.copytree(folder, root / name / "hf")
    return root


def streamed(lines: Iterator[bytes]) -> list[Any]:
    """The data of server-sent events."""
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]

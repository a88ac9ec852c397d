"""A real `athanor serve` in a process of its own, for tests that speak to it over a socket."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 90.0  # seconds for what takes a moment on a quiet machine
CHAT = "/v1/chat/completions"


def environment(**more: str) -> dict[str, str]:
    """Of a child: this checkout's code, one thread, no key from outside."""
    kept = {name: value for name, value in os.environ.items() if name not in ("ATHANOR_API_KEY", "DVC_ROOT")}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ATHANOR_THREADS": "1"} | more


class Live(AbstractContextManager):
    """A server in `folder`, started with `words`; leave the context to end it."""

    def __init__(self, folder: Path, *words: str, **more: str) -> None:
        written = folder / "stderr.txt"
        self.said = written.read_text  # to standard error
        command = [sys.executable, "-m", "athanor", "serve", "--port", "0", *words]
        with written.open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment(**more), stdout=subprocess.PIPE, stderr=errors, text=True
            )
        for line in self.process.stdout:
            if found := re.search(r"open http://(\S+):(\d+)/", line):
                self.host, self.port = found[1], int(found[2])
                self.url = f"http://{self.host}:{self.port}"
                break
        else:
            raise AssertionError(f"no server: {self.said()}")

    def __exit__(self, *problem: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.stdout.close()

    def ask(self, body: Any, path: str = CHAT, **headers: str) -> tuple[int, set[str], Any]:
        """A POST, or a GET where body is None: status, names that were ignored, and the reply or a stream's list."""
        method = "GET" if body is None else "POST"
        answer = requests.request(method, self.url + path, json=body, headers=headers, timeout=PATIENCE)
        kind, ignored = answer.headers["content-type"], answer.headers.get("X-Athanor-Ignored")
        if "event-stream" in kind:
            reply = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {")]
        else:
            reply = answer.json() if kind == "application/json" else answer.text
        return answer.status_code, set(ignored.split(", ") if ignored else ()), reply

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection((self.host, self.port), PATIENCE, (source, 0))

    def raw(self, body: Any) -> bytes:
        """A request to complete a chat, as bytes for `connect`."""
        data = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def said(reply: Any, index: int = 0) -> str:
    """An answer of a chat, whole or streamed."""
    if isinstance(reply, dict):
        return reply["choices"][index]["message"]["content"]
    choices = [choice for chunk in reply for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)

"""Servers that tests speak to over a socket; `Live` is a real `athanor serve` in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 90.0  # seconds for what takes a moment on a quiet machine
CHAT = "/v1/chat/completions"


def environment(**more: str) -> dict[str, str]:
    """Of a child: this checkout's code, one thread, no key from outside."""
    kept = {name: value for name, value in os.environ.items() if name not in ("ATHANOR_API_KEY", "DVC_ROOT")}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ATHANOR_THREADS": "1"} | more


class Address:
    """Where a server listens."""

    host, port = "127.0.0.1", 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(self, body: Any, path: str = CHAT, **headers: str) -> tuple[int, set[str], Any]:
        """A POST, or a GET where body is None: status, names that were ignored, and the reply or a stream's list."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                names = {name for name in answer.headers.get("X-Athanor-Ignored", "").split(", ") if name}
                if isinstance(body, dict) and body.get("stream"):
                    return answer.status, names, streamed(iter(answer))
                said = answer.read()
                json_sent = answer.headers["content-type"] == "application/json"
                return answer.status, names, json.loads(said) if json_sent else said.decode()
        except urllib.error.HTTPError as error:
            return error.code, set(), json.loads(error.read())

    def connect(self, source: str = "127.0.0.1", receive_bytes: int = 0) -> socket.socket:
        client = socket.socket()
        client.settimeout(PATIENCE)
        if receive_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.bind((source, 0))
        client.connect((self.host, self.port))
        return client

    def raw(self, body: Any) -> bytes:
        """A request to complete a chat, as bytes for `connect`."""
        data = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Live(Address):
    """A server in `folder`, started with `words`; leave the context to end it."""

    def __init__(self, folder: Path, *words: str, **more: str) -> None:
        self.errors = (folder / "stderr.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "athanor", "serve", "--port", "0", *words],
            cwd=folder,
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        for line in self.process.stdout:
            if found := re.search(r"open http://(\S+):(\d+)/", line):
                self.host, self.port = found[1], int(found[2])
                break
        else:
            raise AssertionError(f"no server: {self.said()}")

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
        return Path(self.errors.name).read_text()

    def engines(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


def said(reply: Any, index: int = 0) -> str:
    """An answer of a chat, whole or streamed."""
    if isinstance(reply, dict):
        return reply["choices"][index]["message"]["content"]
    choices = [choice for chunk in reply for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def streamed(lines: Iterator[bytes]) -> list[Any]:
    """The data of server-sent events."""
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]

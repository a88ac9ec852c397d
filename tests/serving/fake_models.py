"""Models of a server without discovery: real engines on given GGUF files, and a server over them in this process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from athanor.base.errors import suggest
from athanor.export.gguf_writer import write_gguf
from athanor.export.source import load_source
from athanor.llamacpp.engine import Engine, Job
from athanor.serving.app import Connection, Server, build_app
from athanor.serving.models import NoModel
from athanor.tokenizer.tokenizer import Tokenizer
from tests.serving.live import PATIENCE, streamed

DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Served:
    id: str
    engine: Engine
    tokenizer: Tokenizer | None
    context_tokens: int
    continues: bool
    defaults: Mapping[str, Any]


class FakeModels:
    """`files`: id -> (job, tokenizer, whether it continues a text)."""

    def __init__(self, files: Mapping[str, tuple[Job, Tokenizer | None, bool]]) -> None:
        self.files = files
        self.all = {
            name: Served(
                name, Engine(job), tokenizer, job.context_tokens, continues, DEFAULTS | {"max_new_tokens": 128}
            )
            for name, (job, tokenizer, continues) in files.items()
        }

    def states(self) -> list[dict[str, Any]]:
        rows = {"created": 1.8e9, "state": "idle", "reason": None, "parameters": 1}
        return [
            {**rows, "id": name, "label": name, "context_tokens": one.context_tokens, "defaults": one.defaults}
            for name, one in self.all.items()
        ]

    def default(self) -> str:
        return next(iter(self.all))

    def available(self, name: str) -> Served:
        if name not in self.all:
            raise NoModel(f"there is no model '{name[:200]}'", where="model", fix=suggest(name, self.all))
        return self.all[name]

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Served]:
        yield self.all[name]

    def engines(self) -> dict[str, Engine]:
        return {name: one.engine for name, one in self.all.items()}

    def refresh(self) -> None: ...

    async def close(self) -> None:
        await asyncio.gather(*(one.engine.close() for one in self.all.values()))


def parrot_job(folder: Path, parts: Path, rows: int = 4) -> tuple[Job, Tokenizer, bool]:
    """The parrot as a GGUF file in `folder`."""
    path = folder / "parrot.gguf"
    write_gguf(path, load_source(parts / "model", parts / "tokenizer", "parrot", {"sft": "0" * 64}), "f32")
    return Job(str(path), 512, rows=rows, exact=True), Tokenizer.load(parts / "tokenizer"), False


class Running:
    """A server of these models in a thread; leave the context to end it."""

    def __init__(self, models: FakeModels, **options: Any) -> None:
        self.models = models
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = build_app(models, lambda limit: [], **options)
        self.server = Server(uvicorn.Config(app, log_level="warning", http=Connection, ws="none"))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def __enter__(self) -> Running:
        self.thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()

    def ask(self, body: Any, path: str = "/v1/chat/completions") -> tuple[int, set[str], Any]:
        """(status, names in the header, the reply or the list of a stream's)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                names = {name for name in answer.headers.get("X-Athanor-Ignored", "").split(", ") if name}
                stream = isinstance(body, dict) and body.get("stream")
                return answer.status, names, streamed(iter(answer)) if stream else json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, set(), json.loads(error.read())

    def raw(self, body: Any, path: str = "/v1/chat/completions") -> bytes:
        """A request as bytes, for `connect`."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    def connect(self, source: str = "127.0.0.1", receive_bytes: int = 0) -> socket.socket:
        client = socket.socket()
        client.settimeout(PATIENCE)
        if receive_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.bind((source, 0))
        client.connect(("127.0.0.1", self.port))
        return client


def said(reply: Any) -> str:
    if isinstance(reply, dict):
        return reply["choices"][0]["message"]["content"]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply if chunk["choices"])

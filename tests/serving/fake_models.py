"""Models of a server without discovery: real engines on given GGUF files, and a server over them in this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from athanor.base.errors import suggest
from athanor.export.gguf_writer import write_gguf
from athanor.export.llamacpp.engine import Engine, Job
from athanor.export.source import load_source
from athanor.serving.app import Connection, Server, build_app
from athanor.serving.models import NoModel
from athanor.tokenizer.tokenizer import Tokenizer
from tests.catalog.models_tiny import write_export
from tests.evaluation.tiny import always_says, write_tiny_tokenizer
from tests.serving.live import PATIENCE, Address

DEFAULTS = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_new_tokens": 128,
}
ENDLESS_CONTEXT = 30_000


class FakeModels:
    """`files`: id -> (job, tokenizer, whether it continues a text)."""

    def __init__(self, files: Mapping[str, tuple[Job, Tokenizer | None, bool]]) -> None:
        self.all = {
            name: SimpleNamespace(
                id=name,
                engine=Engine(job),
                tokenizer=tokenizer,
                context_tokens=job.context_tokens,
                continues=continues,
                defaults=DEFAULTS,
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

    def available(self, name: str) -> SimpleNamespace:
        if name not in self.all:
            raise NoModel(f"there is no model '{name[:200]}'", where="model", fix=suggest(name, self.all))
        return self.all[name]

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[SimpleNamespace]:
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


@pytest.fixture(scope="module")
def parrot(parrot_parts, tmp_path_factory):
    return parrot_job(tmp_path_factory.mktemp("gguf"), parrot_parts)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that says one word until it is stopped; its tokenizer is beside the GGUF file."""
    root = tmp_path_factory.mktemp("endless")
    tokenizer = write_tiny_tokenizer(root / "tokenizer")
    model = always_says(tokenizer, tokenizer.encode(" the")[0], ENDLESS_CONTEXT)
    write_export(root / "endless", model, tokenizer, root / "tokenizer", types=("f32",))
    return Job(str(next((root / "endless").glob("*.gguf"))), ENDLESS_CONTEXT, rows=2), tokenizer, False


class Running(Address):
    """A server of these models in a thread; leave the context to end it."""

    def __init__(self, models: FakeModels, **options: Any) -> None:
        self.models = models
        self.socket = socket.create_server((self.host, 0))
        self.port = self.socket.getsockname()[1]
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


def said(reply: Any) -> str:
    if isinstance(reply, dict):
        return reply["choices"][0]["message"]["content"]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply if chunk["choices"])

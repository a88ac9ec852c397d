"""A server of both APIs on this machine: answers that depend on the request alone, and faults in the order scripted."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.sources.world import serving

VOWELS, CONSONANTS = "aeiou", "bdfgklmnprstvz"
WORDS = [a + b + c + d for a in CONSONANTS for b in VOWELS for c in CONSONANTS[:7] for d in VOWELS]
Talk = list[tuple[str, str]]  # questions and answers


def sentence(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words)).capitalize()


def talks(seed: str, count: int = 2) -> list[Talk]:
    """Conversations that no other seed has."""
    dice = random.Random(seed)
    return [[(sentence(dice, 9) + "?", sentence(dice, 18) + ".")] for _ in range(count)]


def written(found: list[Talk]) -> str:
    roles = ("user", "assistant")
    rows = [[{"role": r, "content": c} for pair in talk for r, c in zip(roles, pair, strict=True)] for talk in found]
    return json.dumps({"conversations": [{"messages": messages} for messages in rows]})


@dataclass
class Fault:
    """What is sent in the place of an answer."""

    status: int = 200
    body: Any = None  # JSON or text; None for the usual answer
    headers: dict[str, str] = field(default_factory=dict)
    text: str | None = None  # what the model says
    end: str | None = None  # why the model stopped
    how: str = "send"  # or "reset" in the middle, "short" of what was announced, "hang"


@dataclass
class ModelServer:
    """`script` holds faults for the requests to come, None for a usual answer; then all answers are usual."""

    url: str = ""
    script: list[Fault | None] = field(default_factory=list)
    say: Callable[[str], str] = lambda identity: written(talks(identity))
    on_request: Callable[[int], None] = lambda number: None
    seen: list[str] = field(default_factory=list)  # of each request a hash of its body
    answered: Counter[str] = field(default_factory=Counter)  # usual answers given, which are charged
    tokens: int = 0  # charged
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    usage: bool = True
    flying: int = 0
    most_flying: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, server: ModelServer, *arguments: Any) -> None:
        self.model = server
        super().__init__(*arguments)

    def do_GET(self) -> None:  # noqa: N802
        """Where a redirect that was followed would arrive."""
        self.do_POST()

    def do_POST(self) -> None:  # noqa: N802
        model = self.model
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        identity = hashlib.sha256(raw).hexdigest()[:16]
        with model.lock:
            model.times.append(time.monotonic())
            model.seen.append(identity)
            model.headers.append(dict(self.headers))
            model.bodies.append(json.loads(raw or b"{}"))
            model.paths.append(self.path)
            number = len(model.seen)
            fault = model.script.pop(0) if model.script else None
            model.flying += 1
            model.most_flying = max(model.most_flying, model.flying)
        self.flying = True
        try:
            model.on_request(number)
            self.reply(identity, raw, fault or Fault())
        except OSError:  # the client is gone
            self.close_connection = True
        finally:
            self.land()

    def land(self) -> None:
        """Before the last byte: the client may send its next request before this thread runs again."""
        with self.model.lock:
            self.model.flying -= self.flying
            self.flying = False

    def reply(self, identity: str, raw: bytes, fault: Fault) -> None:
        if fault.how == "hang":
            self.model.over.wait(60)
            self.close_connection = True
            return
        body = fault.body
        if body is None:
            text = self.model.say(identity) if fault.text is None else fault.text
            body = self.answer(text, len(raw) // 4, len(text) // 4, fault.end)
            with self.model.lock:
                self.model.answered[identity] += 1
                self.model.tokens += len(raw) // 4 + len(text) // 4
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.land()
        self.send_response(fault.status)
        for name, value in fault.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) + (9 if fault.how == "short" else 0)))
        self.end_headers()
        if fault.how != "send":
            self.close_connection = True
            self.wfile.write(data[: len(data) // 2] if fault.how == "reset" else data)
            self.wfile.flush()
            if fault.how == "reset":  # what lingers is thrown away: the other side sees a reset
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            return
        self.wfile.write(data)

    def answer(self, text: str, read: int, wrote: int, end: str | None) -> dict[str, Any]:
        if self.path.endswith("/messages"):
            blocks = [{"type": "text", "text": text}]
            usage = {"usage": {"input_tokens": read, "output_tokens": wrote}} if self.model.usage else {}
            return {"type": "message", "model": "m-1", "content": blocks, "stop_reason": end or "end_turn", **usage}
        usage = {"usage": {"prompt_tokens": read, "completion_tokens": wrote}} if self.model.usage else {}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": end or "stop"}
        return {"object": "chat.completion", "model": "m-1", "choices": [choice], **usage}

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def model_server() -> Iterator[ModelServer]:
    model = ModelServer()
    with serving(functools.partial(Handler, model)) as model.url:
        try:
            yield model
        finally:
            model.over.set()

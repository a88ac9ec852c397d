"""A server of both APIs on this machine: replies that depend on the request alone, and faults in the order scripted."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.sources.world import serving

SOUNDS = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in "bdfgklm"]


def talks(seed: str, count: int = 2) -> list[list[str]]:
    """Conversations (question, answer) that no other seed has."""
    dice = random.Random(seed)
    words = [[dice.choice(SOUNDS) + dice.choice(SOUNDS) for _ in range(20)] for _ in range(count)]
    return [[f"What is {' '.join(row[:6])}?", f"{' '.join(row[6:])}."] for row in words]


def written(found: list[list[str]]) -> str:
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in found]
    return json.dumps({"conversations": [{"messages": messages} for messages in rows]})


@dataclass
class Fault:
    """Sent in the place of a reply; status 0 breaks off in the middle of one, which the server charges."""

    status: int = 0
    body: Any = ""
    headers: dict[str, str] = field(default_factory=lambda: {"retry-after-ms": "1"})


@dataclass
class ModelServer:
    """`script` holds faults for the requests to come, None for a usual reply; then all replies are usual."""

    url: str = ""
    script: list[Fault | None] = field(default_factory=list)
    say: Callable[[str], str] = lambda identity: written(talks(identity))
    on_request: Callable[[int], object] = lambda number: None
    seen: int = 0
    charged: Counter[str] = field(default_factory=Counter)  # replies, by a hash of their request
    tokens: int = 0  # charged
    keys: set[str] = field(default_factory=set)
    flying: int = 0
    most_flying: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, server: ModelServer, *arguments: Any) -> None:
        self.model = server
        super().__init__(*arguments)

    def do_POST(self) -> None:  # noqa: N802
        model, raw = self.model, self.rfile.read(int(self.headers["Content-Length"]))
        identity = hashlib.sha256(raw).hexdigest()
        with model.lock:
            model.seen, model.flying = model.seen + 1, model.flying + 1
            model.most_flying = max(model.most_flying, model.flying)
            model.keys.add(self.headers["authorization"])
            number, fault = model.seen, model.script.pop(0) if model.script else None
        model.on_request(number)
        status, body = 200, self.reply(model.say(identity), len(raw) // 4)
        with model.lock:  # before the last byte: the client may send its next request before this thread runs again
            model.flying -= 1
            if fault and fault.status:
                status, body = fault.status, fault.body
            else:
                model.charged[identity] += 1
                model.tokens += body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
        data = json.dumps(body).encode()
        self.close_connection = bool(fault)
        self.send_response(status)
        for name, value in {**(fault.headers if fault else {}), "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data if not fault or fault.status else data[:20])

    def reply(self, text: str, read: int) -> dict[str, Any]:
        """A body that has the fields of both APIs."""
        wrote, message = len(text) // 4, {"role": "assistant", "content": text}
        usage = {"input_tokens": read, "output_tokens": wrote, "total_tokens": read + wrote}
        return {"content": [{"type": "text", "text": text}], "choices": [{"message": message}], "usage": usage}

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def model_server() -> Iterator[ModelServer]:
    model = ModelServer()
    with serving(functools.partial(Handler, model)) as model.url:
        yield model

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


def sentence(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(SOUNDS) + dice.choice(SOUNDS) for _ in range(words)).capitalize()


def talks(seed: str, count: int = 2) -> list[list[str]]:
    """Conversations (question, answer) that no other seed has."""
    dice = random.Random(seed)
    return [[sentence(dice, 9) + "?", sentence(dice, 18) + "."] for _ in range(count)]


def written(found: list[list[str]]) -> str:
    roles = ("user", "assistant")
    rows = [[{"role": role, "content": text} for role, text in zip(roles, talk, strict=True)] for talk in found]
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
    seen: list[str] = field(default_factory=list)  # of each request a hash of its body
    charged: Counter[str] = field(default_factory=Counter)  # replies, by that hash
    tokens: int = 0  # charged
    keys: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
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
        identity = hashlib.sha256(raw).hexdigest()[:16]
        with model.lock:
            model.seen.append(identity)
            model.keys.add(self.headers["x-api-key"] or self.headers["authorization"])
            model.paths.add(self.path)
            number = len(model.seen)
            fault = model.script.pop(0) if model.script else None
            model.flying += 1
            model.most_flying = max(model.most_flying, model.flying)
        model.on_request(number)
        text = model.say(identity)
        read, wrote = len(raw) // 4, len(text) // 4
        with model.lock:  # before the last byte: the client may send its next request before this thread runs again
            model.flying -= 1
            if not (fault and fault.status):
                model.charged[identity] += 1
                model.tokens += read + wrote
        body = fault.body if fault and fault.status else self.reply(text, read, wrote)
        data = json.dumps(body).encode()
        try:
            self.send_response(fault.status if fault and fault.status else 200)
            for name, value in (fault.headers if fault else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.close_connection = bool(fault)
            self.wfile.write(data if not fault or fault.status else data[:20])
        except OSError:  # the client was killed
            self.close_connection = True

    def reply(self, text: str, read: int, wrote: int) -> dict[str, Any]:
        if self.path.endswith("/messages"):
            usage = {"input_tokens": read, "output_tokens": wrote}
            return {"type": "message", "content": [{"type": "text", "text": text}], "usage": usage}
        usage = {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}
        return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def model_server() -> Iterator[ModelServer]:
    model = ModelServer()
    with serving(functools.partial(Handler, model)) as model.url:
        yield model

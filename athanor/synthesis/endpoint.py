"""Questions to a server of either API, by the SDK of its provider, within a budget, and a log of them.

The SDK tries again by itself (429, 408, 409, 5xx, a lost connection), with pauses and Retry-After. Its HTTP client is
replaced by one that reserves budget before each try leaves and enters what became of it in the log, an append-only file.
A line is on the disk before its request leaves, and another one before its reply counts. So a process that dies at any
moment loses at most the replies to the requests in flight, and a later one counts those at their most. Lines:

    sent    a request leaves; `most` tokens are all that it may use
    answer  its reply; `used` tokens by the server's own count, or null
    free    it was refused, or found no server, and cost nothing
    lost    it got no reply; if it left, the server may charge for it, and it counts at its most
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from athanor.base.artifacts import fsync_dir
from athanor.base.errors import InputError, ParamsError
from athanor.base.work import Facts
from athanor.sources.http import retry_after
from athanor.synthesis.params import SyntheticParams
from athanor.synthesis.requests import Request

INSTALL = "pip install -r requirements-side.txt"
# This machine and its own network, for which no proxy is asked.
LOCAL = re.compile(
    r"localhost|[a-z][^.:]*|.+\.local(host)?|::1|(127|10)(\.\d+){3}|192\.168(\.\d+){2}|172\.(1[6-9]|2\d|3[01])(\.\d+){2}"
)
MIN_KEY_CHARS = 8  # a shorter one could not be searched for: it is in ordinary text
MAX_RETRIES = 5  # of one request, when the server is busy or breaks off
MAX_PAUSE_SECONDS = 120.0  # a server that asks for more is better asked another day


class Halt(BaseException):
    """The request may not leave. No Exception: after those the SDKs try again."""


class Ledger:
    """The log of one name, and what was spent under it. Threads may share it; one process at a time may write."""

    def __init__(self, folder: Path, params: SyntheticParams) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{params.name}.jsonl"
        self.replies: dict[str, str] = {}  # by request
        self.requests = self.tokens = 0  # spent
        self.halt = threading.Event()  # nothing more is sent
        self._params, self._turn = params, threading.Condition()
        self._in_flight: dict[str, int] = {}  # by request, the most tokens it may use
        self._file = open(self.path, "ab")
        fsync_dir(folder)
        for line in self.path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # of a process that was killed within a write
                self._apply(json.loads(line))
        self.requests += len(self._in_flight)  # when their process died
        self.tokens += sum(self._in_flight.values())
        self._in_flight.clear()

    def reserve(self, request: Request) -> None:
        """Enter a request that is about to leave; Halt if it might pass a limit, or nothing is sent any more.

        All in flight count at their most, so it waits for their replies, which may leave room.
        """
        budget, most = self._params.budget, request.input_tokens + self._params.max_output_tokens
        with self._turn:
            if request.identity in self._in_flight:  # an earlier try, which broke off
                self.enter("lost", request)
            while (
                self.requests + len(self._in_flight) >= budget.requests
                or self.tokens + sum(self._in_flight.values()) + most > budget.tokens
            ):
                if not self._in_flight:
                    self.halt.set()
                    break
                self._turn.wait()
            if self.halt.is_set():
                raise Halt
            self.enter("sent", request, most=most)

    def enter(self, kind: str, request: Request, **facts: Any) -> None:
        """Add a line, which is on the disk when it counts."""
        line = {"type": kind, "request": request.identity, **facts, "time": int(time.time())}
        with self._turn:
            # On a line of its own, whatever a killed process left. What a full disk did not take stays ahead in the buffer.
            self._file.write(b"\n" + json.dumps(line).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._apply(line)
            self._turn.notify_all()

    def _apply(self, line: Facts) -> None:
        kind, request = line["type"], line["request"]
        most = self._in_flight.pop(request, None)
        if most is not None and kind != "free":
            self.requests += 1
            self.tokens += line.get("used") or most
        if kind == "sent":
            self._in_flight[request] = line["most"]
        elif kind == "answer":
            self.replies[request] = line["text"]


def is_local(base_url: str) -> bool:
    """True for an address of this machine or its network; ParamsError for one that would not keep the key."""
    parts = urlsplit(base_url)
    local = bool(LOCAL.fullmatch(parts.hostname or ""))
    if parts.scheme != "https" and not (parts.scheme == "http" and local) or parts.username or parts.query:
        fix = "use https://host, or http:// for this machine and its network, without user and query"
        raise ParamsError("key and text would be sent in the clear, or nowhere", where="synthetic.base_url", fix=fix)
    return local


def key_from(name: str | None) -> str:
    """The key in an environment variable; InputError for one that cannot be a key, without showing it."""
    # Without a key an SDK would look for one, and send it.
    key = os.environ.get(name, "").strip() if name else "no-key-needed"
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise InputError("holds no key", where=f"environment variable {name}", fix=f"export {name}=...")
    return key


def asker(params: SyntheticParams, key: str, ledger: Ledger) -> Callable[[Request], str]:
    """A function that has a request answered and returns why it was not, or "". Threads may share it."""
    is_anthropic = params.api == "anthropic"
    try:
        import httpx2

        if is_anthropic:
            import anthropic as sdk
        else:
            import openai as sdk
    except ImportError:
        raise InputError(f"the package {params.api} is not installed", fix=INSTALL) from None
    current = threading.local()

    class Metered(sdk.DefaultHttpxClient):
        """Sends one try, if the budget has room for it."""

        def send(self, *args: Any, **options: Any) -> Any:
            ledger.reserve(current.request)
            try:
                reply = super().send(*args, **options)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                ledger.enter("free", current.request)
                raise
            if not reply.is_success:
                ledger.enter("free", current.request)
            if (retry_after(reply.headers.get("Retry-After")) or 0) > MAX_PAUSE_SECONDS:
                reply.headers["x-should-retry"] = "false"
            return reply

    root = params.base_url.rstrip("/").removesuffix("/v1")
    client = (sdk.Anthropic if is_anthropic else sdk.OpenAI)(
        api_key=key,
        base_url=root if is_anthropic else f"{root}/v1",
        http_client=Metered(follow_redirects=False, trust_env=not is_local(root)),
        timeout=params.timeout_seconds,
        max_retries=MAX_RETRIES,
    )

    def ask(request: Request) -> str:
        current.request = request
        try:
            text, used = _answer(client, params, request)
            ledger.enter("answer", request, text=text.replace(key, "***"), used=used)
        except Exception as error:  # of the SDK, or a reply of another shape
            why = f"{type(error).__name__}: {error}"[:500].replace(key, "***")
            ledger.enter("lost", request, why=why)
            return why
        return ""

    return ask


def _answer(client: Any, params: SyntheticParams, request: Request) -> tuple[str, int | None]:
    """Text of a reply, and the tokens used; any exception for a reply of another shape."""
    user = {"role": "user", "content": request.user}
    if params.api == "anthropic":
        limits = {"model": params.model, "max_tokens": params.max_output_tokens}
        reply = client.messages.create(system=request.system, messages=[user], **limits)
        return reply.content[0].text, reply.usage.input_tokens + reply.usage.output_tokens
    limits = {"model": params.model, params.output_limit: params.max_output_tokens}
    reply = client.chat.completions.create(messages=[{"role": "system", "content": request.system}, user], **limits)
    return reply.choices[0].message.content, reply.usage and reply.usage.total_tokens

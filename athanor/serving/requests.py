"""Reading a request's body and answering errors, the same for all routes.

An error is {"error": {"message", "type", "param", "code"}}, as OpenAI's, with a 4xx, or 503 where a model is the cause.
An AthanorError may have a `status` and a `code` of its own; otherwise it is 400.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse

from athanor.base.errors import AthanorError

MAX_BODY_BYTES = 1 << 20  # the longest text with every character escaped would fit; parsing it takes some 20 ms
BODY_SECONDS = 30.0
SHARE = 4  # one address may hold a quarter of what may be under way
CODES = {401: "invalid_api_key", 404: "unknown_url", 405: "method_not_supported", 429: "rate_limit_exceeded"}
PARAM = re.compile(r"(?!llama\.cpp)([a-z_]+(\.\w+)*): ")  # a message about a field begins with its name


class Refused(AthanorError):
    """A request that cannot be met; `status` is of HTTP, `code` is for programs."""

    def __init__(self, status: int, what: str, fix: str = "", code: str | None = None) -> None:
        super().__init__(what, fix=fix)
        self.status, self.code = status, code


class Limit:
    """Answers under way, of the page and of OpenAI's clients together; each address has a share, but for `trusted`."""

    def __init__(self, maximum: int, trusted: Collection[str] = ()) -> None:
        self.maximum, self.trusted = maximum, trusted
        self._held: Counter[str] = Counter()

    def begin(self, request: Request, count: int = 1) -> Callable[[], None]:
        """Count some more; call what is returned at their end. Refused (429) beyond what may be under way.

        A single request may ask for more than the share.
        """
        address = request.client.host if request.client else ""
        share = self.maximum if address in self.trusted else max(1, self.maximum // SHARE)
        for held, most in ((self._held.total(), self.maximum), (self._held[address], share)):
            if held and held + count > most:
                raise Refused(429, f"{held} answers are under way", "ask again in a moment")
        self._held[address] += count

        def end() -> None:
            self._held -= Counter({address: count})  # drops addresses without any

        return end


class EventStream(StreamingResponse):
    """Server-sent events; `on_end` runs once they are over or the client has gone, in whatever way."""

    def __init__(
        self, lines: AsyncIterator[str], on_end: Callable[[], Awaitable[None]], headers: Mapping[str, str]
    ) -> None:
        self.on_end = on_end
        super().__init__(lines, media_type="text/event-stream", headers={"X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.on_end()


def fault(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "requests" if status == 429 else "invalid_request_error"
    named = PARAM.match(message) if status < 500 else None
    return {"message": message, "type": kind, "param": named and named[1], "code": code or CODES.get(status)}


def problem(status: int, message: str, code: str | None = None) -> JSONResponse:
    headers = {"Retry-After": "1"} if status == 429 else {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": fault(status, message, code)}, status, headers)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


async def read(request: Request) -> dict[str, Any]:
    """The object in a request's body; Refused says in one line what is wrong with it."""
    # A page of another origin can send a form without asking the browser's leave, but no JSON.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "send Content-Type: application/json")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise Refused(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
    except ClientDisconnect:
        raise Refused(499, "the client has gone") from None
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    try:
        body = json.loads(data.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(400, f"the body is no JSON ({reason[:200]})") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body should be an object")
    return body


# -- values of fields ----------------------------------------------------------------------------------------------


def wrong(name: str, should: str) -> Refused:
    return Refused(400, f"{name}: should be {should}")


def kind(name: str, value: Any, kinds: Any, should: str) -> Any:
    if not isinstance(value, kinds):
        raise wrong(name, should)
    return value


def flag(name: str, value: Any) -> bool:
    return bool(kind(name, value, bool, "true or false"))


def number(name: str, value: Any, whole: bool, least: float, most: float) -> Any:
    """The number; None for -1 where that is below the least, as servers write "as you like"."""
    if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value != value // 1):
        raise wrong(name, "a whole number" if whole else "a number")
    if whole and value == -1 < least:
        return None
    if not least <= value <= most:
        raise wrong(name, f"{least:,} to {most:,}")
    return int(value) if whole else round(float(value), 6)  # llama.cpp divides by a temperature of 1e-40


def text(name: str, value: Any, most: int) -> str:
    """The value, if it is a text that UTF-8 can hold."""
    if len(kind(name, value, str, "a text")) > most:
        raise wrong(name, f"at most {most:,} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(name, "text without half characters (lone surrogates)") from None
    return str(value)


def texts(name: str, value: Any, count: int, most: int) -> list[str] | None:
    """A text or a list of them, without empty ones; None for none."""
    values = value if isinstance(value, list) else [value]
    if len(values) > count:
        raise wrong(name, f"at most {count} texts")
    return [each for each in values if text(name, each, most)] or None

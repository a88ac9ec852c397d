"""Reading a request's body and telling errors, the same for all routes.

Bodies are read here and not by FastAPI: its answers to faulty ones repeat what
was sent, which cannot always be written as JSON, and it would read a body of
any size, for any time. An error is {"error": {"message", "type", "param",
"code"}}, as OpenAI's, with a 4xx, or 503 where a model or the disk is the
matter; an AthanorError may have a `status` and a `code` of its own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import ClientDisconnect

from athanor.base.errors import AthanorError

MAX_BODY_BYTES = 2 << 20  # two long contents with every character escaped would fit
BODY_SECONDS = 30.0
CODES = {401: "invalid_api_key", 405: "method_not_supported", 429: "rate_limit_exceeded"}
PARAM = re.compile(r"([a-z_]+(\.\w+)*): ")  # a message about a field begins with its name
SHOULD = "Input should be "  # pydantic's own words


class Refused(AthanorError):
    """A request that cannot be met; `status` is what to answer, `code` is for programs."""

    def __init__(self, status: int, what: str, fix: str = "", code: str | None = None) -> None:
        super().__init__(what, fix=fix)
        self.status, self.code = status, code


class Limit:
    """How many requests for answers are under way, of the page and of OpenAI's clients together."""

    def __init__(self, maximum: int) -> None:
        self.maximum, self.count = maximum, 0

    def begin(self) -> None:
        """One more; Refused (429) if there are as many as may be. Every `begin` wants its `end`."""
        if self.count >= self.maximum:
            raise Refused(429, f"{self.maximum} answers are under way", "ask again in a moment")
        self.count += 1

    def end(self) -> None:
        self.count -= 1


class EventStream(StreamingResponse):
    """Server-sent events of an answer; `on_end` runs when it is over or the client has gone, in whatever way.

    The answer counts for `limit` until then.
    """

    def __init__(
        self,
        lines: AsyncIterator[str],
        limit: Limit,
        on_end: Callable[[], Awaitable[None]],
        more_headers: Mapping[str, str] | None = None,
    ) -> None:
        self.limit, self.on_end = limit, on_end
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(more_headers or {})}
        super().__init__(lines, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.limit.end()
            try:
                await self.body_iterator.aclose()
            finally:
                await self.on_end()


class SamplingFields(BaseModel):
    """Settings of an answer; those left out, or null, are the model's own."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0, le=10_000_000)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=0, le=2**63 - 1)


class ApiRoute(APIRoute):
    """Answers every error in the same form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except AthanorError as error:
                return problem(getattr(error, "status", 422), str(error), getattr(error, "code", None))

        return handle


def fault(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "requests" if status == 429 else "invalid_request_error"
    named = PARAM.match(message) if status < 500 else None
    return {"message": message, "type": kind, "param": named and named[1], "code": code or CODES.get(status)}


def problem(status: int, message: str, code: str | None = None) -> JSONResponse:
    headers = {"Retry-After": "1"} if status == 429 else {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": fault(status, message, code)}, status, headers)


Body = TypeVar("Body", bound=BaseModel)


async def read(request: Request, kind: type[Body], *, invalid: int = 422) -> Body:
    """The body of a request; Refused says in one line what is wrong with it (status `invalid`, if it is the content)."""
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
        return kind.model_validate_json(bytes(data))
    except ValidationError as error:
        location, message, kind = _first(error)
        code = "missing_required_parameter" if kind == "missing" else kind if kind.endswith("_parameter") else None
        raise Refused(invalid, f"{location}: {message}" if location else message, code=code) from None


def _first(error: ValidationError) -> tuple[str, str, str]:
    """Where the first fault is, what all say that are there, and pydantic's name for it.

    Where a field may be of several forms, pydantic puts the form's name into the place and tells the faults of each:
    said are those of the form that fits farthest.
    """
    rows = error.errors(include_url=False, include_context=False, include_input=False)
    places = [[str(part) for part in row["loc"] if re.fullmatch(r"\w+", str(part))] for row in rows]
    farthest = max((place for place in places if place[: len(places[0])] == places[0]), key=len)
    there = [row for row, place in zip(rows, places, strict=True) if place == farthest]
    says = [row["msg"].removeprefix("Value error, ").replace(" after validation", "") for row in there]
    forms = dict.fromkeys(said.removeprefix(SHOULD) for said in says if said.startswith(SHOULD))
    message = f"should be {' or '.join(forms)}" if says[0].startswith(SHOULD) else says[0]
    return ".".join(farthest)[:200], message, there[0]["type"]

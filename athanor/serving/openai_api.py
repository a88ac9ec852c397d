"""The routes that OpenAI's clients call, streaming or not: /v1/models, chat completions, completions, responses.

What a body may hold stands in openai_bodies.py and openai_options.py; names that
were passed over are told in the reply's header.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from athanor.serving.about import SHAPE
from athanor.serving.models import Models
from athanor.serving.openai_bodies import ChatCompletion, Completion, Options
from athanor.serving.openai_options import header
from athanor.serving.openai_responses import Response as ResponseShape
from athanor.serving.openai_responses import ResponseBody
from athanor.serving.openai_shapes import Chat, Count, Part, Shape
from athanor.serving.openai_shapes import Completion as CompletionShape
from athanor.serving.requests import ApiRoute, EventStream, Limit, Refused, read

NOT_HERE = {
    "embeddings": "this server makes no embeddings: its models are made to write",
    "images": "this server makes no pictures",
    "audio": "this server neither hears nor speaks",
    "moderations": "this server judges no texts",
    "responses": "no response is kept here, so none can be asked for again",
}
METHODS = {"models": "GET", "chat/completions": "POST", "completions": "POST", "responses": "POST"}


def openai_router(models: Models, limit: Limit) -> APIRouter:
    """The routes; beyond `limit` a request is told to come again (429)."""
    router = APIRouter(prefix="/v1", route_class=ApiRoute)

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        models.refresh()
        return {"object": "list", "data": [_model_card(state) for state in models.states()]}

    @router.get("/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return _model_card(models.state(name))

    @router.post("/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read(request, ChatCompletion, invalid=400)
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return await _respond(request, models, limit, body, partial(Chat, usage=usage, logprobs=bool(body.logprobs)))

    @router.post("/completions")
    async def complete(request: Request) -> Response:
        body = await read(request, Completion, invalid=400)
        usage = bool(body.stream_options and body.stream_options.include_usage)
        shape = partial(CompletionShape, usage=usage, logprobs=body.logprobs is not None)
        return await _respond(request, models, limit, body, shape)

    @router.post("/responses")
    async def respond(request: Request) -> Response:
        body = await read(request, ResponseBody, invalid=400)
        return await _respond(request, models, limit, body, ResponseShape)

    @router.api_route("/{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def nothing_here(request: Request, path: str) -> Response:
        if method := METHODS.get(path):
            raise Refused(405, f"{request.method} is not for /v1/{path}", f"use {method}")
        what = NOT_HERE.get(path.partition("/")[0], f"there is no {request.method} /v1/{path[:100]}")
        raise Refused(404, what, f"this server has {', '.join(f'/v1/{known}' for known in METHODS)}", "unknown_url")

    return router


async def _respond(
    request: Request, models: Models, limit: Limit, body: Options, shape_of: Callable[[str], Shape]
) -> Response:
    name = body.model or models.default()
    asked = body.requests()
    answers = _Answers([models.answer(name, each) for each in asked], body, shape_of(name))
    headers = header(body.ignored)
    limit.begin()
    try:
        disconnected = asyncio.create_task(_wait_disconnected(request))
        try:
            await _unless_disconnected(disconnected, answers.start())
            whole = None if body.stream else await _unless_disconnected(disconnected, answers.whole())
        finally:
            disconnected.cancel()
    except BaseException:
        limit.end()
        await answers.close()
        raise
    if whole is None:
        return EventStream(answers.lines(), limit, answers.close, headers)
    limit.end()
    await answers.close()
    return JSONResponse(whole, headers=headers)


class _Answers:
    """The answers to one request. `start` waits for the model to begin, so that a failure can still be a status."""

    def __init__(self, sources: Sequence[AsyncGenerator[dict[str, Any], None]], body: Options, shape: Shape) -> None:
        self.sources, self.body, self.shape, self.events = sources, body, shape, _merged(sources)
        self.parts = [Part() for _ in sources]
        self.prompts: dict[int, dict[str, Any]] = {}  # the event "start" of each answer

    async def start(self) -> None:
        async for index, event in self.events:
            self._raise_on_error(event)
            if event["type"] == "start":
                self.prompts[index] = event
                return

    async def whole(self) -> dict[str, Any]:
        """The reply to a request that does not stream."""
        async for index, event in self.events:
            self._raise_on_error(event)
            self._take(index, event)
        if not all(part.end for part in self.parts):
            raise Refused(503, "the answer broke off")
        return self.shape.whole(self.parts, self._count(range(len(self.parts))))

    async def lines(self) -> AsyncIterator[str]:
        """Server-sent events of a request that streams."""
        shape, everyone = self.shape, range(len(self.parts))
        for index in everyone:
            yield shape.begin(index)
        async for index, event in self.events:
            self._take(index, event)
            if event["type"] == "text":
                yield shape.text(index, event)
            elif event["type"] == "error":  # too late for a status
                yield shape.error(self.body.failure(event)[1])
                return
            elif event["type"] == "end":
                yield shape.end(index, event, self._count([index]))
        yield shape.last(self.parts, self._count(everyone))

    async def close(self) -> None:
        await self.events.aclose()
        for source in self.sources:
            await source.aclose()

    def _raise_on_error(self, event: dict[str, Any]) -> None:
        if event["type"] == "error":
            status, error = self.body.failure(event)
            raise Refused(status, error["message"], code=error["code"])

    def _take(self, index: int, event: dict[str, Any]) -> None:
        part = self.parts[index]
        part.logprobs += event.get("logprobs", ())
        if event["type"] == "start":
            self.prompts[index] = event
        elif event["type"] == "text":
            part.text += event["text"]
        elif event["type"] == "end":
            part.end = event

    def _count(self, chosen: Sequence[int]) -> Count:
        """Of some answers. A question counts once, however many answers it has."""
        ends = [self.parts[index].end or {"tokens": 0, "seconds": 0} for index in chosen]
        tokens, seconds = sum(end["tokens"] for end in ends), max(end["seconds"] for end in ends)
        facts = {
            "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
            "forgotten_exchanges": max((start["forgotten"] for start in self.prompts.values()), default=0),
        }
        questions = [start["prompt_tokens"] for index, start in self.prompts.items() if index % (self.body.n or 1) == 0]
        return Count(sum(questions), tokens, facts)


async def _merged(
    sources: Sequence[AsyncIterator[dict[str, Any]]],
) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """Take events as fast as the model makes them, so that a slow reader does not keep a model busy."""
    buffer: asyncio.Queue[tuple[int, dict[str, Any]] | None] = asyncio.Queue()  # no longer than the answers are

    async def fill(index: int, events: AsyncIterator[dict[str, Any]]) -> None:
        try:
            async for event in events:
                buffer.put_nowait((index, event))
        finally:
            buffer.put_nowait(None)

    tasks = [asyncio.create_task(fill(index, events)) for index, events in enumerate(sources)]
    try:
        under_way = len(tasks)
        while under_way:
            if (row := await buffer.get()) is None:
                under_way -= 1
            else:
                yield row
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _wait_disconnected(request: Request) -> None:
    """Return when the client has closed the connection; its body has been read already."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _unless_disconnected(disconnected: asyncio.Task[None], work: Any) -> Any:
    """The result of `work`, which is cancelled when the client goes."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({disconnected, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    raise Refused(499, "the client has gone")


def _model_card(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": state["id"],
        "object": "model",
        "created": int(state.get("created") or 0),
        "owned_by": "athanor",
        "athanor": {key: state[key] for key in ("label", "state", "reason", "backend", *SHAPE, "defaults")},
    }

"""The routes that OpenAI's clients call, streaming or not: /v1/models, chat completions, completions, responses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from athanor.serving import fields, shapes
from athanor.serving.about import SHAPE
from athanor.serving.answers import events, merged
from athanor.serving.models import Models
from athanor.serving.requests import EventStream, Limit, Refused, flag, kind, read, text, wrong

LOOK_SECONDS = 0.5  # between looks for the client of an answer that comes whole
# Hugging Face's client names no model so, or gives the server's address as one.
NO_MODEL = ("dummy", "tgi", "http://", "https://")


def openai_routes(models: Models, limit: Limit) -> list[Route]:
    """The routes; beyond `limit` a request is refused until others end (429)."""

    def cards() -> dict[str, dict[str, Any]]:
        return {
            state["id"]: {
                "id": state["id"],
                "object": "model",
                "created": int(state["created"] or 0),
                "owned_by": "athanor",
                "athanor": {name: state[name] for name in ("label", "state", "reason", *SHAPE, "defaults")},
            }
            for state in models.states()
        }

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*cards().values()]})

    async def get_model(request: Request) -> Response:
        return JSONResponse(cards()[models.available(request.path_params["name"]).id])

    async def respond(request: Request, shape: type[shapes.Chat]) -> Response:
        body, route = await read(request), shape.route
        if body.get(route.question) is None:
            raise Refused(400, f"{route.question}: Field required", code="missing_required_parameter")
        prompts, left_out = shape.questions(body)
        stream, echo = (flag(name, body.get(name) or False) for name in ("stream", "echo"))
        options = kind("stream_options", body.get("stream_options") or {}, dict, "an object")
        settings, ignored = fields.asked(body, route)
        ignored = [*left_out, *ignored]
        name = body.get("model")
        if name is not None and text("model", name, 500).startswith(NO_MODEL):
            name, ignored = None, [*ignored, "model"]
        name = models.available(name).id
        if len(prompts) * len(settings) > shapes.MAX_TEXTS:
            raise wrong(route.question, f"1 to {shapes.MAX_TEXTS} answers in one request")
        more = {"echo": echo and route is fields.COMPLETION}
        sources = [events(models, name, prompt, each | more) for prompt in prompts for each in settings]
        reply = shape(name, len(sources), len(settings), bool(options.get("include_usage")))
        async with AsyncExitStack() as stack:
            stack.callback(limit.begin(request, len(sources)))
            stack.push_async_callback((rows := merged(sources)).aclose)
            # A stream begins once its first answer has: until then a failure can be a status.
            await _unless_gone(request, reply.read(rows, "start" if stream else ""))
            if stream:
                return EventStream(reply.lines(rows), stack.pop_all().aclose, fields.header(ignored))
            return JSONResponse(reply.whole(), headers=fields.header(ignored))

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", get_model),
        *(
            Route(f"/v1/{shape.path}", partial(respond, shape=shape), methods=["POST"])
            for shape in (shapes.Chat, shapes.Completion, shapes.Response)
        ),
    ]


async def _unless_gone(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, which is cancelled soon after the client closes the connection."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
            if await request.is_disconnected():
                raise Refused(499, "the client has gone")
        task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})

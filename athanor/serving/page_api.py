"""The routes that the chat page calls, under /api: answers as a stream of events, feedback, corrections, models.

Chats are in the browser; what people say about answers is kept here. Errors as in requests.py.
"""

from __future__ import annotations

import json
from asyncio import to_thread
from collections.abc import AsyncGenerator
from contextlib import aclosing
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from athanor.origins.tracing import MAX_CHARS
from athanor.serving import origins
from athanor.serving.about import about
from athanor.serving.answers import events, merged
from athanor.serving.feedback import Feedback, rows_to_train
from athanor.serving.fields import PAGE, asked, header, text, texts, wrong
from athanor.serving.models import Models
from athanor.serving.prompting import messages_of
from athanor.serving.requests import EventStream, Limit, Refused, read
from athanor.serving.retraining import Retraining

NAME_CHARS, MOST_MODELS = 500, 2
LOOPBACK = (None, "127.0.0.1", "localhost", "::1")  # None: no browser, which always names where a request is from
FORWARDED = {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"}  # a proxy asks for somebody else


def page_routes(models: Models, feedback: Feedback, limit: Limit, retraining: Retraining | None = None) -> list[Route]:
    """`retraining`: None where the page may start none. Functions that are no coroutines run in threads."""

    async def state(request: Request) -> Response:
        rows = models.states()
        now = {"models": rows, "default_model": models.available().id if rows else None}
        return JSONResponse(now | {"retraining": retraining and await to_thread(retraining.state)})

    async def retrain(request: Request) -> Response:
        if request.method == "POST":
            await read(request)
        came = urlsplit(request.headers.get("origin", "")).hostname
        if retraining is None or FORWARDED & set(request.headers) or came not in LOOPBACK:
            what = "this server starts no training: it serves no checkout, or others reach it"
            raise Refused(403, what, "athanor serve in a checkout, without --host and --allow-host")
        return JSONResponse(await to_thread(retraining.start if request.method == "POST" else retraining.stop), 202)

    async def about_model(request: Request) -> Response:
        return JSONResponse(await to_thread(about, models.root, models.available(request.path_params["model"])))

    async def trace(request: Request) -> Response:
        said = text("text", (await read(request)).get("text"), MAX_CHARS)
        return JSONResponse(
            await to_thread(origins.trace, models.root, models.available(request.path_params["model"]), said)
        )

    async def answer(request: Request) -> Response:
        body = await read(request)
        names = texts("models", body.get("models") or [], MOST_MODELS, NAME_CHARS) or [None]
        names = [models.available(name).id for name in names]
        messages = messages_of("messages", body.get("messages"))
        if not isinstance(sampling := body.get("sampling") or {}, dict):
            raise wrong("sampling", "an object")
        (settings, *_), ignored = asked(sampling, PAGE)
        end = limit.begin(request, len(names))

        async def lines() -> AsyncGenerator[str]:
            async with aclosing(merged([events(models, name, messages, settings) for name in names])) as rows:
                async for slot, event in rows:
                    yield f"data: {json.dumps({**event, 'slot': slot})}\n\n"
            yield 'data: {"type": "done"}\n\n'

        async def on_end() -> None:
            end()

        return EventStream(lines(), on_end, header(ignored))

    async def judge(request: Request) -> Response:
        return JSONResponse(await to_thread(feedback.record, await read(request)))

    def forget(request: Request) -> Response:
        feedback.forget(request.query_params.get("chat", ""))
        return Response(status_code=204)

    def corrections(request: Request) -> Response:
        left_out = rows_to_train(said := feedback.rows(), models.root)[1]
        found = [row | {"left_out": left_out.get(row["id"])} for row in said if row["correction"]]
        return JSONResponse({"corrections": found})

    async def settle(request: Request) -> Response:
        status = (await read(request)).get("status")
        return JSONResponse(await to_thread(feedback.settle, request.path_params["number"], status))

    return [
        Route("/api/state", state),
        Route("/api/retraining", retrain, methods=["POST", "DELETE"]),
        Route("/api/models/{model:path}/about", about_model),
        Route("/api/models/{model:path}/trace", trace, methods=["POST"]),
        Route("/api/answers", answer, methods=["POST"]),
        Route("/api/feedback", judge, methods=["PUT"]),
        Route("/api/feedback", forget, methods=["DELETE"]),
        Route("/api/corrections", corrections),
        Route("/api/corrections/{number:int}", settle, methods=["PATCH"]),
    ]

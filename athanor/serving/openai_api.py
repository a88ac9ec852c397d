"""The routes that OpenAI's clients call, streaming or not: /v1/models, chat completions, completions, responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from athanor.decoding.prompting import TOO_LONG
from athanor.serving import fields, shapes
from athanor.serving.about import SHAPE
from athanor.serving.answers import Event, events, merged
from athanor.serving.fields import asked, header
from athanor.serving.models import Models
from athanor.serving.prompting import MAX_CHARS, Asked, conversation, messages_of
from athanor.serving.requests import EventStream, Limit, Refused, fault, flag, kind, read, text, wrong
from athanor.text.conversations import Message

MAX_TEXTS = 128  # answers of one request to /v1/completions
# Hugging Face's client names no model so, or gives the server's address as one.
NO_MODEL = ("dummy", "tgi", "http://", "https://")
NOT_HERE = {
    "embeddings": "this server makes no embeddings: its models are made to write",
    "images": "this server makes no pictures",
    "audio": "this server neither hears nor speaks",
    "moderations": "this server judges no texts",
    "responses": "no response is kept here, so none can be asked for again",
}
METHODS = {"models": "GET", "chat/completions": "POST", "completions": "POST", "responses": "POST"}


def openai_routes(models: Models, limit: Limit) -> list[Route]:
    """The routes; beyond `limit` a request is refused until others end (429)."""

    async def list_models(request: Request) -> Response:
        models.refresh()
        return JSONResponse({"object": "list", "data": [_model_card(state) for state in models.states()]})

    async def get_model(request: Request) -> Response:
        name = models.available(request.path_params["name"]).id
        return JSONResponse(next(_model_card(state) for state in models.states() if state["id"] == name))

    async def chat(request: Request) -> Response:
        body = await read(request)
        messages, left_out = conversation("messages", messages_of("messages", _required(body, "messages")))
        return await respond(request, body, fields.CHAT, shapes.Chat, [messages], left_out)

    async def complete(request: Request) -> Response:
        body = await read(request)
        return await respond(request, body, fields.COMPLETION, shapes.Completion, _prompts(body))

    async def response(request: Request) -> Response:
        body = await read(request)
        given, rules = _required(body, "input"), body.get("instructions")
        rows = [{"role": "user", "content": given}] if isinstance(given, str) else given
        messages, left_out = conversation("input", messages_of("input", rows))
        if rules is not None:
            rules = Message("system", text("instructions", rules, MAX_CHARS))
            messages = conversation("input", [rules, *messages])[0]
        if body.get("n") not in (None, 1):
            raise Refused(400, "n: /v1/responses makes one answer; ask /v1/chat/completions for more")
        return await respond(request, body, fields.RESPONSE, shapes.Response, [messages], left_out)

    async def respond(
        request: Request,
        body: dict[str, Any],
        route: fields.Route,
        shape: type[shapes.Chat],
        prompts: Sequence[Asked],
        left_out: Sequence[int] = (),
    ) -> Response:
        stream, echo = (flag(name, body.get(name) or False) for name in ("stream", "echo"))
        options = kind("stream_options", body.get("stream_options") or {}, dict, "an object")
        settings, ignored = asked(body, route)
        ignored = [*(f"{route.question}.{index}" for index in left_out), *ignored]
        name = body.get("model")
        if name is not None and text("model", name, 500).startswith(NO_MODEL):
            name, ignored = None, [*ignored, "model"]
        name = models.available(name or models.default()).id
        if len(prompts) * len(settings) > MAX_TEXTS:
            raise wrong(route.question, f"1 to {MAX_TEXTS} answers in one request")
        more = {"echo": True} if echo and route is fields.COMPLETION else {}
        sources = [events(models, name, prompt, each | more) for prompt in prompts for each in settings]
        release = limit.begin(request, len(sources))
        shaped = shape(name, bool(options.get("include_usage")), "n_probs" in settings[0])
        parts = [shapes.Part() for _ in sources]
        answers = _Answers(merged(sources), parts, len(settings), route, shaped, release)
        streaming = False
        gone = asyncio.create_task(_disconnected(request))
        try:
            await _unless(gone, answers.start())
            if not stream:
                return JSONResponse(await _unless(gone, answers.whole()), headers=header(ignored))
            streaming = True
            return EventStream(answers.lines(), answers.close, header(ignored))
        finally:
            gone.cancel()
            if not streaming:
                await answers.close()

    async def nothing_here(request: Request) -> Response:
        path = request.path_params["path"]
        if method := METHODS.get(path):
            raise Refused(405, f"{request.method} is not for /v1/{path}", f"use {method}")
        what = NOT_HERE.get(path.partition("/")[0], f"there is no {request.method} /v1/{path[:100]}")
        raise Refused(404, what, f"this server has {', '.join(f'/v1/{known}' for known in METHODS)}", "unknown_url")

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", get_model),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/responses", response, methods=["POST"]),
        Route("/v1/{path:path}", nothing_here, methods=["GET", "POST", "DELETE"]),
    ]


def _required(body: Mapping[str, Any], name: str) -> Any:
    if body.get(name) is None:
        raise Refused(400, f"{name}: Field required", code="missing_required_parameter")
    return body[name]


def _prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    """A text or several, to continue as they are, without the chat's template. Ids of tokens will do as well."""
    given = _required(body, "prompt")
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts = given if several else [given]
    for prompt in prompts[: MAX_TEXTS + 1]:
        if not isinstance(prompt, list):
            text("prompt", prompt, MAX_CHARS)
        elif not all(type(each) is int and 0 <= each < 1 << 31 for each in prompt):
            raise wrong("prompt", "a text, a list of texts, ids of tokens, or a list of lists of ids")
    return prompts


@dataclass
class _Answers:
    """The answers to one request: `parts`, of which `each` have the same prompt."""

    events: AsyncGenerator[tuple[int, Event]]
    parts: list[shapes.Part]
    each: int
    route: fields.Route
    shape: shapes.Chat
    release: Callable[[], None]
    prompts: dict[int, Event] = field(default_factory=dict)  # the event "start" of each answer

    async def start(self) -> None:
        """Wait for the first answer to begin, so that a failure can still be a status."""
        async for index, event in self.events:
            self._take(index, event)
            if event["type"] == "start":
                return

    async def whole(self) -> dict[str, Any]:
        async for index, event in self.events:
            self._take(index, event)
        return self.shape.whole(self.parts, self._count(range(len(self.parts))))

    async def lines(self) -> AsyncIterator[str]:
        """Server-sent events of a request that streams."""
        shape, everyone = self.shape, range(len(self.parts))
        yield "".join(map(shape.begin, everyone))
        async for index, event in self.events:
            if event["type"] == "error":  # too late for a status
                yield shape.error(self._failure(event)[1])
                return
            self._take(index, event)
            if event["type"] == "text":
                yield shape.text(index, event)
            elif event["type"] == "end":
                yield shape.end(index, event, self._count([index]))
        yield shape.last(self.parts, self._count(everyone))

    async def close(self) -> None:
        try:
            await self.events.aclose()
        finally:
            self.release()

    def _failure(self, event: Event) -> tuple[int, dict[str, Any]]:
        """The status of an event "error", and the error in the words of this route."""
        message, status = event["message"].replace("response_format", self.route.json), 503
        if event["kind"] == "request":
            status = 400
        if TOO_LONG in message:
            return status, fault(status, f"{self.route.question}: {message}", "context_length_exceeded")
        return status, fault(status, message)

    def _take(self, index: int, event: Event) -> None:
        if event["type"] == "error":
            status, error = self._failure(event)
            raise Refused(status, error["message"], code=error["code"])
        part = self.parts[index]
        part.logprobs += event.get("logprobs", ())
        part.text += event.get("text", "")
        if event["type"] == "start":
            self.prompts[index] = event
        elif event["type"] == "end":
            part.end = event

    def _count(self, chosen: Sequence[int]) -> shapes.Count:
        """Of some answers. A question counts once, however many answers it has."""
        ends = [self.parts[index].end or {"tokens": 0, "seconds": 0} for index in chosen]
        tokens, seconds = sum(end["tokens"] for end in ends), max(end["seconds"] for end in ends)
        facts = {
            "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
            "forgotten_exchanges": max((start["forgotten"] for start in self.prompts.values()), default=0),
        }
        questions = [start["prompt_tokens"] for index, start in self.prompts.items() if index % self.each == 0]
        return shapes.Count(sum(questions), tokens, facts)


async def _disconnected(request: Request) -> None:
    """Return when the client has closed the connection; its body has been read already."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _unless(gone: asyncio.Task[None], work: Any) -> Any:
    """The result of `work`, which is cancelled when the client goes."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    raise Refused(499, "the client has gone")


def _model_card(state: dict[str, Any]) -> dict[str, Any]:
    card = {"id": state["id"], "object": "model", "created": int(state.get("created") or 0), "owned_by": "athanor"}
    return card | {"athanor": {key: state[key] for key in ("label", "state", "reason", "backend", *SHAPE, "defaults")}}

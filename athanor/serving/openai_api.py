"""The routes that OpenAI's clients call: /v1/models and /v1/chat/completions, streaming or not.

Options that would change the answer and that nothing here honours are refused,
never ignored; what only describes the request (user, metadata) is passed over.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from athanor.base.errors import suggest
from athanor.serving.backends.base import Request as AnswerRequest
from athanor.serving.models import Models
from athanor.serving.requests import ApiRoute, EventStream, Limit, Refused, SamplingFields, read
from athanor.text.conversations import Message

ROLES = {"developer": "system"}  # OpenAI's newer name of the same
MAX_MESSAGES, MAX_STOPS, MAX_CHARS = 10_000, 16, 1_000_000
# Options of the protocol that are not there, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
# What only describes a request, or asks for what is so anyway.
PASSED_OVER = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)


class TextPart(BaseModel):
    type: Literal["text"]
    text: str = Field(max_length=MAX_CHARS)


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=MAX_CHARS)] | list[TextPart] | None = None

    @model_validator(mode="after")
    def check_supported(self) -> ChatMessage:
        for name in ("tool_calls", "function_call", "audio"):
            if (self.model_extra or {}).get(name):
                raise ValueError(f"'{name}' is not supported here; leave the message out")
        return self

    def message(self) -> Message:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return Message(ROLES.get(self.role, self.role), text)


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatCompletion(SamplingFields):
    """Settings left out, or null, are the model's own. top_k, min_p and repetition_penalty go beyond OpenAI's."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: Annotated[str, Field(max_length=500)] | None = None
    max_tokens: int | None = Field(None, ge=1, le=10_000_000)
    max_completion_tokens: int | None = Field(None, ge=1, le=10_000_000)
    stop: Annotated[str, Field(max_length=1000)] | list[Annotated[str, Field(max_length=1000)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def check_options(self) -> ChatCompletion:
        for name, value in (self.model_extra or {}).items():
            if name in NEUTRAL:
                if value is not None and value not in NEUTRAL[name]:
                    raise ValueError(f"'{name}' is not supported here; leave it out")
            elif name not in PASSED_OVER:
                fix = suggest(name[:100], [*type(self).model_fields, *NEUTRAL], "leave it out", cutoff=0.7)
                raise ValueError(f"unknown option '{name[:100]}': {fix}")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop texts")
        return self

    def conversation(self) -> list[Message]:
        """The messages; an empty system message is none: no model was trained with one."""
        messages = [message.message() for message in self.messages]
        return messages[1:] if messages[0].role == "system" and not messages[0].content.strip() else messages

    def request(self) -> AnswerRequest:
        sampling = self.model_dump(include=set(SamplingFields.model_fields), exclude_none=True)
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return AnswerRequest(self.conversation(), limit, sampling, stops)


def openai_router(models: Models, limit: Limit) -> APIRouter:
    """The routes; beyond `limit` a request is told to come again (429)."""
    router = APIRouter(prefix="/v1", route_class=ApiRoute)

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(state) for state in models.states()]}

    @router.get("/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        for state in models.states():
            if state["id"] == name:
                return _model_card(state)
        raise Refused(404, f"there is no model '{name[:200]}'")

    @router.post("/chat/completions")
    async def complete(request: Request) -> Response:
        body = await read(request, ChatCompletion, invalid=400)
        name = body.model or models.default()
        answer = _Answer(name, models.answer(name, body.request()))
        limit.begin()
        try:
            disconnected = asyncio.create_task(_wait_disconnected(request))
            try:
                await _unless_disconnected(disconnected, answer.start())
                response = (
                    None if body.stream else JSONResponse(await _unless_disconnected(disconnected, answer.completion()))
                )
            finally:
                disconnected.cancel()
        except BaseException:
            limit.end()
            await answer.close()
            raise
        if response is not None:
            limit.end()
            return response
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(answer.chunks(usage), limit, answer.close)

    return router


class _Answer:
    """One completion being made. `start` waits for the model to begin, so that a failure can still be a status."""

    def __init__(self, model: str, events: AsyncGenerator[dict[str, Any], None]) -> None:
        self.model, self.events = model, events
        self.id, self.created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self.start_event: dict[str, Any] = {}

    async def start(self) -> None:
        async for event in self.events:
            if event["type"] == "start":
                self.start_event = event
                return
            _raise_on_error(event)

    async def completion(self) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        texts = []
        async for event in self.events:
            _raise_on_error(event)
            if event["type"] == "text":
                texts.append(event["text"])
            elif event["type"] == "end":
                message = {"role": "assistant", "content": "".join(texts), "refusal": None}
                choice = {"index": 0, "message": message, "finish_reason": _finish(event), "logprobs": None}
                return {**self._envelope("chat.completion"), "choices": [choice], **self._usage(event)}
        raise Refused(503, "the answer broke off")

    async def chunks(self, usage: bool) -> AsyncIterator[str]:
        """Server-sent events of a request that streams."""
        head = self._envelope("chat.completion.chunk")

        def chunk_line(delta: dict[str, Any], finish: str | None = None, **extra: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return _sse({**head, "choices": [choice], **extra})

        async with aclosing(_buffered(self.events)) as events:
            yield chunk_line({"role": "assistant", "content": ""})
            async for event in events:
                if event["type"] == "text":
                    yield chunk_line({"content": event["text"]})
                elif event["type"] == "error":  # too late for a status
                    yield _sse({"error": {"message": event["message"], "type": "unavailable"}})
                    return
                elif event["type"] == "end":
                    usage_facts = self._usage(event)
                    yield chunk_line({}, _finish(event), athanor=usage_facts["athanor"])
                    if usage:
                        yield _sse({**head, "choices": [], "usage": usage_facts["usage"]})
            yield "data: [DONE]\n\n"

    async def close(self) -> None:
        await self.events.aclose()

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self, end: dict[str, Any]) -> dict[str, Any]:
        prompt, completion_tokens = self.start_event.get("prompt_tokens", 0), end["tokens"]
        speed = round(completion_tokens / end["seconds"], 1) if end["seconds"] else None
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt + completion_tokens,
            },
            "athanor": {"tokens_per_second": speed, "forgotten_exchanges": self.start_event.get("forgotten", 0)},
        }


async def _buffered(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Take `events` as fast as the model makes them, so that a slow reader does not keep a model busy."""
    buffer: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # no longer than the answer is

    async def fill() -> None:
        try:
            async for event in events:
                buffer.put_nowait(event)
        finally:
            buffer.put_nowait(None)

    task = asyncio.create_task(fill())
    try:
        while (event := await buffer.get()) is not None:
            yield event
        await task
    finally:
        task.cancel()
        await asyncio.wait({task})


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


def _raise_on_error(event: dict[str, Any]) -> None:
    if event["type"] == "error":
        raise Refused(400 if event["kind"] == "request" else 503, event["message"])


def _finish(event: dict[str, Any]) -> str:
    return "length" if event["reason"] == "length" else "stop"


def _model_card(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": state["id"],
        "object": "model",
        "created": int(state.get("created") or 0),
        "owned_by": "athanor",
        "athanor": {key: state[key] for key in ("label", "state", "reason", "backend", "context_tokens", "parameters")},
    }


def _sse(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"

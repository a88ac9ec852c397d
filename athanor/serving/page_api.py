"""The routes that the chat page calls, under /api: chats, answers as a stream of events, feedback, corrections.

Errors are told as in requests.py.
"""

from __future__ import annotations

import asyncio
import json
import re
import unicodedata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlsplit

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from athanor.base.errors import InputError
from athanor.origins.tracing import MAX_CHARS
from athanor.serving import origins
from athanor.serving.about import about
from athanor.serving.models import Models
from athanor.serving.requests import ApiRoute, EventStream, Limit, Refused, SamplingFields, read
from athanor.serving.retraining import Retraining
from athanor.serving.store import Store, Unknown
from athanor.serving.turns import Turn, Turns

CONTENT_CHARS, TITLE_CHARS, NAME_CHARS, QUERY_CHARS = 200_000, 200, 500, 500
MAX_ID = 2**63 - 1  # of SQLite

Id = Annotated[int, Field(ge=1, le=MAX_ID)]
Names = Annotated[list[Annotated[str, Field(min_length=1, max_length=NAME_CHARS)]], Field(min_length=1, max_length=2)]
Content = Annotated[str, Field(max_length=CONTENT_CHARS)]


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SamplingBody(SamplingFields, StrictBody):
    seed: int | None = Field(None, ge=0, le=2**32 - 1)
    max_new_tokens: int | None = Field(None, ge=1, le=10_000_000)
    top_logprobs: int | None = Field(None, ge=0, le=20)  # so many likely tokens are told at each step

    def settings(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class ChatBody(StrictBody):
    title: str = Field("", max_length=TITLE_CHARS)
    system: Content = ""
    models: Names | None = None
    sampling: SamplingBody | None = None


class ChangesBody(ChatBody):
    leaf: Id | None = None


class AnswersBody(StrictBody):
    content: Content | None = None
    parent: Id | None = None
    user: Id | None = None
    begun: Id | None = None  # an answer to that question, to be gone on with
    models: Names | None = None
    sampling: SamplingBody | None = None

    @model_validator(mode="after")
    def one_question(self) -> AnswersBody:
        if (self.content is None) == (self.user is None):
            raise ValueError('send "content" for a new question, or "user" for one that is there')
        if self.user is not None and "parent" in self.model_fields_set:
            raise ValueError('"parent" goes with "content"')
        if self.begun is not None and (self.user is None or len(self.models or ()) != 1):
            raise ValueError('"begun" goes with "user" and one of "models"')
        if self.content is not None and not self.content.strip():
            raise ValueError("the question is empty")
        return self


class FeedbackBody(StrictBody):
    verdict: Literal["up", "down"] | None
    correction: Content | None = None


class StatusBody(StrictBody):
    status: Literal["candidate", "accepted", "rejected"]


class TraceBody(StrictBody):
    text: Annotated[str, Field(max_length=MAX_CHARS)]


class EmptyBody(StrictBody):
    pass


def message_id(text: str) -> int:
    """A message's id in an address; Unknown for what cannot be one."""
    if not re.fullmatch("[0-9]{1,18}", text):
        raise Unknown(f"there is no message '{text[:50]}'", fix="ids of messages are numbers")
    return int(text)


async def _event_lines(turn: Turn) -> AsyncIterator[str]:
    async for event in turn.events():
        yield f"data: {json.dumps(event)}\n\n"


def page_router(
    store: Store, models: Models, limit: Limit, *, version: str = "", retraining: Retraining | None = None
) -> APIRouter:
    """The routes over a store and the models. On shutdown what is being answered is stopped and stored.

    `retraining`: None where the page may start none.
    """
    turns = Turns(store, models)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await turns.close()

    router = APIRouter(prefix="/api", route_class=ApiRoute, lifespan=lifespan)
    in_thread = asyncio.to_thread  # the store waits for the disk and for other processes

    @router.get("/state")
    async def state() -> dict[str, Any]:
        models.refresh()
        default = next(iter(turns.default_names()), None)
        state = {"version": version, "models": models.states(), "default_model": default}
        return {**state, "retraining": retraining and await in_thread(retraining.state)}

    @router.post("/retraining", status_code=202)
    async def retrain(request: Request) -> dict[str, Any]:
        await read(request, EmptyBody)
        came = urlsplit(request.headers.get("origin", "")).hostname  # a browser always names it
        if (
            retraining is None
            or FORWARDED & set(request.headers)
            or came not in (None, "127.0.0.1", "localhost", "::1")
        ):
            what = "this server starts no training: it serves no checkout, or others reach it"
            raise Refused(403, what, "athanor serve in a checkout, without --host and --allow-host")
        return await in_thread(retraining.start)

    @router.get("/models/{model:path}/about")
    async def about_model(model: str) -> dict[str, Any]:
        return await in_thread(about, models.root, models.available(model))

    @router.post("/models/{model:path}/trace")
    async def trace(model: str, request: Request) -> dict[str, Any]:
        body = await read(request, TraceBody)
        return await in_thread(origins.trace, models.available(model), body.text)

    @router.get("/chats")
    async def chats(request: Request) -> dict[str, Any]:
        return {"chats": await in_thread(store.chats, request.query_params.get("q", "")[:QUERY_CHARS])}

    @router.post("/chats")
    async def create(request: Request) -> Response:
        body = await read(request, ChatBody)
        names = turns.check_names(body.models) if body.models else turns.default_names()
        sampling = body.sampling.settings() if body.sampling else {}
        created = await in_thread(store.create, title=body.title, system=body.system, models=names, sampling=sampling)
        return JSONResponse(created, 201)

    @router.get("/chats/{chat}")
    async def chat(chat: str) -> dict[str, Any]:
        return await in_thread(store.chat, chat)

    @router.patch("/chats/{chat}")
    async def change(chat: str, request: Request) -> dict[str, Any]:
        body = await read(request, ChangesBody)
        changes = {name: getattr(body, name) for name in body.model_fields_set}
        if changes.get("models") is not None:
            turns.check_names(changes["models"])
        elif "models" in changes:
            changes["models"] = []
        if "sampling" in changes:
            changes["sampling"] = body.sampling.settings() if body.sampling else {}
        return await in_thread(store.update, chat, **changes)

    @router.delete("/chats/{chat}", status_code=204)
    async def delete(chat: str) -> Response:
        await turns.stop(chat)
        await in_thread(store.delete, chat)
        return Response(status_code=204)

    @router.get("/chats/{chat}/export")
    async def export(chat: str, request: Request) -> Response:
        format_name = request.query_params.get("format", "markdown")
        if format_name not in EXPORTS:
            raise InputError("no such format", where="format", fix=f"one of {', '.join(EXPORTS)}")
        stored_chat = await in_thread(store.chat, chat)
        messages = await in_thread(store.way, chat, stored_chat["leaf"])
        write, suffix, kind = EXPORTS[format_name]
        name = file_name(stored_chat["title"])
        ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
        ascii_name = re.sub("-+", "-", ascii_name).rstrip("-")  # letters have fallen out
        headers = {
            "Content-Disposition": f'attachment; filename="{ascii_name}{suffix}"; '
            f"filename*=UTF-8''{quote(name + suffix)}",
            "X-Content-Type-Options": "nosniff",
        }
        return Response(write(stored_chat, messages), media_type=kind, headers=headers)

    @router.post("/chats/{chat}/answers")
    async def answers(chat: str, request: Request) -> Response:
        body = await read(request, AnswersBody)
        question = body.user if body.user is not None else (body.parent, body.content)
        sampling = body.sampling.settings() if body.sampling else None
        limit.begin()
        try:
            turn = await turns.start(chat, question, names=body.models, sampling=sampling, begun=body.begun)

            async def on_end() -> None:
                turn.stop()  # it stores by itself

            return EventStream(_event_lines(turn), limit, on_end)
        except BaseException:
            limit.end()
            raise

    @router.post("/chats/{chat}/stop")
    async def stop(chat: str, request: Request) -> Response:
        await read(request, EmptyBody)
        await in_thread(store.way, chat, None)  # 404
        await turns.stop(chat)
        return Response(status_code=204)

    @router.put("/messages/{message}/feedback")
    async def feedback(message: str, request: Request) -> dict[str, Any]:
        body = await read(request, FeedbackBody)
        return await in_thread(store.feedback, message_id(message), body.verdict, body.correction)

    @router.get("/corrections")
    async def corrections() -> dict[str, Any]:
        return {"corrections": await in_thread(store.corrections)}

    @router.patch("/corrections/{message}")
    async def set_status(message: str, request: Request) -> dict[str, Any]:
        body = await read(request, StatusBody)
        return await in_thread(store.settle, message_id(message), body.status)

    return router


def file_name(title: str) -> str:
    """A name for a download without a suffix: letters, digits and hyphens. No system takes it for anything special."""
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFC", title))
    return "-".join(["chat", *words])[:60].rstrip("-")


FORWARDED = {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"}  # a proxy asks for somebody else
CODE = re.compile(r"(async def|def|class) .*:[ \t]*(\n|$)")
NO_PARAGRAPH = re.compile(r"\s*([-*+>#|]|\d+[.)])")


def _fenced(text: str) -> str:
    """A text with fences around the code that has none, as the page shows it: Markdown would take its indents away."""
    if "```" in text:
        return text
    found: list[tuple[bool, str]] = []  # whether it is code, and the block
    for block in re.split(r"\n{2,}", text.strip("\n")):
        indented = block[:1] in " \t"
        if indented and found and found[-1][0]:
            found[-1] = True, f"{found[-1][1]}\n\n{block}"
        else:
            inside = re.search(r"\n[ \t]+\S", block) and not NO_PARAGRAPH.match(block)
            found.append((bool(CODE.match(block) or inside), block))
    return "\n\n".join(f"```\n{block}\n```" if code else block for code, block in found)


def _markdown(chat: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    title = " ".join(chat["title"].split()) or "Chat"
    blocks = [f"# {title}"]
    if chat["system"].strip():
        blocks += ["## System", chat["system"].strip()]
    for message in messages:
        name = f"Answer ({message['model']})" if message["model"] else "Answer"
        blocks += [
            f"## {'Question' if message['role'] == 'user' else name}",
            _fenced(message["content"]) if message["model"] else message["content"].strip(),
        ]
        if correction := _correction(message):
            blocks += ["### It should have said", _fenced(correction)]
    return "\n\n".join(blocks) + "\n"


def _correction(message: dict[str, Any]) -> str:
    said = message["feedback"] or {}
    return "" if said.get("status") == "rejected" else said.get("correction") or ""


def _json(chat: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    return json.dumps(chat, ensure_ascii=False, indent=2) + "\n"


def _messages(chat: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    if not messages:
        raise InputError("the chat has no messages yet", where="format", fix="ask something first")
    system = [{"role": "system", "content": chat["system"]}] if chat["system"].strip() else []
    # What is trained on is what should have been said.
    said = ({"role": row["role"], "content": _correction(row) or row["content"]} for row in messages)
    rows = [*system, *said]
    return json.dumps({"messages": rows}, ensure_ascii=False) + "\n"


EXPORTS = {
    "markdown": (_markdown, ".md", "text/markdown"),
    "json": (_json, ".json", "application/json"),
    "messages": (_messages, ".jsonl", "application/x-ndjson"),
}

"""Answers as events, for OpenAI's routes and for the page (docs/serving.md): loading, start, text, end, error."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from athanor.base.errors import AthanorError, InputError
from athanor.decoding.prompting import end_ids
from athanor.export.llamacpp.engine import Engine, EngineDied
from athanor.export.llamacpp.stream import Refused
from athanor.serving.fields import ALIASES, SAMPLERS
from athanor.serving.models import Models, Served
from athanor.serving.prompting import Asked, laid_out

logger = logging.getLogger(__name__)
Event = dict[str, Any]
LOADED_SECONDS = 0.1  # a model that takes longer is being loaded
AT_ONCE, WAITING = 4, 256  # answers of one request at a time; events that wait for their reader
# llama.cpp's own defaults are others.
NEUTRAL = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repeat_penalty": 1, "samplers": SAMPLERS}
NO_JSON, FORCING = "Z", 1000  # no JSON begins with it, so a schema that is followed forbids it against any bias
_followed: set[int] = set()  # hashes of schemas that llama.cpp could compile


async def events(models: Models, name: str, asked: Asked, body: Mapping[str, Any]) -> AsyncGenerator[Event]:
    """One answer; `body` is of fields.asked. Exactly one end or error comes last. Closing the generator cancels."""
    body, kind, stack = dict(body), "model", AsyncExitStack()
    try:
        loading = asyncio.ensure_future(stack.enter_async_context(models.using(name)))
        try:
            if not (await asyncio.wait({loading}, timeout=LOADED_SECONDS))[0]:
                yield {"type": "loading"}
            served = await loading
        finally:
            loading.cancel()
        kind = "request"
        ids, limit, forgotten = await laid_out(served, asked, body.pop("n_predict", None))
        if schema := body.get("json_schema"):
            await _check(served.engine, schema)
        start = {"type": "start", "prompt_tokens": len(ids), "forgotten": forgotten}
        defaults = {ALIASES.get(setting, setting): value for setting, value in served.defaults.items()}
        body = {**NEUTRAL, **defaults, **body}
        body |= {"prompt": ids, "n_predict": limit, "return_tokens": True}
        make = _echoed if body.pop("echo", False) else _made
        started = time.monotonic()
        made = await stack.enter_async_context(aclosing(make(served, asked, body)))
        async for event in made:
            if start:  # not before llama.cpp has taken it: until then a refusal can be a status
                yield start
                start = {}
            if event["type"] == "end":
                event["seconds"] = round(time.monotonic() - started, 3)
            yield event
    except AthanorError as error:
        fails = isinstance(error, EngineDied) or getattr(error, "status", 400) >= 500
        yield {"type": "error", "kind": "model" if fails else kind, "message": str(error)}
    except Exception as error:  # whatever a model's part does, the others are answered
        logger.exception("an answer of %s failed", name)
        yield {"type": "error", "kind": "model", "message": f"the model failed ({type(error).__name__})"}
    finally:
        await stack.aclose()


async def _made(served: Served, asked: Asked, body: Mapping[str, Any]) -> AsyncGenerator[Event]:
    ends = set(end_ids(served.tokenizer)) if served.tokenizer else set()
    tokens, reason, likely = 0, "", []
    top = body.get("n_probs")
    if not body["n_predict"]:
        yield {"type": "end", "reason": "length", "tokens": 0}
        return
    ask = body if top is None else {**body, "n_probs": max(1, top)}  # to llama.cpp 0 is none
    async with aclosing(served.engine.rows_of(ask)) as batches:
        async for rows in batches:
            text = ""
            for row in rows:
                if ends.intersection(row.get("tokens", ())):  # a control symbol that only opens something else
                    reason = "stop"
                    break
                tokens = row["tokens_predicted"] - (row.get("stop_type") == "eos")
                text += row["content"]
                for each in row.get("completion_probabilities", ()):
                    likely.append({**each, "top_logprobs": each["top_logprobs"][:top]})
                if row["stop"]:
                    reason = "length" if row["stop_type"] == "limit" else "stop"
            if text or (reason and likely):
                chances = {"logprobs": likely} if likely else {}
                yield {"type": "text", "text": text, "tokens": tokens, **chances}
                likely = []
            if reason:
                break
    yield {"type": "end", "reason": reason, "tokens": tokens}


async def _echoed(served: Served, asked: Asked, body: Mapping[str, Any]) -> AsyncGenerator[Event]:
    """The prompt with the answer, and log-probabilities of the tokens of both: none for the first one."""
    made: Mapping[str, Any] = {"tokens": [], "content": "", "stop_type": "limit"}
    if body["n_predict"]:
        made = await served.engine.ask("/completion", body)
    ids, top, likely = [*body["prompt"], *made["tokens"]], body.get("n_probs"), []
    if top is not None:
        for number, value, tops in [(ids[0], None, []), *await served.engine.score(ids, top)]:
            others = [{"token": await _piece(served, other), "logprob": each} for other, each in tops]
            likely.append({"token": await _piece(served, number), "logprob": value, "top_logprobs": others})
    text = asked if isinstance(asked, str) else await _text(served, body["prompt"])
    tokens, reason = len(made["tokens"]), "length" if made["stop_type"] == "limit" else "stop"
    yield {"type": "text", "text": text + made["content"], "tokens": tokens, "logprobs": likely}
    yield {"type": "end", "reason": reason, "tokens": tokens}


async def _text(served: Served, ids: Sequence[int]) -> str:
    if served.tokenizer is not None:
        return served.tokenizer.decode(ids)
    return str((await served.engine.ask("/detokenize", {"tokens": ids}))["content"])


async def _piece(served: Served, number: int) -> str:
    """The text of one token: bytes of a split character as escapes, of a control symbol, which has none, its name."""
    if served.tokenizer is None:
        return await _text(served, [number])
    data = served.tokenizer.decode_bytes([number])
    return data.decode(errors="backslashreplace") or served.tokenizer.processor.id_to_piece(number)


async def _check(engine: Engine, schema: Mapping[str, Any]) -> None:
    """InputError for a schema that llama.cpp cannot follow: it would pass over it."""
    if (digest := hash(json.dumps(schema, sort_keys=True))) in _followed:
        return
    ids = (await engine.ask("/tokenize", {"content": NO_JSON, "add_special": False}))["tokens"]
    ask = {"prompt": ids, "n_predict": 1, "temperature": 0, "json_schema": schema, "return_tokens": True}
    try:
        made = await engine.ask("/completion", {**ask, "logit_bias": [[ids[-1], FORCING]], "cache_prompt": False})
        reason = "llama.cpp cannot compile it" if made["tokens"][:1] == ids[-1:] else ""
    except Refused as error:
        reason = error.what
    if reason:
        what = f"the schema cannot be followed ({reason})"
        raise InputError(what, where="response_format", fix="make it simpler")
    if len(_followed) >= 1000:
        _followed.clear()
    _followed.add(digest)


async def merged(sources: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[tuple[int, Event]]:
    """Events of several answers as they come, with the number of each; a few answers are made at a time.

    So one request of a hundred prompts leaves room for others.
    """
    queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue(WAITING)
    room, left = asyncio.Semaphore(AT_ONCE), len(sources)

    async def fill(index: int, source: AsyncGenerator[Event]) -> None:
        async with aclosing(source), room:
            async for event in source:
                await queue.put((index, event))

    filling = [asyncio.create_task(fill(index, source)) for index, source in enumerate(sources)]
    try:
        while left:
            index, event = await queue.get()
            left -= event["type"] in ("end", "error")
            yield index, event
    finally:
        for task in filling:
            task.cancel()
        await asyncio.wait(filling)

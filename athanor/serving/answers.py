"""Answers as events, the same for OpenAI's routes and for the page (docs/serving.md): loading, start, text, end, error."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from athanor.base.errors import AthanorError, InputError
from athanor.decoding.prompting import end_ids
from athanor.serving.fields import ALIASES, SAMPLERS
from athanor.serving.process import EngineDied
from athanor.serving.prompting import Asked, Prompt, laid_out
from athanor.serving.stream import Lost, Refused

if TYPE_CHECKING:
    from athanor.serving.models import Models, Served

logger = logging.getLogger(__name__)
Event = dict[str, Any]
LOADED_SECONDS = 0.1  # a model that takes longer is being loaded
AT_ONCE, WAITING = 4, 256  # answers of one request at a time; events that wait for their reader
# llama.cpp's own defaults are others.
NEUTRAL = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repeat_penalty": 1, "samplers": SAMPLERS}
NO_JSON, FORCING = "Z", 1000  # no JSON begins with it, so a schema that is followed forbids it against any bias
_followed: set[str] = set()  # digests of schemas that llama.cpp could compile


async def events(models: Models, name: str, asked: Asked, body: Mapping[str, Any]) -> AsyncGenerator[Event]:
    """One answer; `body` is of fields.asked. Exactly one end or error comes last. Closing the generator cancels."""
    async with aclosing(models.metrics.counted(name, _answer(models, name, asked, dict(body)))) as counted:
        async for event in counted:
            yield event


async def _answer(models: Models, name: str, asked: Asked, body: dict[str, Any]) -> AsyncGenerator[Event]:
    kind = "model"
    try:
        loading = asyncio.ensure_future(models.served(name))
        try:
            if not (await asyncio.wait({loading}, timeout=LOADED_SECONDS))[0]:
                yield {"type": "loading"}
            served = await loading
        finally:
            loading.cancel()
        kind = "request"
        prompt = await laid_out(served, asked, body.pop("n_predict", None))
        await _check(served, body)
        yield {"type": "start", "prompt_tokens": len(prompt.ids), "forgotten": prompt.forgotten}
        defaults = {ALIASES.get(setting, setting): value for setting, value in served.defaults.items()}
        body = {**NEUTRAL, **defaults, **body}
        body |= {"prompt": prompt.ids, "n_predict": prompt.limit, "return_tokens": True}
        make = _echoed if body.pop("echo", False) else _made
        async with aclosing(make(served, asked, prompt, body)) as made:
            async for event in made:
                yield event
    except AthanorError as error:
        fails = isinstance(error, EngineDied | Lost) or getattr(error, "status", 400) >= 500
        yield {"type": "error", "kind": "model" if fails else kind, "message": str(error)}
    except Exception as error:  # whatever a model's part does, the others are answered
        logger.exception("an answer of %s failed", name)
        yield {"type": "error", "kind": "model", "message": f"the model failed ({type(error).__name__})"}


async def _made(served: Served, asked: Asked, prompt: Prompt, body: Mapping[str, Any]) -> AsyncGenerator[Event]:
    started = time.monotonic()
    ends = set(end_ids(served.tokenizer)) if served.tokenizer else set()
    tokens, reason = 0, "length" if not prompt.limit else ""
    likely: list[Any] = []
    top = body.get("n_probs")
    if not reason:
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
                    likely += row.get("completion_probabilities", ())
                    if row["stop"]:
                        reason = "length" if row["stop_type"] == "limit" else "stop"
                if text:
                    yield {"type": "text", "text": text, "tokens": tokens, **_logprobs(likely, top or 0)}
                    likely = []
                if reason:
                    break
    seconds = round(time.monotonic() - started, 3)
    yield {"type": "end", "reason": reason, "tokens": tokens, "seconds": seconds, **_logprobs(likely, top or 0)}


def _logprobs(rows: Sequence[Mapping[str, Any]], top: int) -> dict[str, Any]:
    """Log-probabilities in OpenAI's form."""
    shaped = [{**_token(row), "top_logprobs": [_token(each) for each in row["top_logprobs"][:top]]} for row in rows]
    return {"logprobs": shaped} if shaped else {}


def _token(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": row["token"], "logprob": round(row["logprob"], 6), "bytes": row["bytes"]}


async def _echoed(served: Served, asked: Asked, prompt: Prompt, body: Mapping[str, Any]) -> AsyncGenerator[Event]:
    """The prompt with the answer, and log-probabilities of the tokens of both: none for the first one."""
    started = time.monotonic()
    made: Mapping[str, Any] = {"tokens": [], "content": "", "stop_type": "limit"}
    if prompt.limit:
        made = await served.engine.ask("/completion", body)
    ids, rows = [*prompt.ids, *made["tokens"]], []
    pieces: dict[int, bytes] = {}

    async def piece(number: int) -> dict[str, Any]:
        if number not in pieces and served.tokenizer is not None:
            name = served.tokenizer.processor.id_to_piece(number)  # of a control symbol, which has no text
            pieces[number] = served.tokenizer.decode_bytes([number]) or name.encode()
        elif number not in pieces:
            pieces[number] = (await served.engine.ask("/detokenize", {"tokens": [number]}))["content"].encode()
        data = pieces[number]
        try:
            return {"token": data.decode(), "bytes": list(data)}
        except UnicodeDecodeError:
            return {"token": "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), "bytes": list(data)}

    if (top := body.get("n_probs")) is not None:
        rows = [{**await piece(ids[0]), "logprob": None, "top_logprobs": []}]
        for number, value, likeliest in await served.engine.score(ids, top):
            tops = [{**await piece(each), "logprob": round(logprob, 6)} for each, logprob in likeliest]
            rows.append({**await piece(number), "logprob": round(value, 6), "top_logprobs": tops})
    if isinstance(asked, str):
        text = asked
    elif served.tokenizer is not None:
        text = served.tokenizer.decode(prompt.ids)
    else:
        text = (await served.engine.ask("/detokenize", {"tokens": prompt.ids}))["content"]
    tokens = len(made["tokens"])
    yield {"type": "text", "text": text + made["content"], "tokens": tokens, "logprobs": rows}
    reason = "length" if made["stop_type"] == "limit" else "stop"
    yield {"type": "end", "reason": reason, "tokens": tokens, "seconds": round(time.monotonic() - started, 3)}


async def _check(served: Served, body: Mapping[str, Any]) -> None:
    """InputError for what llama.cpp would pass over: a bias for no token, a schema that it cannot compile."""
    tokenizer, engine = served.tokenizer, served.engine
    for number, _ in body.get("logit_bias", ()):
        if tokenizer is not None and number >= tokenizer.vocab_size:
            raise InputError(f"there is no token {number}", where="logit_bias")
    if (schema := body.get("json_schema")) is None:
        return
    digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()
    if digest in _followed:
        return
    if tokenizer is not None:
        ids = tokenizer.encode(NO_JSON)
    else:
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
    queue: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue(WAITING)
    room = asyncio.Semaphore(AT_ONCE)

    async def fill(index: int, source: AsyncGenerator[Event]) -> None:
        async with aclosing(source) as opened, room:
            async for event in opened:
                await queue.put((index, event))

    async def fill_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, source in enumerate(sources):
                    group.create_task(fill(index, source))
        except Exception:
            await queue.put(None)
            raise
        await queue.put(None)

    filling = asyncio.create_task(fill_all())
    try:
        while (row := await queue.get()) is not None:
            yield row
        await filling
    finally:
        filling.cancel()
        await asyncio.wait({filling})

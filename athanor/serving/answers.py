"""Answers as events, for OpenAI's routes and for the page (docs/serving.md): loading, start, text, end, error."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

from athanor.base.errors import AthanorError, InputError
from athanor.decoding.prompting import end_ids
from athanor.llamacpp.engine import EngineDied
from athanor.llamacpp.stream import Refused
from athanor.serving.fields import ALIASES, SAMPLERS
from athanor.serving.prompting import Asked, Prompt, laid_out

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
    async with aclosing(_answer(models, name, asked, dict(body))) as counted:
        async for event in counted:
            yield event


async def _answer(models: Models, name: str, asked: Asked, body: dict[str, Any]) -> AsyncGenerator[Event]:
    kind, loaded = "model", AsyncExitStack()
    try:
        loading = asyncio.ensure_future(loaded.enter_async_context(models.using(name)))
        try:
            if not (await asyncio.wait({loading}, timeout=LOADED_SECONDS))[0]:
                yield {"type": "loading"}
            served = await loading
        finally:
            loading.cancel()
        kind = "request"
        prompt = await laid_out(served, asked, body.pop("n_predict", None))
        await _check(served, body)
        start = {"type": "start", "prompt_tokens": len(prompt.ids), "forgotten": prompt.forgotten}
        defaults = {ALIASES.get(setting, setting): value for setting, value in served.defaults.items()}
        body = {**NEUTRAL, **defaults, **body}
        body |= {"prompt": prompt.ids, "n_predict": prompt.limit, "return_tokens": True}
        make = _echoed if body.pop("echo", False) else _made
        async with aclosing(make(served, asked, prompt, body)) as made:
            async for event in made:
                if start:  # not before llama.cpp has taken it: until then a refusal can be a status
                    yield start
                    start = {}
                yield event
    except AthanorError as error:
        fails = isinstance(error, EngineDied) or getattr(error, "status", 400) >= 500
        yield {"type": "error", "kind": "model" if fails else kind, "message": str(error)}
    except Exception as error:  # whatever a model's part does, the others are answered
        logger.exception("an answer of %s failed", name)
        yield {"type": "error", "kind": "model", "message": f"the model failed ({type(error).__name__})"}
    finally:
        await loaded.aclose()


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
    ids, top = [*prompt.ids, *made["tokens"]], body.get("n_probs")
    rows: list[Any] = []
    if top is not None:
        scored = [(ids[0], None, []), *await served.engine.score(ids, top)]
        pieces = await _pieces(served, {each for number, _, tops in scored for each in (number, *dict(tops))})
        rows = [
            {**pieces[number], "logprob": value, "top_logprobs": [{**pieces[i], "logprob": each} for i, each in tops]}
            for number, value, tops in scored
        ]
    text = asked if isinstance(asked, str) else await _text(served, prompt.ids)
    tokens, reason = len(made["tokens"]), "length" if made["stop_type"] == "limit" else "stop"
    yield {"type": "text", "text": text + made["content"], "tokens": tokens, "logprobs": rows}
    yield {"type": "end", "reason": reason, "tokens": tokens, "seconds": round(time.monotonic() - started, 3)}


async def _text(served: Served, ids: Sequence[int]) -> str:
    if served.tokenizer is not None:
        return served.tokenizer.decode(ids)
    return str((await served.engine.ask("/detokenize", {"tokens": ids}))["content"])


async def _pieces(served: Served, ids: Collection[int]) -> dict[int, dict[str, Any]]:
    """Text and bytes of each token; of a control symbol, which has none, its name."""
    found = {}
    for number in ids:
        if served.tokenizer is None:
            data = (await _text(served, [number])).encode()
        else:
            name = served.tokenizer.processor.id_to_piece(number)
            data = served.tokenizer.decode_bytes([number]) or name.encode()
        found[number] = {"token": data.decode(errors="backslashreplace"), "bytes": list(data)}
    return found


async def _check(served: Served, body: Mapping[str, Any]) -> None:
    """InputError for what llama.cpp would pass over: a bias for no token, no such adapter, a schema beyond it."""
    tokenizer, engine = served.tokenizer, served.engine
    for number, _ in body.get("logit_bias", ()):
        if tokenizer is not None and number >= tokenizer.vocab_size:
            raise InputError(f"there is no token {number}", where="logit_bias")
    for adapter in body.get("lora", ()):
        if adapter["id"] >= (count := len(engine.job.lora)):
            raise InputError(f"there is no adapter {adapter['id']}: the model has {count}", where="lora")
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

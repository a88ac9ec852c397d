"""Questions about a GGUF file: asked of an engine of its own, and answered together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.base.errors import GateError, InputError
from athanor.export.llamacpp.engine import Engine, EngineDied, Job, NotInstalled

TIMEOUTS = "export.llama_cpp_timeout_seconds, athanor evaluate --timeout"


async def tokens(engine: Engine, text: str, symbols: bool = False) -> list[int]:
    """Ids with what the file adds at the ends (BOS); `symbols`: control symbols are parsed out of the text."""
    body = {"content": text, "parse_special": symbols, "add_special": True}
    return list((await engine.ask("/tokenize", body))["tokens"])


async def chat_tokens(engine: Engine, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation as the chat endpoint renders it."""
    return await tokens(engine, (await engine.ask("/apply-template", {"messages": messages}))["prompt"], True)


async def greedy(engine: Engine, ids: Sequence[int], limit: int) -> tuple[list[int], bool]:
    """Ids made, and whether an end token stopped them."""
    body = {"prompt": list(ids), "n_predict": limit, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    answer = await engine.ask("/completion", body)
    return answer["tokens"], answer["stop_type"] == "eos"


QUESTIONS = {"tokens": tokens, "chat_tokens": chat_tokens, "greedy": greedy, "score": Engine.score}


def ask(
    path: str | Path,
    questions: Mapping[str, Sequence[Sequence[Any]]],
    *,
    context_tokens: int,
    exact: bool,
    threads: int,
    timeout_seconds: float,
    lora: Sequence[str | Path] = (),
) -> dict[str, list[Any]]:
    """Answers to `questions`: a name in `QUESTIONS` -> the arguments of each call.

    NotInstalled without xllamacpp, GateError where llama.cpp crashes, refuses the file or takes too long. An engine that
    dies or goes silent is started again.
    """
    adapters = tuple(str(Path(one).resolve()) for one in lora)
    job = Job(str(Path(path).resolve()), context_tokens, threads=threads, exact=exact, lora=adapters)

    async def answers() -> dict[str, list[Any]]:
        engine = Engine(job)
        try:
            async with asyncio.timeout(timeout_seconds):
                return {name: [await _asked(engine, name, call) for call in calls] for name, calls in questions.items()}
        except TimeoutError:
            fix = f"allow more time on a slow machine ({TIMEOUTS}), otherwise the file is broken"
            what = f"llama.cpp gave no answer in {timeout_seconds:g} s"
            raise GateError("llama.cpp", what, where=Path(path).name, fix=fix) from None
        except InputError as error:
            if isinstance(error, NotInstalled):
                raise
            raise GateError("llama.cpp", error.what, where=Path(path).name, fix="the file is broken") from None
        finally:
            await engine.close()

    return asyncio.run(answers())


async def _asked(engine: Engine, name: str, call: Sequence[Any]) -> Any:
    while True:  # an engine that ends again and again under one request refuses it
        try:
            return await QUESTIONS[name](engine, *call)  # type: ignore[operator]
        except EngineDied:
            continue

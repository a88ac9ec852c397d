"""Turns under way: a question, the answers that models are giving to it side by side, and storing what was said.

A turn runs as tasks of its own and hands its events to whoever reads them
through a queue. So a slow reader does not hold back a model, and a reader who
leaves stops the turn without cutting off the storing of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from athanor.base.errors import AthanorError, InputError, suggest
from athanor.serving.backends.base import UNFINISHED_CHARACTER, Request
from athanor.serving.discover import TRANSFORMERS
from athanor.serving.models import Models
from athanor.serving.requests import Refused
from athanor.serving.store import Store
from athanor.text.conversations import Message

logger = logging.getLogger(__name__)
STOP_SECONDS = 10.0  # for a stopped answer to be stored; takes milliseconds where the disk answers
Event = dict[str, Any]
Question = int | tuple[int | None, str]  # a stored question, or (parent, text) of a new one


@dataclass
class _AnswerProgress:
    """What one model has answered so far."""

    texts: list[str] = field(default_factory=list)
    likely: list[Any] = field(default_factory=list)  # of each token its text, probability and the likeliest ones
    tokens: int = 0
    prompt_tokens: int | None = None
    forgotten: int | None = None
    started_at: float | None = None  # monotonic seconds, of the start of generation
    final_event: Event | None = None  # the "end" or "error"

    def update(self, event: Event) -> None:
        self.likely += map(_likely, event.pop("logprobs", ()))
        if event["type"] == "start":
            self.prompt_tokens, self.forgotten = event["prompt_tokens"], event["forgotten"]
            self.started_at = time.monotonic()
        elif event["type"] == "text":
            self.texts.append(event["text"])
            self.tokens = event["tokens"]
        elif event["type"] in ("end", "error"):
            self.final_event = event

    def stopped(self) -> Event:
        """The end of an answer that was told to stop; the worker's own figures no longer arrive."""
        seconds = 0.0 if self.started_at is None else time.monotonic() - self.started_at
        return {"type": "end", "reason": "stopped", "tokens": self.tokens, "seconds": round(seconds, 3)}


class Turn:
    """One question being answered. `events()` ends with "done"; `stop()` ends it early, keeping what was said."""

    def __init__(self, store: Store, models: Models, chat: str) -> None:
        self.store, self.models, self.chat = store, models, chat
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()  # no longer than the answers are
        self._stop, self.ended = asyncio.Event(), asyncio.Event()
        self._storing = asyncio.Lock()
        self._message_ids: dict[int, int] = {}  # column of the page -> id of the stored answer
        self._stored_question: Event | None = None  # the question as stored
        self._question: Question = 0
        self._begun: Event | None = None  # the stored answer that is gone on with

    def stop(self) -> None:
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def wait(self) -> bool:
        """Whether it has ended, after waiting for that for a while."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), STOP_SECONDS)
        return self.ended.is_set()

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self._queue.get()) is not None:
            yield event

    async def run(self, question: Question, names: Sequence[str], request: Request, begun: Event | None = None) -> None:
        """Have every model of `names` answer, and store what they say. Raises nothing but cancellation."""
        self._question, self._begun = question, begun
        try:
            await asyncio.gather(*(self._answer_column(column, name, request) for column, name in enumerate(names)))
            with suppress(AthanorError):  # the chat may have been deleted by now
                leaf = (await asyncio.to_thread(self.store.chat, self.chat))["leaf"]
                self._queue.put_nowait({"type": "done", "user": self._stored_question, "leaf": leaf})
                return
            self._queue.put_nowait({"type": "done", "user": None, "leaf": None})
        finally:
            self._queue.put_nowait(None)

    async def _answer_column(self, column: int, name: str, request: Request) -> None:
        progress = _AnswerProgress()
        forwarding = asyncio.create_task(self._forward_events(column, name, progress, request))
        stop = asyncio.create_task(self._stop.wait())
        with suppress(asyncio.CancelledError):  # the server is torn down: what was said is stored all the same
            await asyncio.wait({forwarding, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not forwarding.done():
            self.stop()
        stop.cancel()
        forwarding.cancel()  # closes the iterator, and with it the answer in the worker
        await asyncio.wait({forwarding})
        if progress.final_event is None:
            progress.final_event = progress.stopped() if self._stop.is_set() else _error("the answer broke off")
        try:
            final_event = await self._store_answer(column, name, progress)
        except AthanorError as error:
            final_event = _error(str(error))
        except Exception as error:
            logger.exception("an answer of %s could not be stored", name)
            final_event = _error(f"the answer could not be stored ({type(error).__name__})")
        self._queue.put_nowait({**final_event, "slot": column})

    async def _forward_events(self, column: int, name: str, progress: _AnswerProgress, request: Request) -> None:
        """Pass on the events of one answer until its last one, which waits until the answer is stored."""
        try:
            if request.steering and (name, TRANSFORMERS) in [
                (one["id"], one["backend"]) for one in self.models.states()
            ]:
                request = replace(request, steering={})  # it tells no probabilities
            async with aclosing(self.models.answer(name, request)) as events:
                async for event in events:
                    progress.update(event)
                    if progress.final_event is not None:
                        return
                    self._queue.put_nowait({**event, "slot": column})
        except AthanorError as error:
            progress.final_event = _error(str(error), "request")
        except Exception as error:  # whatever a model's part does, the chat goes on
            logger.exception("an answer of %s failed", name)
            progress.final_event = _error(f"the model failed ({type(error).__name__})")

    async def _store_answer(self, column: int, name: str, progress: _AnswerProgress) -> Event:
        """Store an answer; returns the event that ends its column."""
        final_event = dict(progress.final_event or {})
        if final_event["type"] == "error":
            return final_event
        content = "".join(progress.texts)
        if final_event["reason"] == "stopped" and not content:
            return {**final_event, "message": None}
        stats = {name: final_event[name] for name in ("tokens", "seconds", "reason")}
        stats |= {"prompt_tokens": progress.prompt_tokens, "forgotten": progress.forgotten}
        if progress.likely:
            stats["likely"] = progress.likely
        if self._begun is not None:
            return {**final_event, "message": await self._store_more(self._begun, content, stats)}
        async with self._storing:  # the first to store brings the question with it, the second finds it there
            # Of two answers the first stored is shown, until that of column 0 is there; then a person picks.
            shown = column == 0 or not self._message_ids
            stored_question, answer = await asyncio.to_thread(
                self.store.answer, self.chat, self._question, content, model=name, stats=stats, shown=shown
            )
            self._question, self._stored_question = stored_question["id"], stored_question
            self._message_ids[column] = answer["id"]
        return {**final_event, "message": answer}

    async def _store_more(self, begun: Event, content: str, stats: Event) -> Event:
        """Store the rest of an answer with its beginning; returns the whole. Counts are those of both."""
        before = begun["stats"] or {}
        for name in ("tokens", "seconds"):
            stats[name] = round(stats[name] + before.get(name, 0), 3)
        if "likely" in stats:  # of the beginning they may not be known
            known = before.get("likely", [[begun["content"], None, []]])
            stats["likely"] = known + stats["likely"]
        return await asyncio.to_thread(self.store.extend, begun["id"], begun["content"] + content, stats)


class Turns:
    """The turns under way, one for each chat at most."""

    def __init__(self, store: Store, models: Models) -> None:
        self.store, self.models = store, models
        self._turns: dict[str, Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self,
        chat: str,
        question: Question,
        *,
        names: Sequence[str] | None,
        sampling: dict[str, Any] | None,
        begun: int | None = None,
    ) -> Turn:
        """Begin a turn; Refused (409) if the chat has one. Names and sampling of None are the chat's own.

        `begun`: an answer to the stored question that one model goes on with.
        """
        while (running := self._turns.get(chat)) is not None:
            if not running.stopping or not await running.wait():
                raise Refused(409, "this chat is being answered", "wait for the end, or stop it")
        turn = self._turns[chat] = Turn(self.store, self.models, chat)
        try:
            history = await asyncio.to_thread(self.store.check_turn, chat, question)
            stored_chat = await asyncio.to_thread(self.store.chat, chat)
            names = self.check_names(names or stored_chat["models"])
            sampling = dict(stored_chat["sampling"] if sampling is None else sampling)
            limit, likely = sampling.pop("max_new_tokens", None), sampling.pop("top_logprobs", None)
            steering = {} if likely is None else {"top_logprobs": likely}
            messages = [Message("system", stored_chat["system"])] if stored_chat["system"].strip() else []
            messages += [Message(message["role"], message["content"]) for message in history]
            if isinstance(question, tuple):
                messages.append(Message("user", question[1]))
            answer = next((one for one in stored_chat["messages"] if one["id"] == begun), None)
            if begun is not None and (answer is None or answer["parent"] != question):
                raise InputError(f"message {begun} is no answer to it", where="begun", fix="name one of its answers")
            if answer is not None:
                answer["content"] = answer["content"].rstrip(UNFINISHED_CHARACTER)
                messages.append(Message("assistant", answer["content"]))
        except BaseException:
            self._end(turn)
            raise
        request = Request(messages, limit, sampling, steering=steering)
        task = asyncio.create_task(turn.run(question, names, request, answer))
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._end(turn)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("a turn failed", exc_info=error)

        task.add_done_callback(ended)
        return turn

    def _end(self, turn: Turn) -> None:
        del self._turns[turn.chat]
        turn.ended.set()

    def check_names(self, names: Sequence[str]) -> list[str]:
        """The models to ask, the default one if none is named. InputError for those there are not."""
        known = [state["id"] for state in self.models.states()]
        names = list(names) or self.default_names()
        if not names:
            raise InputError("there is no model to answer", fix="train one, or start the server with --model PATH")
        for name in names:
            if name not in known:
                raise InputError(f"there is no model '{name}'", where="models", fix=suggest(name, known))
        return names

    def default_names(self) -> list[str]:
        """The default model; empty if there is none that works."""
        with suppress(AthanorError):
            return [self.models.default()]
        return []

    async def stop(self, chat: str) -> None:
        """End the chat's turn with what it has, and wait until that is stored; nothing happens if there is none."""
        if (turn := self._turns.get(chat)) is not None:
            turn.stop()
            await turn.wait()

    async def close(self) -> None:
        """Stop all turns and wait until what was said is stored."""
        for turn in self._turns.values():
            turn.stop()
        if self._tasks:
            await asyncio.wait(set(self._tasks))


def _likely(row: Event) -> list[Any]:
    """A token as it is kept: [text, probability, the likeliest as [text, probability]]."""
    token, *top = ([one["token"], round(math.exp(one["logprob"]), 4)] for one in (row, *row["top_logprobs"]))
    return [*token, top]


def _error(message: str, kind: str = "model") -> Event:
    return {"type": "error", "kind": kind, "message": message}

"""Our own export on athanor's engine: answers are made side by side, each joins and leaves the batch at any step."""

from __future__ import annotations

import codecs
import secrets
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from athanor.base.errors import AthanorError
from athanor.decoding.folded import FusedDecoder
from athanor.decoding.prompting import end_ids, exempt_ids
from athanor.decoding.sampling import Sampling
from athanor.model.config import ModelConfig
from athanor.model.device import prepare as prepare_device
from athanor.model.transformer import Transformer
from athanor.serving.backends.base import Answer, Emit, Prompt, Request, prepare, reserve, split_begun
from athanor.serving.backends.grammar import Grammars
from athanor.serving.backends.steering import SteeredEngine, Steering
from athanor.serving.loading import decoding_defaults, few_threads, load_export, sampling_defaults
from athanor.serving.memory import kept_rows
from athanor.serving.running import CONTINUES, template_of
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import Tokenizer

# Prompts read in one pass, padding included: more would hold up the answers under way for longer.
READ_TOKENS = 1024
UNTAUGHT = Sampling(temperature=0.8, top_p=0.95)


def row_bytes(config: ModelConfig) -> int:
    """Memory of one answer's keys and values, fp32."""
    return 2 * 4 * config.layers * config.kv_heads * (config.context_tokens + 1) * config.head_dim


class _Answer(Answer):
    """An answer and what it is made from. A token may end in the middle of a character, hence the decoder."""

    def __init__(
        self, request: Request, emit: Emit, prompt: Prompt, sampling: Sampling, steering: Steering | None
    ) -> None:
        super().__init__(request, emit)
        self.prompt, self.sampling, self.steering = prompt, sampling, steering
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def end(self, reason: str) -> None:
        self.add(self.decoder.decode(b"", final=True))
        super().end(reason)


class TorchBackend:
    """One thread decodes; requests and cancellations reach it through a queue. `shipped`: see `decoding_defaults`.

    `template`: CONTINUES for a model that was never shown a conversation. It goes on with the last message.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        shipped: Mapping[str, Any],
        *,
        rows: int,
        cache_bytes: int,
        template: str = "athanor",
    ) -> None:
        self.tokenizer, config = tokenizer, model.config
        row = row_bytes(config)
        rows = max(1, min(rows, cache_bytes * 3 // 4 // row))
        self.ends = frozenset(end_ids(tokenizer))
        # The likeliest text of a model that was not taught to answer goes in circles.
        self.defaults = UNTAUGHT if template == CONTINUES else Sampling.from_dict(sampling_defaults(shipped))
        self.max_new_tokens = int(shipped.get("max_new_tokens", max(1, config.context_tokens // 2)))
        self.engine = SteeredEngine(
            FusedDecoder(model),
            tokenizer=tokenizer,
            rows=rows,
            stop_ids=self.ends,
            exempt=exempt_ids(tokenizer),
            keep_bytes=max(0, min(kept_rows(rows) * row, cache_bytes - rows * row)),
        )
        self.grammars = Grammars(tokenizer)
        self.info: dict[str, Any] = {
            "backend": "torch",
            "template": template,
            "template_hash": template_hash(tokenizer),
            "context_tokens": config.context_tokens,
            "parameters": config.parameter_count(),
            "rows": rows,
            "defaults": {k: v for k, v in asdict(self.defaults).items() if k != "seed"}
            | {"max_new_tokens": self.max_new_tokens},
        }
        self.answers: dict[int, _Answer] = {}
        self.waiting: deque[_Answer] = deque()
        self.cancelled: deque[int] = deque()
        self.work, self.closing = threading.Condition(), False
        self.thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self.thread.start()

    def submit(self, request: Request, emit: Emit) -> None:
        try:
            answer = _Answer(
                request,
                emit,
                prepare(
                    self.tokenizer,
                    request.messages,
                    self._text(request),
                    context_tokens=self.info["context_tokens"],
                    max_new_tokens=self.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens,
                ),
                Sampling.from_dict(asdict(self.defaults) | {"seed": secrets.randbelow(2**31)} | request.sampling),
                self._steering(request),
            )
        except AthanorError as error:
            Answer(request, emit).fail("request", str(error))
            return
        with self.work:
            self.waiting.append(answer)
            self.work.notify()

    def _text(self, request: Request) -> str | Sequence[int] | None:
        """What to go on with in place of a conversation, if anything."""
        if request.prompt is not None or self.info["template"] != CONTINUES:
            return request.prompt
        question, begun = split_begun(request.messages)
        ids = self.tokenizer.encode("".join(message.content for message in question[-1:]) + begun)
        context = self.info["context_tokens"]
        return [self.tokenizer.bos, *ids[1 - context + reserve(context, context) :]]  # the end of a long text

    def _steering(self, request: Request) -> Steering | None:
        if not request.steering:
            return None
        options = dict(request.steering)
        schema = options.pop("json_schema", None)
        steering = Steering(**options, grammar=None if schema is None else self.grammars.of_schema(schema))
        steering.check(self.tokenizer.vocab_size)
        return steering

    def cancel(self, request_id: int) -> None:
        with self.work:
            self.cancelled.append(request_id)
            self.work.notify()

    def close(self) -> None:
        with self.work:
            self.closing = True
            self.work.notify()
        self.thread.join()

    def _run(self) -> None:
        torch.set_flush_denormal(True)
        while True:
            with self.work:
                while not (self.closing or self.waiting or self.cancelled or self.answers):
                    self.work.wait()
                if self.closing:
                    return
                cancelled, self.cancelled = self.cancelled, deque()
            joining: list[_Answer] = []
            try:
                for request_id in cancelled:
                    self._stop(request_id)
                with self.work:  # after the stops: who was cancelled while it waited does not join
                    joining = self._next_answers()
                self._handle_events(self.engine.step())
                self._join(joining)
            except Exception as error:  # out of memory, say: these answers fail, the next may not
                self._fail(joining, error)

    def _next_answers(self) -> list[_Answer]:
        """The waiting answers to start: as many as have a free row, and as one pass can read without a long delay."""
        chosen: list[_Answer] = []
        widest = 0
        while self.waiting and len(chosen) < self.engine.free:
            widest = max(widest, len(self.waiting[0].prompt.ids))
            if chosen and widest * (len(chosen) + 1) > READ_TOKENS:
                break
            chosen.append(self.waiting.popleft())
        return chosen

    def _join(self, joining: list[_Answer]) -> None:
        for answer in joining:
            self.answers[answer.request.id] = answer
            if answer.steering is not None:
                self.engine.steering[answer.request.id] = answer.steering
            answer.start(answer.prompt)
        self._handle_events(
            self.engine.add_requests(
                [(a.request.id, a.prompt.ids, a.prompt.max_new_tokens, a.sampling) for a in joining]
            )
        )

    def _handle_events(self, events: list[Any]) -> None:
        for request_id, token, done in events:
            answer = self.answers[request_id]
            if token in self.ends:
                self._pop(request_id).end("stop")
                continue
            answer.tokens += 1
            if row := self.engine.logprobs.get(request_id):
                answer.logprobs.append(row)
            answer.add(answer.decoder.decode(self.tokenizer.decode_bytes([token])))
            if answer.stops.found:
                self.engine.cancel(request_id)
                self._pop(request_id).end("stop")
            elif done:
                self._pop(request_id).end("length")

    def _stop(self, request_id: int) -> None:
        if request_id in self.answers:
            self.engine.cancel(request_id)
            self._pop(request_id).end("stopped")
            return
        with self.work:
            cancelled = [answer for answer in self.waiting if answer.request.id == request_id]
            self.waiting = deque(answer for answer in self.waiting if answer.request.id != request_id)
        for answer in cancelled:
            answer.end("stopped")

    def _pop(self, request_id: int) -> _Answer:
        self.engine.steering.pop(request_id, None)
        return self.answers.pop(request_id)

    def _fail(self, joining: list[_Answer], error: Exception) -> None:
        failed = {answer.request.id: answer for answer in [*self.answers.values(), *joining]}
        self.answers, self.engine.rows, self.engine.steering, self.engine.kept = {}, [], {}, []
        for answer in failed.values():
            answer.fail("model", f"{type(error).__name__}: {error}")


def open_backend(spec: Mapping[str, Any]) -> TorchBackend:
    """Load what `spec["path"]` names; AthanorError with the reason if that is not possible."""
    model, tokenizer = load_export(spec["path"], prepare_device(spec["device"], spec["threads"]))
    few_threads(model)
    shipped = decoding_defaults(spec["path"])
    bounds = {name: spec[name] for name in ("rows", "cache_bytes")}
    return TorchBackend(model, tokenizer, shipped, **bounds, **template_of(Path(spec["path"])))

"""What a worker asks of the runtime that makes its answers, and what all runtimes do alike. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from athanor.base.errors import InputError
from athanor.decoding.prompting import TOO_LONG, fit
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer

RESERVE_SHARE = 0.25  # of the context, kept free for an answer at the cost of the oldest turns
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
UNFINISHED_CHARACTER = "\ufffd"  # stands for the bytes of an unfinished character
MIN_TEMPERATURE = 1e-6  # as athanor.decoding.sampling has it: below it logits overflow, which can end a GPU's process
RANGES = {
    "temperature": (0, 100),
    "top_k": (0, 1 << 31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Request:
    """One answer to make. Settings that are not in `sampling`, and a limit of None, are the model's own defaults.

    `prompt`, a text or its ids, is gone on with as it is, in place of messages.
    `stop` are texts that end the answer where they first appear; they are not part of it. `steering`: what else each
    step does (steering.py), of torch only. `id`: in one process of a model.
    """

    messages: Sequence[Message]
    max_new_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    id: int = 0
    steering: dict[str, Any] = field(default_factory=dict)
    prompt: str | Sequence[int] | None = None


class Backend(Protocol):
    """A loaded model. `info` tells what it is and its defaults (docs/serving.md)."""

    info: dict[str, Any]

    def submit(self, request: Request, emit: Emit) -> None:
        """Begin an answer and return at once; its events go to `emit`, from any thread."""

    def cancel(self, request_id: int) -> None:
        """End an answer with what it has; nothing happens if it is not under way."""

    def close(self) -> None:
        """Free what the model holds."""


class Answer:
    """The events of one answer: "start", then "text" as soon as it is certain, then one "end" or "error"."""

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request, self.stops = request, Stops(request.stop)
        self.tokens = 0  # made so far
        self.logprobs: list[dict[str, Any]] = []  # of tokens whose text has not been sent yet
        self._emit, self._started_at = emit, 0.0
        self._lock, self._finished = threading.Lock(), False

    def start(self, prompt: Prompt) -> None:
        self._started_at = time.monotonic()
        self._emit({"type": "start", "prompt_tokens": len(prompt.ids), "forgotten": prompt.forgotten})

    def add(self, text: str) -> None:
        self._emit_text(self.stops.add(text))

    def end(self, reason: str) -> None:
        self._emit_text(self.stops.rest())
        seconds = round(time.monotonic() - self._started_at, 3) if self._started_at else 0.0
        end = {"type": "end", "reason": reason, "tokens": self.tokens, "seconds": seconds}
        self._emit_final(end | self._new_logprobs())

    def fail(self, kind: str, message: str) -> None:
        self._emit_final({"type": "error", "kind": kind, "message": message})

    def _emit_text(self, text: str) -> None:
        if text:
            self._emit({"type": "text", "text": text, "tokens": self.tokens} | self._new_logprobs())

    def _new_logprobs(self) -> dict[str, Any]:
        rows, self.logprobs = self.logprobs, []
        return {"logprobs": rows} if rows else {}

    def _emit_final(self, event: dict[str, Any]) -> None:
        with self._lock:
            is_first, self._finished = not self._finished, True
        if is_first:
            self._emit(event)


def refuse_steering(request: Request, backend: str, but: Sequence[str] = ()) -> None:
    """InputError if the request wants what only the torch backend does, `but` for some."""
    for name in [name for name in request.steering if name not in but]:
        fix = "leave it out, or ask the model's exact weights (backend torch)"
        field = "response_format" if name == "json_schema" else name
        raise InputError(f"{backend} does not do this here", where=field, fix=fix)


class Stops:
    """Lets text through until one of `texts` appears; what could be the beginning of one is held back."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = [text for text in texts if text]
        self.longest = max(map(len, self.texts), default=0)
        self.held_back, self.found = "", False

    def add(self, text: str) -> str:
        """The text that may be shown now; sets `found` when a stop text appears."""
        if self.found:
            return ""
        text = self.held_back + text
        positions = [position for position in map(text.find, self.texts) if position >= 0]
        if positions:
            self.held_back, self.found = "", True
            return text[: min(positions)]
        lengths = range(min(self.longest - 1, len(text)), 0, -1)
        held_length = next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.texts)), 0)
        self.held_back = text[len(text) - held_length :]
        return text[: len(text) - held_length]

    def rest(self) -> str:
        """What was held back and turned out to be no stop text."""
        held_back, self.held_back = self.held_back, ""
        return held_back


@dataclass(frozen=True)
class Prompt:
    """Ids to continue, how many ids may follow, and how many of the oldest exchanges were left out to fit."""

    ids: list[int]
    max_new_tokens: int
    forgotten: int


def reserve(context_tokens: int, limit: int) -> int:
    """Tokens to keep free for an answer of at most `limit`."""
    return max(1, min(limit, int(context_tokens * RESERVE_SHARE)))


def prepare(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    prompt: str | Sequence[int] | None = None,
    *,
    context_tokens: int,
    max_new_tokens: int,
) -> Prompt:
    """The prompt of our own template; InputError also if the roles are not those of the template.

    A last assistant message is the beginning of the answer: its ids follow the opening, as they did in training.
    `prompt` in place of messages begins as a document of the pretraining did.
    """
    if prompt is not None:
        ids = [tokenizer.bos, *tokenizer.encode(prompt)] if isinstance(prompt, str) else list(prompt)
        return text_prompt(ids, tokenizer.vocab_size, context_tokens, max_new_tokens)
    question, begun = split_begun(messages)
    prompt_ids(tokenizer, [Message(message.role, "") for message in question])  # the roles, before their fitting
    begun_ids = tokenizer.encode(begun)
    return fit_prompt(
        question, lambda candidate: prompt_ids(tokenizer, candidate) + begun_ids, context_tokens, max_new_tokens
    )


def text_prompt(ids: list[int], vocab_size: int, context_tokens: int, max_new_tokens: int) -> Prompt:
    """A text to go on with; InputError for one that does not fit, or ids that are not the model's."""
    if not ids:
        raise InputError("it is empty", where="prompt", fix="send a text, or ids")
    if len(ids) >= context_tokens:
        raise InputError(f"{TOO_LONG} {context_tokens} tokens, and the prompt has {len(ids)}", fix="shorten the prompt")
    if max(ids) >= vocab_size:
        raise InputError(f"there is no token {max(ids)}", where="prompt", fix=f"ids are 0 to {vocab_size - 1}")
    return Prompt(ids, min(max_new_tokens, context_tokens - len(ids)), 0)


def split_begun(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """The messages up to the question, and the beginning of the answer to it, if the last one is the assistant's."""
    begun = messages and messages[-1].role == "assistant"
    return (messages[:-1], messages[-1].content) if begun else (messages, "")


def fit_prompt(
    messages: Sequence[Message],
    ids_of: Callable[[Sequence[Message]], list[int]],
    context_tokens: int,
    max_new_tokens: int,
) -> Prompt:
    """The prompt for the next answer of a conversation that ends with a user message; `ids_of` lays one out.

    InputError if the last message alone does not fit.
    """
    fitting, forgotten = fit(
        messages,
        lambda candidate: len(ids_of(candidate)),
        context_tokens=context_tokens,
        reserve_tokens=reserve(context_tokens, max_new_tokens),
    )
    ids = ids_of(fitting)
    return Prompt(ids, min(max_new_tokens, context_tokens - len(ids)), forgotten)


def settings(requested: Mapping[str, float], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings of an answer: the requested ones, else the model's. InputError for an impossible one."""
    chosen = {name: requested.get(name, defaults.get(name)) for name in RANGES}
    for name, value in chosen.items():
        low, high = RANGES[name]
        exclusive_low = name == "top_p"
        too_small = name == "temperature" and 0 < value < MIN_TEMPERATURE
        if not low <= value <= high or (exclusive_low and value == low) or too_small:
            fix = f"use {'more than ' if exclusive_low else ''}{low} to {high}"
            fix += f", if not 0 then {MIN_TEMPERATURE:g} at least" if too_small else ""
            raise InputError(f"{value} is impossible", where=name, fix=fix)
    return chosen

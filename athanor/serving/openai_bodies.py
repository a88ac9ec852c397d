"""The bodies of OpenAI's protocol as clients send them, and the answers that they ask a model for."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from athanor.decoding.prompting import TOO_LONG
from athanor.serving.backends.base import MIN_TEMPERATURE
from athanor.serving.backends.base import Request as AnswerRequest
from athanor.serving.openai_options import ALIASES, BESIDE, sort_out
from athanor.serving.requests import SamplingFields, fault
from athanor.text.conversations import Message

ROLES = {"developer": "system"}  # OpenAI's newer name of the same
MAX_MESSAGES, MAX_STOPS, MAX_CHARS, MAX_ANSWERS, MAX_LOGPROBS = 10_000, 16, 1_000_000, 8, 20
MAX_TEXTS = 128  # answers of one request to /v1/completions
SCHEMAS = {"text": type(None), "json_object": (dict, type(None)), "json_schema": dict}  # type of response_format
SMALLEST_TOP_P = 1e-9  # keeps the likeliest token only
# Hugging Face's client names no model so, or gives the server's address as one.
NO_MODEL = ("dummy", "tgi", "http://", "https://")
PARTS = {
    "image_url": "pictures",
    "input_image": "pictures",
    "image": "pictures",
    "input_audio": "sound",
    "file": "files",
}

Text = Annotated[str, Field(max_length=MAX_CHARS)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Stop = Annotated[str, Field(max_length=1000)]


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: Text | list[Any] | None = None

    @model_validator(mode="after")
    def check_supported(self) -> ChatMessage:
        if self.role not in ("system", "developer", "user", "assistant"):
            raise ValueError(f"role '{self.role[:50]}' is not known here; use system, developer, user or assistant")
        for name in ("tool_calls", "function_call", "audio"):
            if (self.model_extra or {}).get(name):
                raise ValueError(f"'{name}' is not supported here; leave the message out")
        if isinstance(self.content, list):
            self.content = "".join(_part_text(part) for part in self.content)
            if len(self.content) > MAX_CHARS:
                raise ValueError(f"at most {MAX_CHARS:,} characters")
        return self

    def message(self) -> Message:
        return Message(ROLES.get(self.role, self.role), self.content or "")


def _part_text(part: Any) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    text = part if isinstance(part, str) else part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal") and isinstance(text, str):
        return text
    raise ValueError(f"{PARTS.get(str(kind), 'parts other than text')} cannot be read here; send text only")


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class ResponseFormat(BaseModel):
    """Chat completions have the schema one level deeper than responses, llama.cpp and Hugging Face beside json_object."""

    model_config = ConfigDict(extra="forbid")
    form: ClassVar = '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {...}}}'

    type: str
    json_schema: dict[str, Any] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    value: dict[str, Any] | None = None
    name: Any = None
    description: Any = None
    strict: Any = None

    @model_validator(mode="after")
    def check_schema(self) -> ResponseFormat:
        if self.type not in SCHEMAS:
            raise ValueError(f"type '{self.type[:50]}' is not known here; send {self.form}")
        if not isinstance(self._given(), SCHEMAS[self.type]):
            raise ValueError(f"'{self.type}' with {'such a' if self._given() else 'no'} schema; send {self.form}")
        return self

    def _given(self) -> Any:
        return (self.json_schema or {}).get("schema", self.value if self.schema_ is None else self.schema_)

    def steering(self) -> dict[str, Any]:
        return {} if self.type == "text" else {"json_schema": self._given() or {"type": "object"}}


class Options(SamplingFields):
    """What all ways to ask have in common. Settings left out, or null, are the model's own.

    top_k, min_p and repetition_penalty go beyond OpenAI's. What other servers write for "as you like" (-1) is null here.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    question_field: ClassVar = "messages"
    format_field: ClassVar = "response_format"

    model: Annotated[str, Field(max_length=500)] | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    max_tokens: int | None = Field(None, ge=1, le=10_000_000)
    stop: Stop | list[Stop] | None = None
    stream: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = Field(None, max_length=1024)
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def other_servers_values(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        body = {**body}
        for name in BESIDE:
            if isinstance(body.get(name), dict):
                body = {**body.pop(name), **body}
        for name, meant in ALIASES.items():
            if name in body and name not in cls.model_fields and body.get(meant) is None:
                body[meant] = body.pop(name)
        for name in ("top_k", "seed", "max_tokens", "max_completion_tokens", "max_output_tokens"):
            if _number(body.get(name)) and body[name] == -1:
                body[name] = None
        if _number(body.get("top_p")) and 0 <= body["top_p"] < SMALLEST_TOP_P:
            body["top_p"] = SMALLEST_TOP_P
        if _number(body.get("temperature")) and 0 < body["temperature"] < MIN_TEMPERATURE:
            body["temperature"] = 0
        if _number(body.get("seed")) and -(2**63) <= body["seed"] < 0:
            body["seed"] += 2**63
        return body

    @field_validator("stop")
    @classmethod
    def not_too_many(cls, stop: Any) -> Any:
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop texts")
        return stop

    @model_validator(mode="after")
    def check_options(self) -> Options:
        self._ignored += sort_out(self.model_extra or {}, type(self).model_fields, self.format_field)
        if self.model is not None and self.model.startswith(NO_MODEL):
            self._ignored.append("model")
            self.model = None
        return self

    @property
    def ignored(self) -> list[str]:
        """Names of what is passed over."""
        return self._ignored

    def limit(self) -> int | None:
        return self.max_tokens

    def failure(self, event: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The status of an event "error", and the error as this route names things."""
        message, status = event["message"].replace("response_format", self.format_field), 503
        if event["kind"] == "request":
            status = 400
        if TOO_LONG in message:
            return status, fault(status, f"{self.question_field}: {message}", "context_length_exceeded")
        return status, fault(status, message)

    def asks(self, messages: Sequence[Message] = (), **more: Any) -> list[AnswerRequest]:
        """`n` answers: the first has the seed that was asked for, the others the next ones."""
        sampling = self.model_dump(include=set(SamplingFields.model_fields), exclude_none=True)
        count, stops = self.n or 1, [self.stop] if isinstance(self.stop, str) else self.stop or ()
        if count > 1:
            sampling.setdefault("seed", secrets.randbelow(2**31))
        seeds = [{"seed": (sampling["seed"] + number) % 2**63} for number in range(count)] if count > 1 else [{}]
        steering = self.steering()
        return [
            AnswerRequest(messages, self.limit(), sampling | seed, stops, steering=steering, **more) for seed in seeds
        ]

    def steering(self) -> dict[str, Any]:
        """What is asked of each step beside sampling; nothing for values that change nothing."""
        names = ("presence_penalty", "frequency_penalty", "logit_bias")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class ChatCompletion(Options):
    messages: list[ChatMessage] = Field(max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=10_000_000)
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def check_conversation(self) -> ChatCompletion:
        left_out = conversation([message.message() for message in self.messages])[1]
        self._ignored += [f"messages.{index}" for index in left_out]
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: goes with logprobs: true")
        return self

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def conversation(self) -> list[Message]:
        return conversation([message.message() for message in self.messages])[0]

    def steering(self) -> dict[str, Any]:
        likely = {"top_logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return super().steering() | likely | (self.response_format.steering() if self.response_format else {})

    def requests(self) -> list[AnswerRequest]:
        return self.asks(self.conversation())


class Completion(Options):
    """A text, or several, to go on with as they are, without the chat's template. Ids of tokens will do as well."""

    question_field: ClassVar = "prompt"
    format_field: ClassVar = "response_format of /v1/chat/completions"

    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]] = Field(max_length=MAX_CHARS)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream_options: StreamOptions | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def no_logprobs(cls, value: Any) -> Any:
        return None if value is False else value

    @model_validator(mode="after")
    def check_prompts(self) -> Completion:
        count = len(self._prompts())
        if not 0 < count * (self.n or 1) <= MAX_TEXTS:
            raise ValueError(f"prompt: 1 to {MAX_TEXTS} answers in one request")
        return self

    def _prompts(self) -> list[Any]:
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        return prompt if several else [prompt]

    def steering(self) -> dict[str, Any]:
        return super().steering() | ({} if self.logprobs is None else {"top_logprobs": self.logprobs})

    def requests(self) -> list[AnswerRequest]:
        return [request for prompt in self._prompts() for request in self.asks(prompt=prompt)]


def conversation(messages: Sequence[Message]) -> tuple[list[Message], list[int]]:
    """The messages in the order that the template has, and the numbers of those that are left out.

    Clients send what suits them: the rules of the house in the middle, a
    document and the question about it as two user messages. System messages
    become one at the front, neighbours of one role one message, with a blank
    line between. An empty system message is none: no model was trained with
    one. What the assistant says before anybody asked (a page's greeting) is
    left out, for no model was trained to have spoken first. A system message
    alone is the question. A last assistant message stays: it is continued.
    """
    system = [message.content for message in messages if message.role == "system" and message.content.strip()]
    turns = [(index, message) for index, message in enumerate(messages) if message.role != "system"]
    first = next((place for place, (_, message) in enumerate(turns) if message.role == "user"), len(turns))
    left_out = [index for index, _ in turns[:first]]
    groups = groupby((message for _, message in turns[first:]), key=lambda message: message.role)
    merged = [Message(role, _joined(message.content for message in group)) for role, group in groups]
    if not merged and (left_out or not system):
        raise ValueError("nobody asks anything; send a message of the user")
    if not merged:
        return [Message("user", _joined(system))], left_out
    return [*([Message("system", _joined(system))] if system else []), *merged], left_out


def _joined(texts: Iterable[str]) -> str:
    """One text is left as it is; of several the empty ones are dropped."""
    all_texts = list(texts)
    return all_texts[0] if len(all_texts) == 1 else "\n\n".join(text for text in all_texts if text.strip())

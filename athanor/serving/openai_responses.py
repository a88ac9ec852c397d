"""/v1/responses, OpenAI's newer way to ask: text in, text out, whole or streamed. Nothing is kept on the server."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from athanor.serving.backends.base import Request as AnswerRequest
from athanor.serving.openai_bodies import MAX_MESSAGES, ChatMessage, Options, ResponseFormat, Text, conversation
from athanor.serving.openai_shapes import Count, Event, Part, sse
from athanor.text.conversations import Message


class TextFormat(ResponseFormat):
    form = '{"type": "json_schema", "name": "answer", "schema": {...}}'


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: TextFormat | None = None
    verbosity: Any = None  # of models that think


class Item(ChatMessage):
    @model_validator(mode="before")
    @classmethod
    def check_message(cls, item: Any) -> Any:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind not in (None, "message"):
            raise ValueError(f"'{str(kind)[:50]}' is not supported here; send messages only")
        return item


class ResponseBody(Options):
    question_field: ClassVar = "input"
    format_field: ClassVar = "text.format"

    input: Text | Annotated[list[Item], Field(max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=10_000_000)
    text: TextOptions | None = None

    @model_validator(mode="after")
    def check_input(self) -> ResponseBody:
        if (self.n or 1) > 1:
            raise ValueError("n: /v1/responses makes one answer; ask /v1/chat/completions for more")
        left_out = self._laid_out()[1]
        self._ignored += [f"input.{index}" for index in left_out]
        return self

    def limit(self) -> int | None:
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    def steering(self) -> dict[str, Any]:
        return super().steering() | (self.text.format.steering() if self.text and self.text.format else {})

    def requests(self) -> list[AnswerRequest]:
        return self.asks(self._laid_out()[0])

    def _laid_out(self) -> tuple[list[Message], list[int]]:
        alone = isinstance(self.input, str)
        messages = [Message("user", self.input)] if alone else [item.message() for item in self.input]
        turns, left_out = conversation(messages)
        return conversation([Message("system", self.instructions or ""), *turns])[0], left_out


class Response:
    """How the answer is written down. The events of its stream are numbered and named."""

    def __init__(self, model: str) -> None:
        self.model, self.created = model, int(time.time())
        self.id, self.item_id = f"resp_{secrets.token_hex(16)}", f"msg_{secrets.token_hex(16)}"
        self.number = -1

    def whole(self, parts: Sequence[Part], count: Count) -> dict[str, Any]:
        (part,) = parts
        cut = part.end is not None and part.end["reason"] == "length"
        status = "incomplete" if cut else "completed"
        usage = {
            "input_tokens": count.prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": count.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": count.prompt + count.completion,
        }
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        output = [self._item(part.text, status)]
        return self._head(status) | {"output": output, "usage": usage, "athanor": count.athanor} | details

    def begin(self, index: int) -> str:
        head = self._head("in_progress")
        item = {**self._item("", "in_progress"), "content": []}
        return "".join(
            (
                self._event("response.created", response=head),
                self._event("response.in_progress", response=head),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place(), part=_text_part("")),
            )
        )

    def text(self, index: int, event: Event) -> str:
        return self._event("response.output_text.delta", **self._place(), delta=event["text"], logprobs=[])

    def end(self, index: int, event: Event, count: Count) -> str:
        return ""

    def last(self, parts: Sequence[Part], count: Count) -> str:
        whole, text = self.whole(parts, count), parts[0].text
        return "".join(
            (
                self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
                self._event("response.content_part.done", **self._place(), part=_text_part(text)),
                self._event("response.output_item.done", output_index=0, item=whole["output"][0]),
                self._event(f"response.{whole['status']}", response=whole),
            )
        )

    def error(self, error: dict[str, Any]) -> str:
        failed = {**self._head("failed"), "error": {**error, "code": error["code"] or "server_error"}}
        return self._event("response.failed", response=failed)

    def _head(self, status: str) -> dict[str, Any]:
        facts = {"id": self.id, "object": "response", "created_at": self.created, "model": self.model, "status": status}
        nothing = dict.fromkeys(("error", "incomplete_details", "instructions", "previous_response_id", "usage"))
        return (
            facts
            | nothing
            | {"output": [], "metadata": {}, "parallel_tool_calls": False, "tool_choice": "none", "tools": []}
        )

    def _item(self, text: str, status: str) -> dict[str, Any]:
        part = [_text_part(text)]
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": part}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, **facts: Any) -> str:
        self.number += 1
        return sse({"type": name, "sequence_number": self.number, **facts}, name)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

"""Replies of OpenAI's protocol, whole and as the lines of a stream.

A stream asks a shape for `begin` of each answer, `text` and `end` of them as they come, then `last`; or for `error`,
after which nothing follows.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
Row = dict[str, Any]


@dataclass
class Part:
    """One answer, as far as it has come."""

    text: str = ""
    end: Event | None = None
    logprobs: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Count:
    """Tokens of a request, and what else a reply says about it."""

    prompt: int
    completion: int
    athanor: Row

    def usage(self, prompt: str = "prompt_tokens", completion: str = "completion_tokens") -> Row:
        return {prompt: self.prompt, completion: self.completion, "total_tokens": self.prompt + self.completion}


class Chat:
    """/v1/chat/completions. `usage`: a stream has it, too."""

    prefix, kinds = "chatcmpl", ("chat.completion", "chat.completion.chunk")

    def __init__(self, model: str, usage: bool, logprobs: bool) -> None:
        self.model, self.usage, self.logprobs = model, usage, logprobs
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self.offsets: Counter[int] = Counter()  # characters of each answer that the stream has

    def whole(self, parts: Sequence[Part], count: Count) -> Row:
        choices = [
            {"index": index, **self.content(part), "finish_reason": finish(part.end), "logprobs": likely}
            for index, part in enumerate(parts)
            for likely in [self.likely(part.logprobs) if self.logprobs else None]
        ]
        return {**self._head(0), "choices": choices, "usage": count.usage(), "athanor": count.athanor}

    def begin(self, index: int) -> str:
        return self._line(index, {"delta": {"role": "assistant", "content": ""}})

    def text(self, index: int, event: Event) -> str:
        return self._line(index, self.delta(event["text"]), event)

    def end(self, index: int, event: Event, count: Count) -> str:
        row = {**self.delta(""), "finish_reason": finish(event)}
        return self._line(index, row, event, athanor=count.athanor)

    def last(self, parts: Sequence[Part], count: Count) -> str:
        usage = sse({**self._head(1), "choices": [], "usage": count.usage()}) if self.usage else ""
        return usage + "data: [DONE]\n\n"

    def error(self, error: Row) -> str:
        return sse({"error": error})

    def content(self, part: Part) -> Row:
        return {"message": {"role": "assistant", "content": part.text, "refusal": None}}

    def delta(self, text: str) -> Row:
        return {"delta": {"content": text} if text else {}}

    def likely(self, rows: Sequence[Row], offset: int = 0) -> Row | None:
        return {"content": rows, "refusal": None}

    def _head(self, kind: int) -> Row:
        return {"id": self.id, "object": self.kinds[kind], "created": self.created, "model": self.model}

    def _line(self, index: int, row: Row, event: Event | None = None, **more: Any) -> str:
        rows = (event or {}).get("logprobs", [])
        likely = self.likely(rows, self.offsets[index]) if rows else None
        self.offsets[index] += sum(len(each["token"]) for each in rows)
        choice = {"index": index, "finish_reason": None, "logprobs": likely, **row}
        return sse({**self._head(1), "choices": [choice], **more})


class Completion(Chat):
    """/v1/completions: the same, with plain text and the older form of log-probabilities."""

    prefix, kinds = "cmpl", ("text_completion", "text_completion")

    def begin(self, index: int) -> str:
        return ""

    def content(self, part: Part) -> Row:
        return {"text": part.text}

    def delta(self, text: str) -> Row:
        return {"text": text}

    def likely(self, rows: Sequence[Row], offset: int = 0) -> Row | None:
        tops = [{top["token"]: top["logprob"] for top in row["top_logprobs"]} for row in rows]
        lengths = [len(row["token"]) for row in rows]
        return {
            "tokens": [row["token"] for row in rows],
            "token_logprobs": [row["logprob"] for row in rows],
            "top_logprobs": [top or None for top in tops],
            "text_offset": [offset + sum(lengths[:index]) for index in range(len(rows))],
        }


class Response(Chat):
    """/v1/responses: text in, text out; nothing is kept. The events of its stream are numbered and named."""

    prefix = "resp"

    def __init__(self, model: str, usage: bool, logprobs: bool) -> None:
        super().__init__(model, usage, logprobs)
        self.item_id, self.number = f"msg_{secrets.token_hex(16)}", -1

    def whole(self, parts: Sequence[Part], count: Count) -> Row:
        cut = finish(parts[0].end) == "length"
        status = "incomplete" if cut else "completed"
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        usage = count.usage("input_tokens", "output_tokens") | details
        found = {
            "output": [self._item(parts[0].text, status, parts[0].logprobs)],
            "usage": usage,
            "athanor": count.athanor,
        }
        return self._response(
            status, **found, **({"incomplete_details": {"reason": "max_output_tokens"}} if cut else {})
        )

    def begin(self, index: int) -> str:
        response, item = self._response("in_progress"), {**self._item("", "in_progress"), "content": []}
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place(), part=_part(""))
        )

    def text(self, index: int, event: Event) -> str:
        return self._event(
            "response.output_text.delta", **self._place(), delta=event["text"], logprobs=event.get("logprobs", [])
        )

    def end(self, index: int, event: Event, count: Count) -> str:
        return ""

    def last(self, parts: Sequence[Part], count: Count) -> str:
        whole = self.whole(parts, count)
        (item,) = whole["output"]
        (part,) = item["content"]
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        return (
            self._event("response.output_text.done", **self._place(), **done)
            + self._event("response.content_part.done", **self._place(), part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{whole['status']}", response=whole)
        )

    def error(self, error: Row) -> str:
        error = {**error, "code": error["code"] or "server_error"}
        return self._event("response.failed", response=self._response("failed", error=error))

    def _response(self, status: str, **more: Any) -> Row:
        nothing = dict.fromkeys(("error", "incomplete_details", "instructions", "previous_response_id", "usage"))
        head = {"id": self.id, "object": "response", "created_at": self.created, "model": self.model, "status": status}
        tools = {"parallel_tool_calls": False, "tool_choice": "none", "tools": []}
        return {**head, **nothing, "output": [], "metadata": {}, **tools, **more}

    def _item(self, text: str, status: str, logprobs: Sequence[Row] = ()) -> Row:
        part = _part(text, logprobs)
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _place(self) -> Row:
        return {"item_id": self.item_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, **facts: Any) -> str:
        self.number += 1
        return sse({"type": name, "sequence_number": self.number, **facts}, name)


def _part(text: str, logprobs: Sequence[Row] = ()) -> Row:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def finish(event: Event | None) -> str:
    return "length" if event and event["reason"] == "length" else "stop"


def sse(value: Row, name: str = "") -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(value)}\n\n"

"""How answers are written down in OpenAI's protocol: whole, and as the lines of a stream.

A shape is asked for lines in this order: `begin` of each answer, `text` and
`end` of them as they come, `last`; or `error`, after which nothing follows.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Event = dict[str, Any]
DONE = "data: [DONE]\n\n"


@dataclass
class Part:
    """One answer, as far as it has come."""

    text: str = ""
    end: Event | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Count:
    """Tokens of a request, and what else the reply tells of it."""

    prompt: int
    completion: int
    athanor: dict[str, Any]

    def usage(self) -> dict[str, int]:
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        return dict(zip(names, (self.prompt, self.completion, self.prompt + self.completion), strict=True))


class Shape(Protocol):
    def whole(self, parts: Sequence[Part], count: Count) -> dict[str, Any]: ...
    def begin(self, index: int) -> str: ...
    def text(self, index: int, event: Event) -> str: ...
    def end(self, index: int, event: Event, count: Count) -> str: ...
    def last(self, parts: Sequence[Part], count: Count) -> str: ...
    def error(self, error: dict[str, Any]) -> str: ...


class Chat:
    """/v1/chat/completions. `usage`: told at the end of a stream, too."""

    prefix, kinds = "chatcmpl", ("chat.completion", "chat.completion.chunk")

    def __init__(self, model: str, *, usage: bool = False, logprobs: bool = False) -> None:
        self.model, self.usage, self.logprobs = model, usage, logprobs
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())

    def whole(self, parts: Sequence[Part], count: Count) -> dict[str, Any]:
        choices = [
            {"index": index, **self.content(part), "finish_reason": finish(part.end), "logprobs": self.likely(part)}
            for index, part in enumerate(parts)
        ]
        return {**self._head(0), "choices": choices, "usage": count.usage(), "athanor": count.athanor}

    def begin(self, index: int) -> str:
        return self._line(index, {"delta": {"role": "assistant", "content": ""}})

    def text(self, index: int, event: Event) -> str:
        made = Part(event["text"], logprobs=event.get("logprobs", []))
        return self._line(index, self.delta(made.text), self.likely(made))

    def end(self, index: int, event: Event, count: Count) -> str:
        likely = self.likely(Part(logprobs=event["logprobs"])) if event.get("logprobs") else None
        return self._line(index, {**self.delta(""), "finish_reason": finish(event)}, likely, athanor=count.athanor)

    def last(self, parts: Sequence[Part], count: Count) -> str:
        usage = sse({**self._head(1), "choices": [], "usage": count.usage()}) if self.usage else ""
        return usage + DONE

    def error(self, error: dict[str, Any]) -> str:
        return sse({"error": error})

    def content(self, part: Part) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": part.text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def likely(self, part: Part) -> dict[str, Any] | None:
        return {"content": part.logprobs, "refusal": None} if self.logprobs else None

    def _head(self, kind: int) -> dict[str, Any]:
        return {"id": self.id, "object": self.kinds[kind], "created": self.created, "model": self.model}

    def _line(self, index: int, row: dict[str, Any], likely: Any = None, **more: Any) -> str:
        choice = {"index": index, "finish_reason": None, "logprobs": likely, **row}
        return sse({**self._head(1), "choices": [choice], **more})


class Completion(Chat):
    """/v1/completions: the same, with plain text and the older form of log-probabilities."""

    prefix, kinds = "cmpl", ("text_completion", "text_completion")

    def begin(self, index: int) -> str:
        return ""

    def content(self, part: Part) -> dict[str, Any]:
        return {"text": part.text}

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def likely(self, part: Part) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        tokens, offsets, offset = [row["token"] for row in part.logprobs], [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [row["logprob"] for row in part.logprobs],
            "top_logprobs": [{top["token"]: top["logprob"] for top in row["top_logprobs"]} for row in part.logprobs],
            "text_offset": offsets,
        }


def finish(event: Event) -> str:
    return "length" if event["reason"] == "length" else "stop"


def sse(value: dict[str, Any], name: str = "") -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(value)}\n\n"

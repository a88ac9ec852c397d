"""The ways to ask by OpenAI's protocol: what each reads, and its replies, whole and as the lines of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from athanor.decoding.prompting import TOO_LONG
from athanor.serving.fields import CHAT, COMPLETION, RESPONSE
from athanor.serving.prompting import MAX_CHARS, Asked, conversation, messages_of
from athanor.serving.requests import Refused, fault, text, wrong

MAX_TEXTS = 128  # answers of one request to /v1/completions
Row = dict[str, Any]
Events = AsyncGenerator[tuple[int, Row]]


class Chat:
    """/v1/chat/completions. `each`: answers to a prompt; `usage`: a stream has it, too.

    A part is one answer as far as it has come: its events "start" and "end", and the text between them.
    """

    path, route, prefix, kinds = "chat/completions", CHAT, "chatcmpl", ("chat.completion", "chat.completion.chunk")

    @staticmethod
    def questions(body: Mapping[str, Any]) -> tuple[list[Asked], list[str]]:
        """The prompts of a body, and the fields that are left out of them."""
        messages, left_out = conversation("messages", messages_of("messages", body["messages"]))
        return [messages], left_out

    def __init__(self, model: str, answers: int, each: int, usage: bool) -> None:
        self.model, self.each, self.usage = model, each, usage
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self.parts: list[Row] = [{"text": "", "logprobs": []} for _ in range(answers)]

    async def read(self, events: Events, until: str = "") -> None:
        """Take events, all of them or until one of that type. Refused where an answer fails."""
        async for index, event in events:
            self.take(index, event)
            if event["type"] == until:
                return

    async def lines(self, events: Events) -> AsyncIterator[str]:
        """The server-sent events of a stream; after an error nothing follows. Those without text go with the next."""
        held = "".join(self.line(index, {"type": "start"}) for index in range(len(self.parts)))
        try:
            async for index, event in events:
                self.take(index, event)
                if event["type"] in ("text", "end"):
                    held += self.line(index, event)
                if event["type"] == "text":
                    yield held
                    held = ""
        except Refused as error:  # too late for a status
            yield held + self.failed(fault(error.status, str(error), error.code))
        else:
            yield held + self.last()

    def take(self, index: int, event: Row) -> None:
        part = self.parts[index]
        part["text"] += event.get("text", "")
        part["logprobs"] += event.get("logprobs", ())
        if event["type"] in ("start", "end"):
            part |= event
        elif event["type"] == "error":
            message, code = event["message"].replace("response_format", self.route.json), None
            if TOO_LONG in message:
                message, code = f"{self.route.question}: {message}", "context_length_exceeded"
            raise Refused(400 if event["kind"] == "request" else 503, message, code=code)

    def whole(self) -> Row:
        choices = [self._choice(index, {**part, "type": "whole"}) for index, part in enumerate(self.parts)]
        return {**self._head(0), "choices": choices, "usage": self._count(), "athanor": facts(self.parts)}

    def line(self, index: int, event: Row) -> str:
        part = self.parts[index]
        choice = self._choice(index, event, len(part["text"]) - len(event.get("text", "")))
        more = {"athanor": facts([part])} if event["type"] == "end" else {}
        return sse({**self._head(1), "choices": [choice], **more})

    def last(self) -> str:
        usage = sse({**self._head(1), "choices": [], "usage": self._count()}) if self.usage else ""
        return usage + "data: [DONE]\n\n"

    def failed(self, error: Row) -> str:
        return sse({"error": error})

    def said(self, event: Row) -> Row:
        text = event.get("text", "")
        if event["type"] == "whole":
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        role = {"role": "assistant"} if event["type"] == "start" else {}
        return {"delta": {**role, "content": text} if role or text else {}}

    def likely(self, rows: Sequence[Row], offset: int) -> Row:
        return {"content": rows, "refusal": None}

    def _head(self, kind: int) -> Row:
        return {"id": self.id, "object": self.kinds[kind], "created": self.created, "model": self.model}

    def _choice(self, index: int, event: Row, offset: int = 0) -> Row:
        rows = event.get("logprobs")
        likely = self.likely(rows, offset) if rows else None
        return {"index": index, **self.said(event), "logprobs": likely, "finish_reason": event.get("reason")}

    def _count(self, prompt: str = "prompt_tokens", completion: str = "completion_tokens") -> Row:
        """Tokens; those of a question count once, however many answers it has."""
        read = sum(part["prompt_tokens"] for part in self.parts[:: self.each])
        made = sum(part["tokens"] for part in self.parts)
        return {prompt: read, completion: made, "total_tokens": read + made}


class Completion(Chat):
    """/v1/completions: the same, with plain text and the older form of log-probabilities."""

    path, route, prefix, kinds = "completions", COMPLETION, "cmpl", ("text_completion", "text_completion")

    @staticmethod
    def questions(body: Mapping[str, Any]) -> tuple[list[Asked], list[str]]:
        """A text or several, to continue as they are, without the chat's template. Ids of tokens will do as well."""
        given = body["prompt"]
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts = given if several else [given]
        for prompt in prompts[: MAX_TEXTS + 1]:
            if not isinstance(prompt, list):
                text("prompt", prompt, MAX_CHARS)
            elif not all(type(each) is int and 0 <= each < 1 << 31 for each in prompt):
                raise wrong("prompt", "a text, a list of texts, ids of tokens, or a list of lists of ids")
        return prompts, []

    def said(self, event: Row) -> Row:
        return {"text": event.get("text", "")}

    def likely(self, rows: Sequence[Row], offset: int) -> Row:
        tokens = [row["token"] for row in rows]
        return {
            "tokens": tokens,
            "token_logprobs": [row["logprob"] for row in rows],
            "top_logprobs": [{top["token"]: top["logprob"] for top in row["top_logprobs"]} or None for row in rows],
            "text_offset": [*accumulate(map(len, tokens), initial=offset)][:-1],
        }


class Response(Chat):
    """/v1/responses: text in, text out; nothing is kept. The events of its stream are numbered and named."""

    path, route, prefix, number = "responses", RESPONSE, "resp", -1

    @staticmethod
    def questions(body: Mapping[str, Any]) -> tuple[list[Asked], list[str]]:
        given, rules = body["input"], body.get("instructions")
        rows = [{"role": "user", "content": given}] if isinstance(given, str) else given
        rules = "" if rules is None else text("instructions", rules, MAX_CHARS)
        messages, left_out = conversation("input", messages_of("input", rows), rules)
        if body.get("n") not in (None, 1):
            raise Refused(400, "n: /v1/responses makes one answer; ask /v1/chat/completions for more")
        return [messages], left_out

    def whole(self) -> Row:
        (part,) = self.parts
        status, details = "completed", None
        if part["reason"] == "length":
            status, details = "incomplete", {"reason": "max_output_tokens"}
        usage = self._count("input_tokens", "output_tokens")
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        output = [self._item(status, [_said(part["text"], part["logprobs"])])]
        more = {"incomplete_details": details, "usage": usage, "athanor": facts(self.parts)}
        return self._response(status, output=output, **more)

    def line(self, index: int, event: Row) -> str:
        if event["type"] == "start":
            response = self._response("in_progress")
            return (
                self._event("created", response=response)
                + self._event("in_progress", response=response)
                + self._event("output_item.added", output_index=0, item=self._item("in_progress", []))
                + self._part("content_part.added", part=_said("", []))
            )
        if event["type"] == "end":
            return ""
        return self._part("output_text.delta", delta=event["text"], logprobs=event.get("logprobs", []))

    def last(self) -> str:
        whole = self.whole()
        (item,) = whole["output"]
        (part,) = item["content"]
        return (
            self._part("output_text.done", text=part["text"], logprobs=part["logprobs"])
            + self._part("content_part.done", part=part)
            + self._event("output_item.done", output_index=0, item=item)
            + self._event(whole["status"], response=whole)
        )

    def failed(self, error: Row) -> str:
        """`error` has a code: clients read it."""
        response = self._response("failed", error={**error, "code": error["code"] or "server_error"})
        return self._event("failed", response=response)

    def _response(self, status: str, output: Sequence[Row] = (), **more: Any) -> Row:
        head = {"id": self.id, "object": "response", "created_at": self.created, "model": self.model, "status": status}
        tools = {"parallel_tool_calls": False, "tool_choice": "none", "tools": []}
        return {**head, **tools, "output": output, **more}

    def _item(self, status: str, content: Sequence[Row]) -> Row:
        return {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, name: str, **facts: Any) -> str:
        """An event of the one part of the one item."""
        return self._event(name, item_id=f"msg_{self.id}", output_index=0, content_index=0, **facts)

    def _event(self, name: str, **facts: Any) -> str:
        self.number += 1
        kind = f"response.{name}"
        return f"event: {kind}\n" + sse({"type": kind, "sequence_number": self.number, **facts})


def _said(text: str, logprobs: Sequence[Row]) -> Row:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def facts(parts: Sequence[Row]) -> Row:
    """What our replies say beyond OpenAI's."""
    return {"forgotten_exchanges": max(part["forgotten"] for part in parts)}


def sse(value: Row) -> str:
    return f"data: {json.dumps(value)}\n\n"

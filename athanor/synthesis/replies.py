"""An answer as conversations (the JSON that was asked for, or a reason why it is not), and how they are written down."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from athanor.base.errors import GateError, InputError
from athanor.base.work import Facts
from athanor.synthesis.endpoint import Answer
from athanor.synthesis.params import SyntheticParams
from athanor.synthesis.requests import Request
from athanor.synthesis.sift import Row
from athanor.text.conversations import Message, Messages, check_messages

# Some models put every JSON into a code fence, against the instructions; around the whole answer it changes nothing.
FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(?P<inside>.*)\n```\s*", re.S)


class Malformed(Exception):
    """The answer cannot be used. The text is one of a few reasons, so that they can be counted."""


def parse(answer: Answer, conversations: int, pairs: int) -> list[Messages]:
    """One to `conversations` conversations of one to `pairs` questions and answers each."""
    if answer.text is None:
        raise Malformed(answer.why)
    if answer.cut:
        raise Malformed("cut off at max_output_tokens")
    try:
        fenced = FENCE.fullmatch(answer.text)
        text = fenced["inside"] if fenced else answer.text
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError):
        raise Malformed("not JSON") from None
    valid = isinstance(value, dict) and set(value) == {"conversations"} and isinstance(value["conversations"], list)
    if not valid:
        raise Malformed("not an object with 'conversations'")
    parsed = [_conversation(row) for row in value["conversations"]]
    if not 1 <= len(parsed) <= conversations:
        raise Malformed("more conversations than asked for" if parsed else "no conversation")
    if any(len(messages) > 2 * pairs for messages in parsed):
        raise Malformed("more turns than asked for")
    return parsed


def _object(pairs: list[tuple[str, Any]]) -> Facts:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice")
    return value


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _conversation(row: Any) -> Messages:
    if not isinstance(row, dict) or set(row) != {"messages"} or not isinstance(row["messages"], list):
        raise Malformed("not an object with 'messages'")
    messages = tuple(_message(item) for item in row["messages"])
    try:
        check_messages(messages, "")
    except InputError:
        raise Malformed("roles out of turn, or an empty message") from None
    return messages


def _message(item: Any) -> Message:
    if not isinstance(item, dict) or set(item) != {"role", "content"}:
        raise Malformed("not a message of role and content")
    role, content = item["role"], item["content"]
    if role not in ("user", "assistant") or not isinstance(content, str):
        raise Malformed("another role than user and assistant, or content that is no text")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise Malformed("a lone surrogate") from None
    return Message(role, content)


EARLY = 10  # answers without one good among them are enough to stop paying


def parse_answers(
    params: SyntheticParams, answered: Sequence[tuple[Request, Answer]], failed: Mapping[str, str]
) -> tuple[list[Row], Counter[str]]:
    """The conversations of all answers, in the order of the requests, and the reasons for answers that hold none."""
    rows: list[Row] = []
    malformed = Counter({"no answer": len(failed)} if failed else {})
    for request, answer in answered:
        try:
            parsed = parse(answer, params.conversations_per_request, request.pairs)
        except Malformed as error:
            malformed[str(error)] += 1
        else:
            rows += [Row(messages, request) for messages in parsed]
    return rows, malformed


@dataclass
class MalformedGate:
    """Counts malformed answers as they come; GateError as soon as they are too many to pay for more."""

    params: SyntheticParams
    requests: int
    good: int = 0
    bad: int = 0

    def add(self, request: Request, answer: Answer) -> None:
        try:
            parse(answer, self.params.conversations_per_request, request.pairs)
        except Malformed as error:
            self.bad += 1
            allowed = self.params.gates.max_malformed_share * self.requests
            if self.bad > allowed or (self.bad >= EARLY and not self.good):
                what = f"{self.bad} of {self.bad + self.good} answers are malformed, the last: {error}"
                fix = "look at the answers, which are kept, before paying for more; then change the task or the model"
                raise GateError("malformed answers", what, where="synthetic", fix=fix) from None
        else:
            self.good += 1


def row_facts(row: Row) -> Facts:
    """A line of the result: `messages` for training, and where they come from."""
    passage = row.request.passage
    return {
        "messages": [{"role": message.role, "content": message.content} for message in row.messages],
        "category": row.request.category,
        "request": row.request.identity,
        "document": passage and passage.document,
        "document_license": passage and passage.license,
    }


def lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)

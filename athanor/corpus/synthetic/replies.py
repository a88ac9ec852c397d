"""An answer as conversations: the JSON that was asked for, or a reason why it is not."""

from __future__ import annotations

import json
import re
from typing import Any

from athanor.corpus.conversations import Message, check_messages
from athanor.corpus.synthetic.endpoint import Answer
from athanor.errors import InputError

Conversation = tuple[Message, ...]
# Some models put every JSON into a code fence, whatever they are told; around the whole answer it changes nothing.
FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(?P<inside>.*)\n```\s*", re.S)


class Malformed(Exception):
    """Nothing of an answer is taken; the text is the reason, one of few, for counting."""


def parse(answer: Answer, conversations: int, pairs: int) -> list[Conversation]:
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
    good = isinstance(value, dict) and set(value) == {"conversations"} and isinstance(value["conversations"], list)
    if not good:
        raise Malformed("not an object with 'conversations'")
    found = [_conversation(row) for row in value["conversations"]]
    if not 1 <= len(found) <= conversations:
        raise Malformed("more conversations than asked for" if found else "no conversation")
    if any(len(messages) > 2 * pairs for messages in found):
        raise Malformed("more turns than asked for")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice")
    return value


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _conversation(row: Any) -> Conversation:
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

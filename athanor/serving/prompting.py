"""The prompt of an answer: messages as clients keep them, laid out as in training, to ids that fit the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby, takewhile
from typing import Any

from athanor.base.errors import InputError
from athanor.decoding.prompting import TOO_LONG, fit
from athanor.serving.models import Served
from athanor.serving.requests import Refused, text, wrong
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids

RESERVE_SHARE = 0.25  # of the context, kept free for an answer at the cost of the oldest exchanges
MAX_MESSAGES, MAX_CHARS = 1000, 1 << 18  # of one request
HERE_CHARS = 4000  # laid out in a millisecond, which a thread takes, too
FOREIGN_TOKEN_BYTES = 256  # no token of a foreign file is taken to be longer
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
Asked = str | Sequence[int] | Sequence[Message]


async def laid_out(served: Served, asked: Asked, limit: int | None) -> tuple[list[int], int, int]:
    """The prompt for messages, a text or ids: ids to continue, how many may follow, and how many of the oldest exchanges
    were left out to fit. InputError for one that does not fit, or roles the template has not.

    A last assistant message is the beginning of the answer: its ids follow the opening, as they did in training. A
    text begins as a document of the pretraining did.
    """
    loop = asyncio.get_running_loop()

    def ask(path: str, **body: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(served.engine.ask(path, body), loop).result()

    limit = int(served.defaults["max_new_tokens"]) if limit is None else limit
    chars = sum(len(one.content) if isinstance(one, Message) else 1 for one in asked)
    if served.tokenizer is not None and chars < HERE_CHARS:
        ids, forgotten = _lay_out(served, asked, limit, ask)
    else:
        ids, forgotten = await asyncio.to_thread(_lay_out, served, asked, limit, ask)
    if not ids:
        raise InputError("it is empty", where="prompt", fix="send a text, or ids")
    if len(ids) >= (context := served.context_tokens):
        raise InputError(f"{TOO_LONG} {context} tokens, and the prompt has {len(ids)}", fix="shorten the prompt")
    return ids, min(limit, context - len(ids)), forgotten


def _lay_out(served: Served, asked: Asked, limit: int, ask: Callable[..., Any]) -> tuple[list[int], int]:
    """The ids, and how many exchanges were left out."""
    tokenizer, context = served.tokenizer, served.context_tokens
    longest = FOREIGN_TOKEN_BYTES if tokenizer is None else int(tokenizer.token_bytes.max())

    def encode(text: str, begin: bool = False, symbols: bool = False) -> list[int]:
        text = text[: context * longest]  # too many tokens already, and a longer one takes seconds
        if tokenizer is not None:
            return [*[tokenizer.bos] * begin, *tokenizer.encode(text)]
        return list(ask("/tokenize", content=text, add_special=begin, parse_special=symbols)["tokens"])

    def ids_of(messages: Sequence[Message]) -> list[int]:
        if tokenizer is not None:
            return prompt_ids(tokenizer, messages)
        return encode(ask("/apply-template", messages=[asdict(one) for one in messages])["prompt"], True, True)

    def size(candidate: list[Message]) -> int:
        least = sum(len(message.content) for message in candidate) // longest
        return least if least >= context else len(ids_of(candidate)) + len(begun_ids)

    if isinstance(asked, str):
        return encode(asked, True), 0
    messages = [one for one in asked if isinstance(one, Message)]
    if not messages:
        return list(asked), 0
    begun = messages.pop().content if messages[-1].role == "assistant" else ""
    reserved = max(1, min(limit, int(context * RESERVE_SHARE)))
    if served.continues:
        ids = encode((messages[-1].content + begun)[-context * longest :], True)
        return [*ids[:1], *ids[1:][1 - context + reserved :]], 0  # the end of a long text
    begun_ids = encode(begun)
    fitting, forgotten = fit(messages, size, context_tokens=context, reserve_tokens=reserved)
    return ids_of(fitting) + begun_ids, forgotten


def messages_of(name: str, rows: Any) -> list[Message]:
    """Messages as clients send them: text, or a list of parts that are text."""
    if not isinstance(rows, list) or len(rows) > MAX_MESSAGES:
        raise wrong(name, f"a list of at most {MAX_MESSAGES:,} messages")
    messages = [_message(f"{name}.{index}", row) for index, row in enumerate(rows)]
    if sum(len(message.content) for message in messages) > MAX_CHARS:
        raise wrong(name, f"at most {MAX_CHARS:,} characters in all")
    return messages


def _message(where: str, row: Any) -> Message:
    if not isinstance(row, dict):
        raise wrong(where, "an object with role and content")
    if (kind := row.get("type")) not in (None, "message"):
        raise Refused(400, f"{where}: '{str(kind)[:50]}' is not supported here; send messages only")
    if "role" not in row:
        raise Refused(400, f"{where}.role: Field required", code="missing_required_parameter")
    if (role := str(row["role"])) not in ROLES:
        raise Refused(400, f"{where}: role '{role[:50]}' is not known here; use {', '.join(ROLES)}")
    content = row.get("content") or ""
    if isinstance(content, list):
        content = "".join(_part(f"{where}.content", part) for part in content)
    elif not isinstance(content, str):
        raise wrong(f"{where}.content", "a valid string or a valid array")
    return Message(ROLES[role], text(f"{where}.content", content, MAX_CHARS))


def _part(where: str, part: Any) -> str:
    part = part if isinstance(part, dict) else {"text": part}
    kind, said = part.get("type", "text"), part.get("text", part.get("refusal"))
    if kind in ("text", "input_text", "output_text", "refusal") and isinstance(said, str):
        return said
    raise Refused(400, f"{where}: '{str(kind)[:50]}' cannot be read here; send text only")


def conversation(name: str, messages: Sequence[Message], rules: str = "") -> tuple[list[Message], list[str]]:
    """The messages in the template's order, after `rules`, and the fields of those left out.

    Clients put rules in the middle, or a document and the question about it in two messages. System messages become
    one at the front, neighbours of one role one message with a blank line between. An empty system message is dropped:
    no model was trained with one. So is what the assistant says before the first question (a page's greeting). A
    system message alone is the question.
    """
    system = [rules, *(message.content for message in messages if message.role == "system")]
    front = [Message("system", _joined(system))] if any(map(str.strip, system)) else []
    turns = [(f"{name}.{index}", message) for index, message in enumerate(messages) if message.role != "system"]
    left_out = [where for where, _ in takewhile(lambda turn: turn[1].role == "assistant", turns)]
    groups = groupby((message for _, message in turns[len(left_out) :]), key=lambda message: message.role)
    merged = [Message(role, _joined([message.content for message in group])) for role, group in groups]
    if merged:
        return [*front, *merged], left_out
    if left_out or not front:
        raise Refused(400, f"{name}: nobody asks anything; send a message of the user")
    return [Message("user", front[0].content)], left_out


def _joined(texts: Sequence[str]) -> str:
    """Those that are not empty, as one; a single one as it is."""
    return texts[0] if len(texts) == 1 else "\n\n".join(text for text in texts if text.strip())

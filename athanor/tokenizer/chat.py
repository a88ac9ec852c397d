"""The one chat template: a conversation as token ids, and its equal for other runtimes.

Layout, with nothing between the parts:

    <|bos|> ( <|system|> | <|user|> | <|assistant|> ) content <|stop|> ...

Control ids delimit the messages, so content needs no newline or escape around
it, and each content is encoded on its own: what the server sends for a
history is id for id what training saw. Supervised are the assistant's content
and the stop that ends it, in every assistant turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from athanor.base.artifacts import digest
from athanor.base.errors import InputError
from athanor.text.conversations import Message, check_messages
from athanor.tokenizer.tokenizer import BOS, CONTROL_PIECES, ROLE_PIECES, STOP, Tokenizer

TEMPLATE_VERSION = 1


@dataclass(frozen=True)
class Layout:
    """Ids around the contents of a conversation: `start` once, `opening[role]` before and `closing` after each content.

    `stop`, the first of `closing`, ends a turn: it occurs nowhere else, and after an answer it is supervised.
    """

    start: tuple[int, ...]
    opening: Mapping[str, tuple[int, ...]]
    closing: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.closing[0]


class Encoder(Protocol):
    """A tokenizer with a layout: our own, or that of a foreign model (foreign.py)."""

    @property
    def layout(self) -> Layout: ...

    @property
    def template_hash(self) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


def layout_of(tokenizer: Tokenizer | Encoder) -> Layout:
    if not isinstance(tokenizer, Tokenizer):
        return tokenizer.layout
    opening = {role: (tokenizer.control_ids[piece],) for role, piece in ROLE_PIECES.items()}
    return Layout((tokenizer.bos,), opening, (tokenizer.stop,))


# The same layout for runtimes that render text and parse control symbols out of it.
CHAT_TEMPLATE_JINJA = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '" + STOP + "' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ROLE_PIECES["assistant"] + "' }}{% endif %}"
)


def template_hash(tokenizer: Tokenizer | Encoder) -> str:
    """Hash of the layout, the control ids and the Jinja text; stored by every artifact that depends on them."""
    if not isinstance(tokenizer, Tokenizer):
        return tokenizer.template_hash
    ids = {piece: tokenizer.control_ids[piece] for piece in CONTROL_PIECES}
    return digest({"version": TEMPLATE_VERSION, "ids": ids, "jinja": CHAT_TEMPLATE_JINJA})


def render(tokenizer: Tokenizer | Encoder, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Ids of a whole conversation and its loss mask (1 = supervised target).

    InputError unless the roles are `[system] (user assistant)+` with no empty content.
    """
    check_messages(messages, "conversation")
    return _lay_out(tokenizer, messages)


def check_made_with(facts: Mapping[str, Any], tokenizer: Tokenizer, *, where: str, fix: str) -> None:
    """InputError for a model made with another tokenizer or chat template: it would answer, and worse."""
    pairs = {
        "tokenizer": ("tokenizer_digest", tokenizer.digest),
        "chat template": ("template_hash", template_hash(tokenizer)),
    }
    for what, (key, here) in pairs.items():
        if facts.get(key) != here:
            text = f"the model was trained with another {what} ({facts.get(key)}) than the one here ({here})"
            raise InputError(text, where=where, fix=fix)


def prompt_ids(tokenizer: Tokenizer | Encoder, messages: Sequence[Message]) -> list[int]:
    """Ids to send for a history that ends with a user message, up to and with the opening of the answer.

    A prefix of `render` of the same history with the answer appended. Earlier
    turns may be empty here: a model may have answered with nothing.
    """
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if len(turns) % 2 == 0 or turns != (["user", "assistant"] * len(turns))[: len(turns)]:
        raise InputError(
            f"roles are {roles}", where="prompt", fix="use an optional system message, then turns that end with user"
        )
    return [*_lay_out(tokenizer, messages)[0], *layout_of(tokenizer).opening["assistant"]]


def render_text(messages: Sequence[Message], *, prompt: bool = False) -> str:
    """The layout as one string with visible control symbols, as other runtimes write it."""
    text = BOS + "".join(f"{ROLE_PIECES[message.role]}{message.content}{STOP}" for message in messages)
    return text + ROLE_PIECES["assistant"] if prompt else text


def _lay_out(tokenizer: Tokenizer | Encoder, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    layout = layout_of(tokenizer)
    ids, mask = list(layout.start), [0] * len(layout.start)
    for message, content in zip(messages, tokenizer.encode_batch([m.content for m in messages]), strict=True):
        opening, supervised = layout.opening[message.role], int(message.role == "assistant")
        ids += [*opening, *content, *layout.closing]
        mask += [*[0] * len(opening), *[supervised] * (len(content) + 1), *[0] * (len(layout.closing) - 1)]
    return ids, mask

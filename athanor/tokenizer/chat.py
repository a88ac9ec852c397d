"""The one chat template: a conversation as token ids, and its equal for other runtimes.

Layout, with nothing between the parts:

    <|bos|> ( <|system|> | <|user|> | <|assistant|> ) content <|stop|> ...

Control ids delimit the messages, so content needs no newline or escape around
it, and each content is encoded on its own: what the server sends for a
history is id for id what training saw. Supervised are the assistant's content
and the stop that ends it, in every assistant turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from athanor.artifacts import digest
from athanor.corpus.conversations import Message, check_messages
from athanor.errors import InputError
from athanor.tokenizer.tokenizer import BOS, CONTROL_PIECES, ROLE_PIECES, STOP, Tokenizer

TEMPLATE_VERSION = 1

# The same layout for runtimes that render text and parse control symbols out of it.
CHAT_TEMPLATE_JINJA = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '" + STOP + "' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ROLE_PIECES["assistant"] + "' }}{% endif %}"
)


def template_hash(tokenizer: Tokenizer) -> str:
    """Hash of the layout, the control ids and the Jinja text; stored by every artifact that depends on them."""
    ids = {piece: tokenizer.control_ids[piece] for piece in CONTROL_PIECES}
    return digest({"version": TEMPLATE_VERSION, "ids": ids, "jinja": CHAT_TEMPLATE_JINJA})


def render(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Ids of a whole conversation and its loss mask (1 = supervised target).

    InputError unless the roles are `[system] (user assistant)+` with no empty content.
    """
    check_messages(messages, "conversation")
    return _layout(tokenizer, messages)


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Ids to send for a history that ends with a user message, up to and with `<|assistant|>`.

    A prefix of `render` of the same history with the answer appended. Earlier
    turns may be empty here: a model may have answered with nothing.
    """
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if len(turns) % 2 == 0 or turns != (["user", "assistant"] * len(turns))[: len(turns)]:
        raise InputError(
            f"roles are {roles}", where="prompt", fix="use an optional system message, then turns that end with user"
        )
    return [*_layout(tokenizer, messages)[0], tokenizer.assistant]


def render_text(messages: Sequence[Message], *, prompt: bool = False) -> str:
    """The layout as one string with visible control symbols, as other runtimes write it."""
    text = BOS + "".join(f"{ROLE_PIECES[message.role]}{message.content}{STOP}" for message in messages)
    return text + ROLE_PIECES["assistant"] if prompt else text


def _layout(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    ids, mask = [tokenizer.bos], [0]
    for message, content in zip(messages, tokenizer.encode_batch([m.content for m in messages]), strict=True):
        ids += [tokenizer.control_ids[ROLE_PIECES[message.role]], *content, tokenizer.stop]
        supervised = int(message.role == "assistant")
        mask += [0, *[supervised] * (len(content) + 1)]
    return ids, mask

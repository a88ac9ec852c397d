"""Conversations as ids: by our own chat template, or by that of another model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from athanor.text.conversations import Messages
from athanor.tokenizer import chat
from athanor.tokenizer.tokenizer import Tokenizer


class Renderer(Protocol):
    """A chat template that is not our own: of another model."""

    def render(self, messages: Messages) -> tuple[list[int], list[int]]: ...


def render(tokenizer: Tokenizer | Renderer, messages: Messages) -> tuple[list[int], list[int]]:
    """Ids of a conversation and its loss mask, by our own template or another one."""
    return chat.render(tokenizer, messages) if isinstance(tokenizer, Tokenizer) else tokenizer.render(messages)


def supervised_turns(messages: Messages, mask: Sequence[int]) -> Messages:
    """The messages of a row that was cut: up to as many answers as it supervises."""
    answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
    supervised = sum(one and not before for before, one in zip([0, *mask], mask, strict=False))
    return messages[: answers[supervised - 1] + 1]

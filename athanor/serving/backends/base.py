"""What a worker asks of the runtime that makes its answers; the same for torch, llama.cpp and transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from athanor.corpus.conversations import Message

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Request:
    """One answer to make. Settings that are not in `sampling`, and a limit of None, are the model's own defaults.

    `stop` are texts that end the answer where they first appear; they are not part of it.
    """

    id: int
    messages: tuple[Message, ...]
    max_new_tokens: int | None
    sampling: dict[str, float]
    stop: tuple[str, ...] = ()


class Backend(Protocol):
    """A loaded model. `info` tells what it is and its defaults (docs/serving.md)."""

    info: dict[str, Any]

    def submit(self, request: Request, emit: Emit) -> None:
        """Begin an answer and return at once; its events go to `emit`, from any thread."""

    def cancel(self, request_id: int) -> None:
        """End an answer with what it has; nothing happens if it is not under way."""

    def close(self) -> None:
        """Free what the model holds."""

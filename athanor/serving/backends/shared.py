"""What the runtimes that are not ours share: fitting a history, ending at a text, checking settings. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from athanor.corpus.conversations import Message
from athanor.errors import InputError

RESERVE_SHARE = 0.25  # of the context, kept free for an answer at the cost of the oldest turns; as in serving/chat.py
RANGES = {
    "temperature": (0, 100),
    "top_k": (0, 1 << 31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
}


def reserve(context_tokens: int, limit: int) -> int:
    """Tokens to keep free for an answer of at most `limit`."""
    return max(1, min(limit, int(context_tokens * RESERVE_SHARE)))


def fit(
    messages: Sequence[Message],
    prompt: Callable[[list[Message]], list[int]],
    *,
    context_tokens: int,
    reserve_tokens: int,
) -> tuple[list[int], int]:
    """Ids of the prompt without the oldest exchanges that do not fit, and how many those are.

    As `generate.fit_history`, for any template: the system message and the
    last user message stay. InputError if these two alone fill the context.
    """
    system = [message for message in messages[:1] if message.role == "system"]
    turns = list(messages[len(system) :])
    dropped = 0
    while True:
        ids = prompt([*system, *turns])
        if len(ids) + reserve_tokens <= context_tokens:
            return ids, dropped
        if len(turns) < 3:
            if len(ids) >= context_tokens:
                raise InputError(
                    f"a prompt of {len(ids)} tokens does not fit into a context of {context_tokens}",
                    fix="shorten the message or the system message",
                )
            return ids, dropped
        turns, dropped = turns[2:], dropped + 1


def settings(given: Mapping[str, float], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings of an answer: what was given, else the model's defaults. InputError for an impossible one."""
    found = {name: given.get(name, defaults.get(name)) for name in RANGES}
    for name, value in found.items():
        low, high = RANGES[name]
        open_below = name in ("top_p", "repetition_penalty")
        if not low <= value <= high or (open_below and value == low):
            fix = f"use {'more than ' if open_below else ''}{low} to {high}"
            raise InputError(f"{value} is impossible", where=name, fix=fix)
    return found


class Stops:
    """Lets text through until one of `texts` appears; what could be the beginning of one is held back."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = [text for text in texts if text]
        self.longest = max(map(len, self.texts), default=0)
        self.held, self.found = "", False

    def add(self, text: str) -> str:
        """What may be shown of all up to now; sets `found` where a stop text appeared."""
        if self.found:
            return ""
        text = self.held + text
        places = [place for place in map(text.find, self.texts) if place >= 0]
        if places:
            self.held, self.found = "", True
            return text[: min(places)]
        keep = next(
            (n for n in range(min(self.longest - 1, len(text)), 0, -1) if self._begins(text[len(text) - n :])), 0
        )
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back and turned out to be no stop text."""
        held, self.held = self.held, ""
        return held

    def _begins(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self.texts)

"""Between messages and ids: the prompt of an answer, and an answer's ids as text that can be shown piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from athanor.corpus.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.prompting import fit_history
from athanor.tokenizer.tokenizer import Tokenizer

RESERVE_SHARE = 0.25  # of the context, kept free for an answer at the cost of the oldest turns


@dataclass(frozen=True)
class Prompt:
    """Ids to continue, the most ids that may follow, and how many of the oldest exchanges were left out to fit."""

    ids: list[int]
    room: int
    forgotten: int


def reserve(context_tokens: int, limit: int) -> int:
    """Tokens to keep free for an answer of at most `limit`."""
    return max(1, min(limit, int(context_tokens * RESERVE_SHARE)))


def prepare(tokenizer: Tokenizer, messages: Sequence[Message], *, context_tokens: int, max_new_tokens: int) -> Prompt:
    """The prompt for the next answer of a conversation that ends with a user message.

    InputError if the roles are not those of the template, or the last message
    alone does not fit.
    """
    prompt_ids(tokenizer, [Message(message.role, "") for message in messages])  # the roles, before their fitting
    kept, forgotten = fit_history(
        tokenizer, messages, context_tokens=context_tokens, reserve_tokens=reserve(context_tokens, max_new_tokens)
    )
    ids = prompt_ids(tokenizer, kept)
    return Prompt(ids, min(max_new_tokens, context_tokens - len(ids)), forgotten)


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


class Pieces:
    """Text out of ids, as soon as it is certain: a token may end in the middle of a character.

    `stop` are texts that end the answer; nothing more comes once `stopped` is true.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, Stops(stop)
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def stopped(self) -> bool:
        return self.stops.found

    def feed(self, token: int) -> str:
        """What can be shown now."""
        return self.stops.add(self.decoder.decode(self.tokenizer.decode_bytes([token])))

    def finish(self) -> str:
        """What was held back, when no more ids come."""
        return self.stops.add(self.decoder.decode(b"", final=True)) + self.stops.rest()

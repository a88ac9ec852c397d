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


def prepare(tokenizer: Tokenizer, messages: Sequence[Message], *, context_tokens: int, max_new_tokens: int) -> Prompt:
    """The prompt for the next answer of a conversation that ends with a user message.

    InputError if the roles are not those of the template, or the last message
    alone does not fit.
    """
    prompt_ids(tokenizer, [Message(message.role, "") for message in messages])  # the roles, before their fitting
    reserve = max(1, min(max_new_tokens, int(context_tokens * RESERVE_SHARE)))
    kept, forgotten = fit_history(tokenizer, messages, context_tokens=context_tokens, reserve_tokens=reserve)
    ids = prompt_ids(tokenizer, kept)
    return Prompt(ids, min(max_new_tokens, context_tokens - len(ids)), forgotten)


class Pieces:
    """Text out of ids, as soon as it is certain.

    A token may end in the middle of a character, and a text that ends the
    answer may have begun: both are held back until the next tokens decide.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, [text for text in stop if text]
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held, self.stopped = "", False

    def feed(self, token: int) -> str:
        """What can be shown now; nothing more comes once `stopped` is true."""
        return self._show(self.decoder.decode(self.tokenizer.decode_bytes([token])))

    def finish(self) -> str:
        """What was held back and is not to be followed by anything."""
        rest = self._show(self.decoder.decode(b"", final=True))
        rest, self.held = rest + self.held, ""
        return rest

    def _show(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self.held + piece
        ends = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped, self.held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self.stop), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-size:])), 0)

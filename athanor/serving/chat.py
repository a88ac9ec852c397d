"""A conversation with a model: history, fitting it into the context, and answers piece by piece as text."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import replace

from athanor.corpus.conversations import Message
from athanor.evaluation.generate import Sampling, end_ids, exempt_ids, fit_history, stream
from athanor.model.transformer import Transformer
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer

RESERVE_SHARE = 0.25  # of the context, kept free for an answer at the cost of the oldest turns


class Chat:
    """One conversation. Attributes after an answer: `tokens` generated, `cut` at a limit, `forgotten` exchanges."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        sampling: Sampling,
        max_new_tokens: int,
        system: str = "",
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.sampling, self.max_new_tokens, self.system = sampling, max_new_tokens, system
        self.turns: list[Message] = []
        self.tokens, self.cut, self.forgotten = 0, False, 0

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self.turns, self.forgotten = [], 0

    def answer(self, text: str) -> Iterator[str]:
        """Pieces of the answer to `text` as they are made.

        Closing the iterator stops the answer. What was said up to then stays
        in the history; an answer that was stopped before its first piece, or
        failed, leaves the history as it was. InputError if `text` alone does not fit.
        """
        context = self.model.config.context_tokens
        reserve = max(1, min(self.max_new_tokens, int(context * RESERVE_SHARE)))
        system = [Message("system", self.system)] if self.system else []
        asked = Message("user", text)
        messages, self.forgotten = fit_history(
            self.tokenizer, [*system, *self.turns, asked], context_tokens=context, reserve_tokens=reserve
        )
        prompt = prompt_ids(self.tokenizer, messages)
        room = min(self.max_new_tokens, context - len(prompt))
        # A token may end in the middle of a character; the decoder waits for the rest.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        said, self.tokens, self.cut = [], 0, False
        ends = end_ids(self.tokenizer)
        # Another turn draws other numbers; the same conversation with the same seed repeats itself.
        sampling = replace(self.sampling, seed=self.sampling.seed + len(self.turns))
        exempt = exempt_ids(self.tokenizer) if sampling.repetition_penalty != 1 else ()
        tokens = stream(self.model, prompt, max_new_tokens=room, stop_ids=ends, sampling=sampling, exempt=exempt)
        try:
            for token in tokens:
                if token in ends:
                    break
                self.tokens += 1
                piece = decoder.decode(self.tokenizer.decode_bytes([token]))
                if piece:
                    said.append(piece)
                    yield piece
            else:
                self.cut = True
            rest = decoder.decode(b"", final=True)
            if rest:
                said.append(rest)
                yield rest
        except GeneratorExit:
            if said:
                self.turns += [asked, Message("assistant", "".join(said))]
            raise
        self.turns += [asked, Message("assistant", "".join(said))]

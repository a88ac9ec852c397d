"""A conversation with a model: history, fitting it into the context, and answers piece by piece as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from athanor.corpus.conversations import Message
from athanor.decoding.engine import Decodes
from athanor.decoding.generate import stream
from athanor.decoding.sampling import Sampling
from athanor.serving.answers import Pieces, prepare
from athanor.tokenizer.prompting import end_ids, exempt_ids
from athanor.tokenizer.tokenizer import Tokenizer


class Chat:
    """One conversation. Attributes after an answer: `tokens` generated, `cut` at a limit, `forgotten` exchanges."""

    def __init__(
        self,
        model: Decodes,
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
        system = [Message("system", self.system)] if self.system else []
        asked = Message("user", text)
        prompt = prepare(
            self.tokenizer,
            [*system, *self.turns, asked],
            context_tokens=self.model.config.context_tokens,
            max_new_tokens=self.max_new_tokens,
        )
        self.forgotten = prompt.forgotten
        pieces, said, self.tokens, self.cut = Pieces(self.tokenizer), [], 0, False
        ends = end_ids(self.tokenizer)
        # Another turn draws other numbers; the same conversation with the same seed repeats itself.
        sampling = replace(self.sampling, seed=self.sampling.seed + len(self.turns))
        tokens = stream(
            self.model,
            prompt.ids,
            max_new_tokens=prompt.room,
            stop_ids=ends,
            sampling=sampling,
            exempt=exempt_ids(self.tokenizer) if sampling.repetition_penalty != 1 else (),
        )
        try:
            for token in tokens:
                if token in ends:
                    break
                self.tokens += 1
                piece = pieces.feed(token)
                if piece:
                    said.append(piece)
                    yield piece
            else:
                self.cut = True
            rest = pieces.finish()
            if rest:
                said.append(rest)
                yield rest
        except GeneratorExit:
            if said:
                self.turns += [asked, Message("assistant", "".join(said))]
            raise
        self.turns += [asked, Message("assistant", "".join(said))]

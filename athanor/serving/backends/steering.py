"""What one answer asks of each step beside sampling: log-probabilities, OpenAI's penalties and biases, a grammar.

All of it stands beside the engine, which the pipeline's stages use as well: they need none of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from athanor.base.errors import InputError
from athanor.decoding.engine import TokenEvent
from athanor.serving.backends.grammar import Grammar
from athanor.serving.backends.keeping import KeepingEngine
from athanor.tokenizer.tokenizer import Tokenizer


@dataclass
class Steering:
    """Of one answer. top_logprobs: how many of the likeliest ids are told at each step; None for no log-probabilities.

    The penalties are those of OpenAI's protocol: for each id of the answer so
    far `presence_penalty`, and `frequency_penalty` for each time it occurs,
    are taken off its logit. `logit_bias` is added to it. `grammar` rules out what cannot come next.
    """

    top_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    counts: Counter[int] = field(default_factory=Counter)

    def change(self, logits_V: Tensor) -> None:
        """Make the ids of the next step as likely as was asked for, in place."""
        if self.counts and (self.presence_penalty or self.frequency_penalty):
            ids = torch.tensor(list(self.counts), device=logits_V.device)
            counts = torch.tensor(list(self.counts.values()), dtype=logits_V.dtype, device=logits_V.device)
            logits_V[ids] -= self.presence_penalty + self.frequency_penalty * counts
        for name, bias in self.logit_bias.items():
            logits_V[int(name)] += bias
        if self.grammar is not None and (allowed := self.grammar.allowed()) is not None:
            logits_V.masked_fill_(~torch.from_numpy(allowed).to(logits_V.device), float("-inf"))

    def take(self, token: int) -> None:
        """What was chosen."""
        self.counts[token] += 1
        if self.grammar is not None:
            self.grammar.take(token)

    def check(self, vocab_size: int) -> None:
        for name in self.logit_bias:
            if int(name) >= vocab_size:
                raise InputError(f"there is no token {name}", where="logit_bias", fix=f"ids are 0 to {vocab_size - 1}")


def token_row(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """One id as the protocol tells it: its text, its bytes (a token may be half a character), and how likely it was."""
    data = tokenizer.decode_bytes([token])
    text = data.decode("utf-8", errors="replace") if data else tokenizer.processor.id_to_piece(token)
    return {"token": text, "logprob": round(logprob, 6), "bytes": list(data)}


class SteeredEngine(KeepingEngine):
    """The engine, with a `Steering` for each answer that wants one; `logprobs` holds the rows of the last step."""

    def __init__(self, *words: Any, tokenizer: Tokenizer, **options: Any) -> None:
        super().__init__(*words, **options)
        self.tokenizer = tokenizer
        self.steering: dict[Hashable, Steering] = {}
        self.logprobs: dict[Hashable, dict[str, Any]] = {}

    def _choose_tokens(self, first: int, logits_BV: Tensor) -> list[TokenEvent]:
        wanted = {}
        for index, row in enumerate(self.rows[first:]):
            steering = self.steering.get(row.key)
            if steering is None:
                continue
            if steering.top_logprobs is not None:  # the model's own, before anything changes them
                wanted[row.key] = logits_BV[index].float().log_softmax(-1)
            steering.change(logits_BV[index])
        events = super()._choose_tokens(first, logits_BV)
        self.logprobs = {}
        for event in events:
            if event.key in self.steering:
                self.steering[event.key].take(event.token)
            if event.key in wanted:
                self.logprobs[event.key] = self._row(event, wanted[event.key])
        return events

    def _row(self, event: TokenEvent, logprobs_V: Tensor) -> dict[str, Any]:
        top = logprobs_V.topk(min(self.steering[event.key].top_logprobs or 0, len(logprobs_V)))
        likely = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        chosen = token_row(self.tokenizer, event.token, float(logprobs_V[event.token]))
        return {**chosen, "top_logprobs": [token_row(self.tokenizer, *each) for each in likely]}

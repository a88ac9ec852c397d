"""Decoding as a running batch: answers join while others are half way, and leave when they end.

Battery, chat and server all decode through here. One preallocated cache; the
answers under way are its first rows, without holes, so that a step costs what
its answers cost. A new answer takes the next row; where one ends, the last row
moves into its place. Not safe to use from two threads at once.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from athanor.base.errors import InputError
from athanor.decoding.cache import KVCache
from athanor.decoding.sampling import Sampling, penalise, pick
from athanor.model.config import ModelConfig


class DecoderModel(Protocol):
    """What the engine needs of a model: a `Transformer`, or a `FusedDecoder`, which is quicker."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def head_weight(self) -> Tensor: ...

    def hidden(self, ids_BT: Tensor, *, positions_BT: Tensor | None = None, cache: KVCache) -> Tensor: ...


class TokenEvent(NamedTuple):
    """One id of one answer; `done` says that it is the last: a stop id, or the limit or the context is reached."""

    key: Hashable
    token: int
    done: bool


@dataclass
class _Row:
    key: Hashable
    ids: list[int]  # of the prompt and of the answer so far; the last one made is not in the cache yet
    length: int  # tokens in the cache
    budget: int  # ids that may still be made
    sampling: Sampling
    draw: random.Random
    generated: set[int] = field(default_factory=set)


class Engine:
    """Decodes `rows` answers at a time, each of at most `tokens` with its prompt (default: the model's context).

    `stop_ids` end every answer. `exempt` ids are free of repetition penalties.
    An answer does not depend on the others, beyond floating-point ties.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        rows: int,
        tokens: int | None = None,
        stop_ids: Collection[int],
        exempt: Collection[int] = (),
    ) -> None:
        self.model, self.capacity = model, rows
        self.stop_ids, self.exempt = frozenset(stop_ids), frozenset(exempt)
        weight = model.head_weight
        length = model.config.context_tokens if tokens is None else tokens
        with torch.inference_mode():
            self.cache = KVCache(model.config, rows, length, device=weight.device, dtype=weight.dtype)
        self.rows: list[_Row] = []

    @property
    def free(self) -> int:
        return self.capacity - len(self.rows)

    @torch.inference_mode()
    def add_requests(self, requests: Sequence[tuple[Hashable, Sequence[int], int, Sampling]]) -> list[TokenEvent]:
        """Begin answers, given as (key, prompt ids, maximum of new tokens, sampling), and make the first id of each.

        They are read in one pass, padded to the longest; equal prompts are read
        once. InputError, before anything has changed, for a prompt that is empty
        or leaves no room.
        """
        if len(requests) > self.free:
            raise ValueError(f"{len(requests)} answers for {self.free} free rows")
        for _, prompt, limit, _ in requests:
            check_prompt(prompt, self.cache.capacity)
            if limit < 1:
                raise ValueError(f"an answer of at most {limit} ids")
        if not requests:
            return []
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(tuple(each[1]) for each in requests))}
        device, prompts = self.model.head_weight.device, list(numbers)
        scratch = KVCache(
            self.model.config, len(prompts), max(map(len, prompts)), device=device, dtype=self.model.head_weight.dtype
        )
        sources = [numbers[tuple(prompt)] for _, prompt, _, _ in requests]
        logits_BV = self._read(prompts, scratch)[sources]
        first = len(self.rows)
        self.cache.write_rows(first, scratch, sources)
        for key, prompt, limit, sampling in requests:
            budget = min(limit, self.cache.capacity - len(prompt))
            self.rows.append(_Row(key, list(prompt), len(prompt), budget, sampling, random.Random(sampling.seed)))
        return self._choose_tokens(first, logits_BV)

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """The next id of every answer under way."""
        if not self.rows:
            return []
        device, lengths = self.model.head_weight.device, [row.length for row in self.rows]
        view = self.cache.first_rows(len(lengths), max(lengths))
        equal_lengths = len(set(lengths)) == 1
        positions_B1 = None if equal_lengths else torch.tensor(lengths, device=device)[:, None]
        ids_B1 = torch.tensor([row.ids[-1] for row in self.rows], device=device)[:, None]
        for row in self.rows:
            row.length += 1
        h_BTD = self.model.hidden(ids_B1, positions_BT=positions_B1, cache=view)
        return self._choose_tokens(0, F.linear(h_BTD[:, -1], self.model.head_weight))

    def cancel(self, key: Hashable) -> None:
        """End an answer; nothing happens if it is not under way."""
        for index, row in enumerate(self.rows):
            if row.key == key:
                last_row = self.rows.pop()
                if index < len(self.rows):
                    self.rows[index] = last_row
                    with torch.inference_mode():
                        self.cache.move(len(self.rows), index)
                return

    def _read(self, prompts: Sequence[Sequence[int]], cache: KVCache) -> Tensor:
        """Put the prompts into an empty cache; logits [B, V] after the last id of each."""
        return prefill(self.model, prompts, cache, [0] * len(prompts))

    def _choose_tokens(self, first: int, logits_BV: Tensor) -> list[TokenEvent]:
        """Choose the next ids of the rows from `first` on; those that are done leave the batch."""
        rows = self.rows[first:]
        for index, row in enumerate(rows):
            if row.generated:
                penalise(logits_BV[index], row.generated, row.sampling.repetition_penalty)
        tokens = pick(logits_BV, [row.sampling for row in rows], [row.draw for row in rows])
        events = []
        for row, token in zip(rows, tokens, strict=True):
            row.ids.append(token)
            row.budget -= 1
            if row.sampling.repetition_penalty != 1 and token not in self.exempt:
                row.generated.add(token)
            events.append(TokenEvent(row.key, token, token in self.stop_ids or row.budget == 0))
        for event in events:
            if event.done:
                self.cancel(event.key)
        return events


def check_prompt(prompt: Sequence[int], context: int) -> None:
    """InputError for a prompt that is empty, or fills a context so that no answer fits."""
    if not 0 < len(prompt) < context:
        raise InputError(
            f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}",
            fix="shorten it, or drop the oldest turns",
        )


def prefill(model: DecoderModel, prompts: Sequence[Sequence[int]], cache: KVCache, starts: Sequence[int]) -> Tensor:
    """Put the prompts into the cache, each behind the `starts` tokens that its row has; logits [B, V] after the last."""
    device, width = model.head_weight.device, max(len(prompt) for prompt in prompts)
    ids_BT = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    index_BT = torch.arange(width, device=device).expand(len(prompts), width)
    equal_lengths = len({(len(prompt), start) for prompt, start in zip(prompts, starts, strict=True)}) == 1
    starts_B1 = torch.tensor(starts, device=device)[:, None]
    positions_BT = None if equal_lengths else (index_BT + starts_B1).where(index_BT < lengths_B[:, None], -1)
    h_BTD = model.hidden(ids_BT, positions_BT=positions_BT, cache=cache)
    return F.linear(h_BTD[torch.arange(len(prompts), device=device), lengths_B - 1], model.head_weight)

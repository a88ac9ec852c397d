"""The list of requests: decided by parameters and material alone, and a longer list begins with the shorter one."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from athanor.base.artifacts import digest
from athanor.base.errors import InputError, ParamsError
from athanor.synthesis.material import Passage, examples, passages, rank
from athanor.synthesis.params import SyntheticCategory, SyntheticParams
from athanor.text.conversations import Messages

# Chat templates add roles and separators to what is sent: this many tokens at most, for two messages.
TEMPLATE_TOKENS = 64
TURN = '{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}'
SYSTEM = """You write training conversations for a small language model.
Answer with JSON and nothing else: no word before it or after it, no code fence.
Its form: {{"conversations": [{{"messages": [{turn}]}}]}}
Write {conversations}, each with {pairs}. Roles are user and assistant in turn, user first, and no content is empty.
Conversations differ in what is asked and how it is put: length, tone, form, level. Do not open them alike.
A user's message must make sense to somebody who sees nothing else: quote or paste what it is about.
Answers are direct, correct and complete. No apologies, no disclaimers, no talk of what the assistant is."""


@dataclass(frozen=True)
class Request:
    """One question to the other model."""

    category: str
    system: str
    user: str
    pairs: int
    passage: Passage | None
    identity: str  # of everything that decides the answer; an answered request is never sent again

    @property
    def worst_input_tokens(self) -> int:
        """No byte-level tokenizer makes more tokens than bytes."""
        return len(self.system.encode()) + len(self.user.encode()) + TEMPLATE_TOKENS


def plan_requests(params: SyntheticParams, documents: Path, seeds: Path) -> list[Request]:
    """All requests, in the order they are sent."""
    order = categories(params)
    counts = {name: order.count(name) for name in params.categories}
    active = {name: category for name, category in params.categories.items() if counts[name]}
    passage_count = sum(counts[name] for name, category in active.items() if category.passage)
    next_passages = iter(_passages(params, documents, passage_count))
    pools = _pools(active, counts, seeds, params.seed)
    turns = dict.fromkeys(active, 0)
    requests = []
    for name in order:
        category = active[name]
        passage = next(next_passages) if category.passage else None
        chosen_examples = _pick_examples(
            pools.get(name, []), category.examples, params.seed, name, turns[name], passage
        )
        turns[name] += 1
        requests.append(_request(params, name, category, passage, chosen_examples))
    return _distinct(requests)


def categories(params: SyntheticParams) -> list[str]:
    """The category of each request. Every prefix of the list is as near to the shares as whole requests can be."""
    counts = dict.fromkeys(params.categories, 0)
    order = []
    for number in range(1, params.requests + 1):
        shortfalls = {name: category.share * number - counts[name] for name, category in params.categories.items()}
        name = max(shortfalls, key=lambda key: (round(shortfalls[key], 9), key))
        counts[name] += 1
        order.append(name)
    return order


def _passages(params: SyntheticParams, documents: Path, count: int) -> list[Passage]:
    if not count:
        return []
    available = passages(
        documents, count, seed=params.seed, sources=params.sources, chars=params.passage_chars,
        min_chars=params.min_passage_chars,
    )  # fmt: skip
    if len(available) < count:
        what = f"{count:,} requests want a passage each, and the documents have {len(available):,}"
        fix = "lower requests, passage_chars or min_passage_chars, or add documents"
        raise InputError(what, where="synthetic.requests", fix=fix)
    return available


def _pools(
    active: Mapping[str, SyntheticCategory], counts: Mapping[str, int], seeds: Path, seed: int
) -> dict[str, list[Messages]]:
    """The example conversations for each category that shows some."""
    with_examples = {name: category for name, category in active.items() if category.examples}
    pool = examples(seeds, seed) if with_examples else []
    for name, category in with_examples.items():
        combinations = math.comb(len(pool), category.examples)
        if len(pool) < category.examples or (not category.passage and combinations < counts[name]):
            what = f"{counts[name]:,} requests want {category.examples} examples each, {seeds} has {len(pool):,}"
            fix = "add conversations there, or set passage to true"
            raise InputError(what, where=f"synthetic.categories.{name}.examples", fix=fix)
    return dict.fromkeys(with_examples, pool)


def _pick_examples(
    pool: Sequence[Messages], count: int, seed: int, name: str, turn: int, passage: Passage | None
) -> list[Messages]:
    """Examples for one request: a random choice if it has a passage, else the next unused combination."""
    if not count:
        return []
    if passage is not None:
        key = f"{name}:{passage.document}:{passage.text}"
        best = sorted(range(len(pool)), key=lambda number: rank(seed, f"{key}:{number}"))[:count]
        return [pool[number] for number in best]
    return [pool[number] for number in _combination(len(pool), count, turn)]


@functools.cache
def _combination(size: int, count: int, turn: int) -> tuple[int, ...]:
    """The combination for `turn`: all `math.comb(size, count)` ones come once, and consecutive ones differ widely."""
    total = math.comb(size, count)
    step = max(1, int(total * 0.6180339887))
    while math.gcd(step, total) > 1:
        step += 1
    position = turn * step % total
    picked, first = [], 0
    for remaining in range(count, 0, -1):
        while (block := math.comb(size - first - 1, remaining - 1)) <= position:
            position, first = position - block, first + 1
        picked.append(first)
        first += 1
    return tuple(picked)


def _request(
    params: SyntheticParams,
    name: str,
    category: SyntheticCategory,
    passage: Passage | None,
    chosen_examples: Iterable[Messages],
) -> Request:
    conversations = _counted(params.conversations_per_request, "conversation")
    pairs = f"{_counted(category.pairs, 'question')} and {'its answer' if category.pairs == 1 else 'their answers'}"
    system = SYSTEM.format(turn=TURN, conversations=conversations, pairs=pairs)
    sections = [category.task.strip()]
    for messages in chosen_examples:
        example = json.dumps(
            {"messages": [{"role": m.role, "content": m.content} for m in messages]}, ensure_ascii=False
        )
        sections.append(f"An example of the kind, not to be repeated:\n{example}")
    if passage is not None:
        sections.append(f"The text it is about:\n<text>\n{passage.text}\n</text>")
    user = "\n\n".join(sections)
    identifying_facts = {
        "api": params.api, "base_url": params.base_url.rstrip("/"), "model": params.model, "system": system,
        "user": user, "max_output_tokens": params.max_output_tokens, "temperature": params.temperature,
    }  # fmt: skip
    return Request(name, system, user, category.pairs, passage, digest(identifying_facts)[:32])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _distinct(requests: list[Request]) -> list[Request]:
    """ParamsError if two requests are equal: the answer would be paid for once and counted twice."""
    identities: set[str] = set()
    for request in requests:
        if request.identity in identities:
            fix = "documents repeat each other: lower requests, or make the categories' tasks different"
            raise ParamsError("two requests are the same", where=f"synthetic.categories.{request.category}", fix=fix)
        identities.add(request.identity)
    return requests

"""The list of requests: decided by parameters and documents alone, and a longer list begins with the shorter one."""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from athanor.base.artifacts import digest
from athanor.base.errors import InputError
from athanor.synthesis.params import SyntheticParams
from athanor.text.documents import read_sources

# Chat templates add roles and separators to what is sent: this many tokens at most, for two messages.
TEMPLATE_TOKENS = 64
MIN_PASSAGE_CHARS = 300
SYSTEM = """You write training conversations for a small language model.
Answer with JSON and nothing else: no word before it or after it, no code fence.
Its form: {{"conversations": [{{"messages": [{{"role": "user", "content": "..."}}, {{"role": "assistant", "content": "..."}}]}}]}}
Number of conversations: {conversations}. Questions, each with its answer, in one conversation: {pairs}.
Roles are user and assistant in turn, user first, and no content is empty.
Conversations differ in what is asked and how it is put: length, tone, form, level. Do not open them alike.
A user's message must make sense to somebody who sees nothing else: quote or paste what it is about.
Answers are direct, correct and complete. No apologies, no disclaimers, no talk of what the assistant is."""


@dataclass(frozen=True)
class Request:
    """One question to the other model."""

    category: str
    pairs: int
    system: str
    user: str
    document: str  # id of the one that the passage is from
    document_license: str
    identity: str  # of everything that decides the reply; an answered request is never sent again

    @property
    def input_tokens(self) -> int:
        """At most: no byte-level tokenizer makes more tokens than bytes."""
        return len((self.system + self.user).encode()) + TEMPLATE_TOKENS


def plan_requests(params: SyntheticParams, documents: Path) -> list[Request]:
    """All requests, in the order they are sent; each shows another passage of the documents below a folder."""
    shares = [category.share for category in params.categories.values()]
    names = random.Random(params.seed).choices(list(params.categories), shares, k=params.requests)
    passages = heapq.nsmallest(params.requests, _passages(params, documents))
    if len(passages) < params.requests:
        what = f"{params.requests:,} requests want a passage each, and the documents have {len(passages):,}"
        fix = "lower requests or passage_chars, or add documents"
        raise InputError(what, where="synthetic.requests", fix=fix)
    return [_request(params, name, *passage[2:]) for name, passage in zip(names, passages, strict=True)]


def _passages(params: SyntheticParams, folder: Path) -> Iterator[tuple[int, str, str, str, str]]:
    """Each passage with its rank (two parts), and the id and license of its document.

    One passage of every document comes before the second of any, by hashes of seed and content: so a corpus that grows
    changes few requests.
    """
    pattern = re.compile(rf"\S.{{{MIN_PASSAGE_CHARS - 1},{params.passage_chars - 1}}}(?=\s|\Z)", re.DOTALL)
    for document in read_sources(folder):
        if params.sources is None or document.source in params.sources:
            found = {(digest([params.seed, text]), text) for text in pattern.findall(document.text)}
            for number, (rank, text) in enumerate(sorted(found)):
                yield number, rank, text, document.id, document.license


def _request(params: SyntheticParams, name: str, passage: str, document: str, license: str) -> Request:
    category = params.categories[name]
    system = SYSTEM.format(conversations=params.conversations_per_request, pairs=category.pairs)
    user = f"{category.task.strip()}\n\nThe text it is about:\n<text>\n{passage}\n</text>"
    deciding = (params.api, params.base_url, params.model, params.max_output_tokens, system, user)
    return Request(name, category.pairs, system, user, document, license, digest(deciding)[:32])

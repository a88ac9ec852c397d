"""The `synthetic` section of params.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import check_file_names, param, share

APIS = ("anthropic", "openai")
OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens")
SHARES = 1e-6  # what shares may miss 1 by


@dataclass(frozen=True, kw_only=True)
class SyntheticCategory:
    """One kind of conversation. Every request shows the model something of yours: a passage of a document, or examples.

    Templates alone collapse: 50,000 requests filled from slots were 1,142 distinct prompts in a measured predecessor.
    """

    share: float = share()  # of the requests; all shares together are 1
    passage: bool = True  # show a passage of a training document of data/clean
    examples: int = param(min=0, max=8, default=0)  # conversations of corpus/seeds shown as examples
    pairs: int = param(min=1, max=20, default=1)  # questions with their answers in each conversation
    task: str  # what to write, told to the model as it stands here

    def __post_init__(self) -> None:
        if not self.passage and not self.examples:
            fix = "set passage to true, or examples to 1 or more (conversations in corpus/seeds)"
            raise ParamsError("requests that show nothing repeat each other", where="passage", fix=fix)
        if not self.task.strip():
            raise ParamsError("is empty", where="task", fix="say what the model is to write")


@dataclass(frozen=True, kw_only=True)
class SyntheticBudget:
    """What all requests under one `synthetic.name` may use, over all runs; requests stop before any limit is passed.

    A request counts with the most it may use (a token for each byte of its text, all of max_output_tokens) until its
    answer says what it did use, and for good if no answer came.
    """

    requests: int = param(min=1)  # that a server may charge: answered, or cut off
    tokens: int = param(min=1)  # read and written
    money: float | None = param(min=0.0, default=None)  # in the currency of the prices; null for no limit
    input_price: float | None = param(min=0.0, default=None)  # money per million tokens read
    output_price: float | None = param(min=0.0, default=None)  # money per million tokens written

    def __post_init__(self) -> None:
        for name in ("input_price", "output_price"):
            if self.money is not None and getattr(self, name) is None:
                raise ParamsError("is needed for a limit in money", where=name, fix="look it up at your provider")


@dataclass(frozen=True, kw_only=True)
class SyntheticGates:
    """What the answers must be before anything is written; conversations counted as bad are left out, too."""

    max_malformed_share: float = share(0.1)  # of answers: not the JSON asked for, cut off, or none at all
    max_habit_share: float = share(0.1)  # of conversations: identity leak, refusal, hedge, truncated text
    max_leaked_share: float = share(0.02)  # of conversations: hold an item of the battery
    max_near_duplicate_share: float = share(0.1)  # of conversations: say what another one says
    min_distinct_prompts: float = share(0.9)  # different first questions / conversations
    min_distinct_4grams: float = share(0.8)  # different 4-grams of words / all, in blocks of 10,000
    max_opening_share: float = share(0.2)  # of answers: begin with the same clause (its first three words)
    min_conversations: int = param(min=1, default=100)  # left at the end


@dataclass(frozen=True, kw_only=True)
class SyntheticParams:
    """`athanor synthesize`: conversations that another model writes about your documents (docs/synthetic.md)."""

    name: str  # of the result, corpus/synthetic/NAME.jsonl, and of the budget
    api: str = param(choices=APIS)
    base_url: str  # without /v1/messages or /v1/chat/completions; plain http only for this machine or network
    model: str | None  # null: nothing is ever asked
    key_env: str | None  # the environment variable with the key, never the key; null for a server that wants none
    license: str  # under which you hold the answers; the provider's terms decide
    seed: int = param(min=0, max=2**32 - 1, default=1)
    requests: int = param(min=1, max=100_000_000)
    conversations_per_request: int = param(min=1, max=50, default=3)
    sources: tuple[str, ...] | None = None  # of documents for passages; null for all
    passage_chars: int = param(min=200, max=200_000, default=3000)  # at most; a longer document gives several passages
    min_passage_chars: int = param(min=1, max=200_000, default=300)
    max_output_tokens: int = param(min=16, max=1_000_000, default=2500)  # of one answer
    output_limit: str = param(choices=OUTPUT_LIMITS, default="max_tokens")  # what an OpenAI-style server calls it
    temperature: float | None = param(min=0.0, max=2.0, default=1.0)  # null leaves it to the server
    concurrency: int = param(min=1, max=256, default=4)  # requests in flight
    timeout_seconds: float = param(
        min=0.1, max=36_000, default=180.0
    )  # of one request, from its sending to the end of its answer
    max_tries: int = param(min=1, max=100, default=5)  # of one request, when the server is busy or breaks off
    budget: SyntheticBudget
    gates: SyntheticGates = SyntheticGates()
    categories: dict[str, SyntheticCategory]

    def __post_init__(self) -> None:
        check_file_names([self.name], "name")
        if self.key_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.key_env):
            # The value is not shown: it may be a key.
            fix = "name the variable here, and put the key into the environment"
            raise ParamsError("is not the name of an environment variable", where="key_env", fix=fix)
        if self.min_passage_chars > self.passage_chars:
            fix = f"use {self.passage_chars} or less"
            raise ParamsError("is more than passage_chars", where="min_passage_chars", fix=fix)
        total = sum(category.share for category in self.categories.values())
        if abs(total - 1) > SHARES:
            raise ParamsError(f"the shares add up to {total:g}", where="categories", fix="make them 1 together")

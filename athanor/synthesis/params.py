"""The `synthetic` section of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from athanor.base.errors import ParamsError
from athanor.base.strict import check_file_names, param, share

TOLERANCE = 1e-6  # of the sum of shares, which is 1


@dataclass(frozen=True, kw_only=True)
class SyntheticCategory:
    """One kind of conversation. Every request shows the model a passage of a training document.

    Templates alone collapse: 50,000 requests filled from slots were 1,142 distinct prompts in a measured predecessor.
    """

    share: float = share()  # of the requests; all shares together are 1
    pairs: int = param(min=1, max=20, default=1)  # questions with their answers in each conversation
    task: str  # what to write, in your words


@dataclass(frozen=True, kw_only=True)
class SyntheticBudget:
    """What all requests under one `synthetic.name` may use, over all runs; requests stop before a limit is passed.

    A request counts at its most (a token for each byte of its text, all of max_output_tokens) until its reply says what
    it did use, and for good if no reply came.
    """

    requests: int = param(min=1)  # that a server may charge: answered, or cut off
    tokens: int = param(min=1)  # read and written


@dataclass(frozen=True, kw_only=True)
class SyntheticGates:
    """Limits of the replies, checked before anything is written; conversations counted as bad are left out, too."""

    max_malformed_share: float = share(0.1)  # of replies: not the JSON asked for, cut off, or none at all
    max_habit_share: float = share(0.1)  # of conversations: identity leak, refusal, hedge, truncated text
    max_leaked_share: float = share(0.02)  # of conversations: hold an item of the battery
    max_near_duplicate_share: float = share(0.1)  # of conversations: nearly repeat an earlier one
    max_opening_share: float = share(0.2)  # of answers: begin with the same clause (its first three words)
    min_distinct_prompts: float = share(0.9)  # different first questions / conversations
    min_conversations: int = param(min=1, default=100)  # left at the end


@dataclass(frozen=True, kw_only=True)
class SyntheticParams:
    """`athanor synthesize`: conversations that another model writes about your documents (docs/synthetic.md)."""

    name: str  # of the result, corpus/synthetic/NAME.jsonl, and of the budget
    api: Literal["anthropic", "openai"]
    base_url: str  # without /v1/messages or /v1/chat/completions; plain http only for this machine or network
    model: str | None  # null: nothing is ever asked
    key_env: str | None  # the environment variable with the key, never the key; null for a server that wants none
    license: str  # under which you hold the answers; the provider's terms decide
    seed: int = param(min=0, max=2**32 - 1, default=1)
    requests: int = param(min=1, max=100_000_000)
    conversations_per_request: int = param(min=1, max=50, default=3)
    sources: tuple[str, ...] | None = None  # of documents for passages; null for all
    passage_chars: int = param(min=300, max=200_000, default=3000)  # at most; a longer document gives several passages
    max_output_tokens: int = param(min=16, max=1_000_000, default=2500)  # of one reply
    output_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"  # what an OpenAI-style server calls it
    concurrency: int = param(min=1, max=256, default=4)  # requests in flight
    timeout_seconds: float = param(min=0.1, max=36_000, default=180.0)  # of one try, without a byte of the server
    budget: SyntheticBudget
    gates: SyntheticGates = SyntheticGates()
    categories: dict[str, SyntheticCategory]

    def __post_init__(self) -> None:
        check_file_names([self.name], "name")
        if self.key_env is not None and not self.key_env.isidentifier():
            # The value is not shown: it may be a key.
            fix = "name the variable here, and put the key into the environment"
            raise ParamsError("is not the name of an environment variable", where="key_env", fix=fix)
        total = sum(category.share for category in self.categories.values())
        if abs(total - 1) > TOLERANCE:
            raise ParamsError(f"the shares add up to {total:g}", where="categories", fix="make them 1 together")

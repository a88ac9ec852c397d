"""The `eval` section of params.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param


@dataclass(frozen=True)
class Condition:
    """One way to decode, beside greedy: shows whether a fault lies in the model or in how it is sampled."""

    temperature: float = param(min=0.0, max=10.0, default=0.0)  # 0: greedy
    top_p: float = param(min=0.01, max=1.0, default=1.0)
    repetition_penalty: float = param(min=1.0, max=10.0, default=1.0)  # on generated ids with a letter; 1: none


@dataclass(frozen=True, kw_only=True)
class EvalParams:
    """How the base and the chat model are measured. The battery itself is decoded greedily."""

    seed: int = param(min=0)  # chooses the held-out documents, the items of the conditions, and what is resampled
    bpb_max_bytes_per_source: int = param(min=1024)  # UTF-8 bytes of held-out text scored per source
    max_new_tokens: int = param(min=1)  # an answer that has not ended by then counts as not stopped
    batch_rows: int = param(min=1, max=65536, default=64)  # battery prompts decoded at once
    conditions: dict[str, Condition]  # other ways to decode, tried on the chat model
    condition_items: int = param(min=1)  # of the development split, at most
    samples_per_category: int = param(min=0)  # answers per category in samples.md

    def __post_init__(self) -> None:
        for name in self.conditions:
            if name == "greedy" or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                fix = "use small letters, digits and _; greedy is always there"
                raise ParamsError(f"'{name}' cannot name a condition", where="conditions", fix=fix)

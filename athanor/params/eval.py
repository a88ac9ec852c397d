"""The `eval` section of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.params.strict import param


@dataclass(frozen=True)
class EvalParams:
    """How the base and the chat model are measured. Decoding is greedy, so there is nothing to sample here."""

    seed: int = param(min=0)  # chooses the held-out documents
    bpb_max_bytes_per_source: int = param(min=1024)  # UTF-8 bytes of held-out text scored per source
    max_new_tokens: int = param(min=1)  # an answer that has not ended by then counts as not stopped
    batch_rows: int = param(min=1, max=65536)  # battery prompts decoded at once
    samples_per_category: int = param(min=0)  # answers per category in samples.md

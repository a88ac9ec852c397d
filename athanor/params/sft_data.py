"""The `sft_data` section of params.yaml: how conversations become packed training rows."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.errors import ParamsError
from athanor.params.strict import param


@dataclass(frozen=True)
class SftSource:
    """How much of one conversation source is used."""

    max_copies: int = param(min=1, max=1000)  # identical training conversations kept; 1 removes every duplicate
    repeats: int = param(min=0, max=100)  # times each training conversation appears per epoch; 0 leaves the source out
    max_supervised_tokens: int | None = param(min=1)  # of distinct training conversations, before repeats; null for all


@dataclass(frozen=True)
class SftDecontaminationParams:
    """The search for battery items, on what would be trained.

    An n-gram in more than `max_ngram_conversations` conversations, or of more than
    `max_ngram_items` items, is a template. Of items in `fact_categories` the
    answer alone is no contamination: recalling it is the exercise.
    """

    ngram_words: int = param(min=5, max=50)
    max_ngram_conversations: int = param(min=0, max=1_000_000)
    max_ngram_items: int = param(min=1, max=1_000_000)
    fact_categories: tuple[str, ...]


@dataclass(frozen=True)
class SftDataParams:
    context_tokens: int = param(min=16)  # equals the model's; a row holds one token more
    seed: int = param(min=0)
    max_source_share: float = param(min=0.01, max=1.0)  # of the supervised tokens that one source may make up
    max_pad_share: float = param(min=0.0, max=1.0)  # of all row tokens; checked above 200 rows
    decontamination: SftDecontaminationParams
    sources: dict[str, SftSource]

    def __post_init__(self) -> None:
        if not any(source.repeats for source in self.sources.values()):
            raise ParamsError("every source has repeats 0", where="sources", fix="give at least one source a repeat")

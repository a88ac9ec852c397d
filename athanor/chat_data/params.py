"""The `sft_data` section of params.yaml: how conversations become packed training rows."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param, share


@dataclass(frozen=True)
class SftSource:
    """How much of one conversation source is used."""

    max_copies: int = param(
        min=1, max=1000, default=1
    )  # identical training conversations kept; 1 removes every duplicate
    repeats: int = param(
        min=0, max=100, default=1
    )  # times each training conversation appears per epoch; 0 leaves the source out
    follow_ups: int = param(
        min=0, max=100, default=0
    )  # times, besides, that each appears as a later turn, after another conversation that was drawn
    max_supervised_tokens: int | None = param(
        min=1, default=None
    )  # of distinct training conversations, before repeats; null for all
    times_own: float | None = param(
        min=0.01, max=1000.0, default=None
    )  # its supervised tokens are at most so many times those of one's own files, repeated; null, and where there are none: no bound


@dataclass(frozen=True)
class SftFilterExceptions:
    """Sources that a filter leaves alone; each filter runs on all others.

    A filter leaves out conversations with a bad habit (docs/training.md tells
    how well it knows them): the first three in any answer, the last one in the last answer.
    """

    identity_leak: tuple[str, ...] = ()  # claims to be another assistant, or to be made by another company
    hedge_opening: tuple[str, ...] = ()  # opens with a disclaimer, doubt or apology
    refusal_opening: tuple[str, ...] = ()  # opens by declining
    cut_answer: tuple[str, ...] = ()  # ends before its end


@dataclass(frozen=True)
class SftDecontaminationParams:
    """The search for battery items, on what would be trained.

    An n-gram in more than `max_ngram_conversations` conversations, or of more than
    `max_ngram_items` items, is a template. Of items in `fact_categories` the
    answer alone is no contamination: recalling it is the exercise.
    """

    fact_categories: tuple[str, ...] = ("docstring_recall", "error_meaning", "http_status", "module_recall")
    ngram_words: int = param(min=5, max=50, default=13)  # the usual length (Brown et al. 2020)
    max_ngram_conversations: int = param(min=0, max=1_000_000, default=10)
    max_ngram_items: int = param(min=1, max=1_000_000, default=1)


@dataclass(frozen=True, kw_only=True)
class SftDataParams:
    context_tokens: int = param(min=16)  # equals the model's; a row holds one token more
    seed: int = param(min=0)
    max_source_share: float = param(min=0.01, max=1.0)  # of the supervised tokens that one source may make up
    max_pad_share: float = share(0.05)  # of all row tokens; checked above 200 rows
    max_hedge_rate: float = share(0.01)  # gate: of the answers, that open with a hedge
    replay_share: float = param(min=0.0, max=0.9)  # of the supervised tokens, that are pretraining text
    decontamination: SftDecontaminationParams = SftDecontaminationParams()
    filter_exceptions: SftFilterExceptions = SftFilterExceptions()
    # Of conversations that begin alike, the copy of the source named first stays; sources not named follow by name.
    source_priority: tuple[str, ...] = ()
    sources: dict[str, SftSource]

    def __post_init__(self) -> None:
        if not any(source.repeats for source in self.sources.values()):
            raise ParamsError("every source has repeats 0", where="sources", fix="give at least one source a repeat")
        repeated = [name for name in self.source_priority if self.source_priority.count(name) > 1]
        if repeated:
            raise ParamsError(f"'{repeated[0]}' stands there twice", where="source_priority", fix="name it once")

    def check_named(self, section: str) -> None:
        """ParamsError where another key names a source that is not one of `sources`."""
        names_by_key = {"source_priority": self.source_priority}
        names_by_key |= {f"filter_exceptions.{key}": names for key, names in vars(self.filter_exceptions).items()}
        for key, names in names_by_key.items():
            for name in names:
                if name not in self.sources:
                    fix = f"use some of: {', '.join(sorted(self.sources))}"
                    raise ParamsError(f"'{name}' is not a source", where=f"{section}.{key}", fix=fix)

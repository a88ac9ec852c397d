"""Parameters of the clean stage: rules for each kind of text, duplicates, decontamination."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.params.strict import param


@dataclass(frozen=True)
class KindRules:
    """What a document of one kind must be like to stay; null switches a rule off.

    Shares are of non-white-space characters (letters, digits, symbols), of the
    characters in lines that are not blank (lines), or of words (n-grams, stop words).
    """

    min_words: int = param(min=0, max=1_000_000)
    max_bytes: int = param(min=1_000, max=64_000_000)
    min_ascii_fraction: float | None = param(min=0.0, max=1.0)
    english_only: bool
    min_stop_word_fraction: float | None = param(min=0.0, max=1.0)
    min_letter_fraction: float | None = param(min=0.0, max=1.0)
    max_digit_fraction: float | None = param(min=0.0, max=1.0)
    max_symbol_fraction: float | None = param(min=0.0, max=1.0)
    max_mean_word_chars: float | None = param(min=1.0, max=1_000.0)
    max_line_chars: int | None = param(min=20, max=64_000_000)
    max_bullet_line_fraction: float | None = param(min=0.0, max=1.0)
    max_ellipsis_line_fraction: float | None = param(min=0.0, max=1.0)
    max_repeated_line_fraction: float | None = param(min=0.0, max=1.0)
    max_repeated_ngram_fraction: float | None = param(min=0.0, max=1.0)
    max_top_ngram_fraction: float | None = param(min=0.0, max=1.0)
    max_consecutive_repeats: int = param(min=1, max=31)  # of any n-gram; 32 and more never pass


@dataclass(frozen=True)
class RuleParams:
    web: KindRules
    prose: KindRules
    code: KindRules
    math: KindRules
    qa: KindRules


@dataclass(frozen=True)
class DedupParams:
    """`duplicate_check_documents` are drawn after deduplication and compared with all others, exhaustively."""

    near_duplicate_jaccard: float = param(min=0.5, max=1.0)
    duplicate_check_documents: int = param(min=1, max=1_000_000)
    max_duplicate_fraction: float = param(min=0.0, max=1.0)  # gate


@dataclass(frozen=True)
class DecontaminationParams:
    """Parameters of the search for battery items.

    An n-gram in more than `max_ngram_documents` documents, or of more than
    `max_ngram_items` items, is boilerplate. Of the items in `fact_categories`
    the answer alone is no contamination: the corpus is where it is learned.
    """

    ngram_words: int = param(min=5, max=50)
    max_ngram_documents: int = param(min=0, max=1_000_000)
    max_ngram_items: int = param(min=1, max=1_000_000)
    fact_categories: tuple[str, ...]


@dataclass(frozen=True)
class CleanParams:
    """Section `clean`.

    `source_priority` names sources, the best first: of duplicates across
    sources the better one stays. Sources not named follow by name.
    """

    source_priority: tuple[str, ...]
    rules: RuleParams
    dedup: DedupParams
    decontamination: DecontaminationParams

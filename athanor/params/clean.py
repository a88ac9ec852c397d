"""Parameters of the clean stage: rules and personal data for each kind of text, duplicates, decontamination."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.params.strict import param


@dataclass(frozen=True)
class KindRules:
    """What a document of one kind must be like to stay; null switches a rule off.

    Shares are of characters that are not white space (letters, digits,
    symbols, curly brackets, misread ones), of lines that are not blank (bullet,
    ellipsis, comment, short lines, sentence ends), of the characters in such
    lines (repeated lines and paragraphs), of bytes (encoded data), of words
    (n-grams, stop words, numbers) or of turns. Ratios are counts per word.
    """

    min_words: int = param(min=0, max=1_000_000)
    max_bytes: int = param(min=1_000, max=64_000_000)
    min_ascii_fraction: float | None = param(min=0.0, max=1.0)
    max_misread_fraction: float | None = param(min=0.0, max=1.0)  # U+FFFD, which stands for what could not be read
    max_encoded_fraction: float | None = param(min=0.0, max=1.0)  # base64, hexadecimal escapes
    english_only: bool
    min_stop_word_fraction: float | None = param(min=0.0, max=1.0)
    min_letter_fraction: float | None = param(min=0.0, max=1.0)
    max_digit_fraction: float | None = param(min=0.0, max=1.0)
    max_symbol_fraction: float | None = param(min=0.0, max=1.0)
    max_curly_bracket_fraction: float | None = param(min=0.0, max=1.0)
    max_number_word_fraction: float | None = param(min=0.0, max=1.0)  # words that begin with a digit
    max_hash_ellipsis_word_ratio: float | None = param(min=0.0, max=100.0)
    min_mean_word_chars: float | None = param(min=0.0, max=100.0)
    max_mean_word_chars: float | None = param(min=1.0, max=1_000.0)
    max_line_chars: int | None = param(min=20, max=64_000_000)
    max_mean_line_chars: float | None = param(min=10.0, max=1_000_000.0)
    max_bullet_line_fraction: float | None = param(min=0.0, max=1.0)
    max_ellipsis_line_fraction: float | None = param(min=0.0, max=1.0)
    max_comment_line_fraction: float | None = param(min=0.0, max=1.0)
    max_placeholder_phrases: int | None = param(min=0, max=1_000_000)  # lorem ipsum
    max_boilerplate_word_ratio: float | None = param(min=0.0, max=1.0)  # cookie banners, log-in forms, menus
    max_link_word_ratio: float | None = param(min=0.0, max=10.0)
    max_line_break_word_ratio: float | None = param(min=0.0, max=100.0)
    max_short_line_fraction: float | None = param(min=0.0, max=1.0)
    min_sentence_end_line_fraction: float | None = param(min=0.0, max=1.0)
    max_repeated_line_fraction: float | None = param(min=0.0, max=1.0)
    max_repeated_paragraph_fraction: float | None = param(min=0.0, max=1.0)
    max_top_2gram_fraction: float | None = param(min=0.0, max=1.0)
    max_top_3gram_fraction: float | None = param(min=0.0, max=1.0)
    max_top_4gram_fraction: float | None = param(min=0.0, max=1.0)
    max_repeated_5gram_fraction: float | None = param(min=0.0, max=1.0)
    max_repeated_10gram_fraction: float | None = param(min=0.0, max=1.0)
    max_consecutive_repeats: int = param(min=1, max=31)  # of any n-gram; 32 and more never pass
    min_turns: int | None = param(min=0, max=1_000_000)  # lines that begin with a speaker and a colon
    min_speakers: int | None = param(min=0, max=1_000_000)
    max_short_turn_fraction: float | None = param(min=0.0, max=1.0)  # turns of fewer than two words
    min_quality: float | None = param(min=0.0, max=1.0)
    max_toxicity: float | None = param(min=0.0, max=1.0)


@dataclass(frozen=True)
class RuleParams:
    web: KindRules
    prose: KindRules
    code: KindRules
    math: KindRules
    qa: KindRules
    dialogue: KindRules


@dataclass(frozen=True)
class PiiParams:
    """Which personal data is replaced by a placeholder in documents of one kind.

    `ip` is public addresses; `card` payment cards; `key` access keys, tokens and private keys.
    """

    email: bool
    ip: bool
    phone: bool
    card: bool
    key: bool


@dataclass(frozen=True)
class PiiKinds:
    web: PiiParams
    prose: PiiParams
    code: PiiParams
    math: PiiParams
    qa: PiiParams
    dialogue: PiiParams


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
    pii: PiiKinds
    dedup: DedupParams
    decontamination: DecontaminationParams

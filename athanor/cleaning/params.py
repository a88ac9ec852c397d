"""Parameters of the clean stage: rules and personal data for each kind of text, duplicates, decontamination."""

from __future__ import annotations

from dataclasses import dataclass, replace

from athanor.base.strict import param, share


@dataclass(frozen=True, kw_only=True)
class KindRules:
    """What a document of one kind must be like to stay. A rule that is null or left out is off.

    Shares are of characters that are not white space (letters, digits,
    symbols, curly brackets, misread ones), of lines that are not blank (bullet,
    ellipsis, comment, short lines, sentence ends), of the characters in such
    lines (repeated lines and paragraphs), of bytes (encoded data), of words
    (n-grams, stop words, numbers) or of turns. Ratios are counts per word.
    """

    min_words: int = param(min=0, max=1_000_000)
    max_bytes: int = param(min=1_000, max=64_000_000)
    min_ascii_fraction: float | None = share(None)
    max_misread_fraction: float | None = share(None)  # U+FFFD, which stands for what could not be read
    max_encoded_fraction: float | None = share(None)  # base64, hexadecimal escapes
    english_only: bool
    min_stop_word_fraction: float | None = share(None)
    min_letter_fraction: float | None = share(None)
    max_digit_fraction: float | None = share(None)
    max_symbol_fraction: float | None = share(None)
    max_curly_bracket_fraction: float | None = share(None)
    max_number_word_fraction: float | None = share(None)  # words that begin with a digit
    max_hash_ellipsis_word_ratio: float | None = param(min=0.0, max=100.0, default=None)
    min_mean_word_chars: float | None = param(min=0.0, max=100.0, default=None)
    max_mean_word_chars: float | None = param(min=1.0, max=1_000.0, default=None)
    max_line_chars: int | None = param(min=20, max=64_000_000, default=None)
    max_mean_line_chars: float | None = param(min=10.0, max=1_000_000.0, default=None)
    max_bullet_line_fraction: float | None = share(None)
    max_ellipsis_line_fraction: float | None = share(None)
    max_comment_line_fraction: float | None = share(None)
    max_placeholder_phrases: int | None = param(min=0, max=1_000_000, default=None)  # lorem ipsum
    max_boilerplate_word_ratio: float | None = share(None)  # cookie banners, log-in forms, menus
    max_link_word_ratio: float | None = param(min=0.0, max=10.0, default=None)
    max_line_break_word_ratio: float | None = param(min=0.0, max=100.0, default=None)
    max_short_line_fraction: float | None = share(None)
    min_sentence_end_line_fraction: float | None = share(None)
    max_repeated_line_fraction: float | None = share(None)
    max_repeated_paragraph_fraction: float | None = share(None)
    max_top_2gram_fraction: float | None = share(None)
    max_top_3gram_fraction: float | None = share(None)
    max_top_4gram_fraction: float | None = share(None)
    max_repeated_5gram_fraction: float | None = share(None)
    max_repeated_10gram_fraction: float | None = share(None)
    max_consecutive_repeats: int | None = param(
        min=1, max=31, default=31
    )  # of any n-gram; a lower limit hits tables and lyrics
    min_turns: int | None = param(min=0, max=1_000_000, default=None)  # lines that begin with a speaker and a colon
    min_speakers: int | None = param(min=0, max=1_000_000, default=None)
    max_short_turn_fraction: float | None = share(None)  # turns of fewer than two words
    min_quality: float | None = share(None)
    max_toxicity: float | None = share(None)


# Shares after Gopher (Rae et al. 2021) and C4 (Raffel et al. 2020), looser where a kind of text needs it. What no kind
# changes much stands here once.
_BASE = KindRules(
    min_words=10,
    max_bytes=4_000_000,
    min_ascii_fraction=0.8,
    max_misread_fraction=0.005,
    max_encoded_fraction=0.2,
    english_only=True,
    min_letter_fraction=0.3,
    max_digit_fraction=0.2,
    max_symbol_fraction=0.5,
    max_number_word_fraction=0.4,
    max_hash_ellipsis_word_ratio=0.2,
    min_mean_word_chars=2.5,
    max_mean_word_chars=10.0,
    max_line_chars=100_000,
    max_ellipsis_line_fraction=0.5,
    max_link_word_ratio=0.1,
    max_repeated_line_fraction=0.5,
    max_repeated_paragraph_fraction=0.4,
    max_top_2gram_fraction=0.35,
    max_top_3gram_fraction=0.3,
    max_top_4gram_fraction=0.3,
    max_repeated_5gram_fraction=0.3,
    max_repeated_10gram_fraction=0.2,
    min_quality=0.33,
)


@dataclass(frozen=True)
class RuleParams:
    """Thresholds for each kind of text. A file names what it wants otherwise; null switches a rule off."""

    # cookie banners, menus and link lists are most of what a web page is not
    web: KindRules = replace(
        _BASE,
        min_words=50,
        min_stop_word_fraction=0.12,
        min_letter_fraction=0.7,
        max_symbol_fraction=0.1,
        max_curly_bracket_fraction=0.02,
        max_number_word_fraction=0.2,
        max_hash_ellipsis_word_ratio=0.1,
        min_mean_word_chars=3.0,
        max_bullet_line_fraction=0.9,
        max_ellipsis_line_fraction=0.3,
        max_placeholder_phrases=0,
        max_boilerplate_word_ratio=0.03,
        max_link_word_ratio=0.05,
        max_line_break_word_ratio=0.3,
        max_short_line_fraction=0.67,
        min_sentence_end_line_fraction=0.12,
        max_repeated_line_fraction=0.2,
        max_repeated_paragraph_fraction=0.2,
        max_top_2gram_fraction=0.2,
        max_top_3gram_fraction=0.15,
        max_top_4gram_fraction=0.15,
    )
    # documentation and books repeat themselves, and hold code and tables
    prose: KindRules = replace(
        _BASE,
        min_stop_word_fraction=0.03,
        min_letter_fraction=0.5,
        max_digit_fraction=0.3,
        max_symbol_fraction=0.3,
        max_hash_ellipsis_word_ratio=0.3,
        max_mean_word_chars=12.0,
        max_bullet_line_fraction=0.95,
        max_placeholder_phrases=0,
        max_boilerplate_word_ratio=0.05,
        max_repeated_5gram_fraction=0.65,
        max_repeated_10gram_fraction=0.55,
    )
    # words, sentences and English say nothing about it; long lines are data or generated
    code: KindRules = replace(
        _BASE,
        min_ascii_fraction=0.5,
        max_misread_fraction=0.01,
        max_encoded_fraction=0.3,
        english_only=False,
        max_digit_fraction=0.4,
        max_number_word_fraction=0.5,
        max_hash_ellipsis_word_ratio=None,
        min_mean_word_chars=None,
        max_mean_word_chars=20.0,
        max_line_chars=1_000,
        max_mean_line_chars=100.0,
        max_ellipsis_line_fraction=None,
        max_comment_line_fraction=0.8,
        max_link_word_ratio=None,
        max_repeated_line_fraction=0.6,
        max_repeated_paragraph_fraction=0.5,
        max_top_2gram_fraction=0.5,
        max_top_3gram_fraction=0.4,
        max_top_4gram_fraction=0.4,
        max_repeated_5gram_fraction=0.8,
        max_repeated_10gram_fraction=0.7,
    )
    # formulas are symbols and digits in short lines
    math: KindRules = replace(
        _BASE,
        min_words=20,
        min_ascii_fraction=0.7,
        max_digit_fraction=0.5,
        max_number_word_fraction=0.6,
        min_mean_word_chars=None,
        max_mean_word_chars=15.0,
        max_repeated_5gram_fraction=0.6,
        max_repeated_10gram_fraction=0.5,
    )
    # an answer quotes its question and holds code
    qa: KindRules = replace(
        _BASE,
        min_ascii_fraction=0.7,
        min_stop_word_fraction=0.05,
        min_letter_fraction=0.4,
        max_digit_fraction=0.4,
        max_symbol_fraction=0.4,
        max_hash_ellipsis_word_ratio=0.3,
        max_mean_word_chars=15.0,
        max_boilerplate_word_ratio=0.05,
        max_link_word_ratio=0.2,
        max_repeated_line_fraction=0.4,
        max_repeated_5gram_fraction=0.5,
        max_repeated_10gram_fraction=0.4,
    )
    # speech: few symbols, and turns of two speakers
    dialogue: KindRules = replace(
        _BASE,
        min_words=20,
        min_stop_word_fraction=0.1,
        min_letter_fraction=0.6,
        max_symbol_fraction=0.2,
        max_number_word_fraction=0.3,
        max_bullet_line_fraction=0.9,
        max_placeholder_phrases=0,
        max_repeated_line_fraction=0.3,
        max_repeated_paragraph_fraction=0.3,
        max_top_2gram_fraction=0.3,
        max_top_3gram_fraction=0.2,
        max_top_4gram_fraction=0.2,
        max_repeated_5gram_fraction=0.4,
        max_repeated_10gram_fraction=0.3,
        min_turns=2,
        min_speakers=2,
        max_short_turn_fraction=0.5,
    )
    # DNA, SMILES, MIDI, chess moves, logs: what has an alphabet and an order of its own, and no words or sentences
    tokens: KindRules = KindRules(
        min_words=0, max_bytes=4_000_000, max_misread_fraction=0.005, english_only=False, max_consecutive_repeats=None
    )


@dataclass(frozen=True)
class PiiParams:
    """Which personal data is replaced by a placeholder in documents of one kind.

    `ip` is public addresses; `card` payment cards; `key` access keys, tokens and private keys.
    """

    email: bool = True
    ip: bool = True
    phone: bool = True
    card: bool = True
    key: bool = True


@dataclass(frozen=True)
class PiiKinds:
    web: PiiParams = PiiParams()
    prose: PiiParams = PiiParams()
    code: PiiParams = PiiParams()
    math: PiiParams = PiiParams()
    qa: PiiParams = PiiParams()
    dialogue: PiiParams = PiiParams()
    tokens: PiiParams = PiiParams(phone=False)  # runs of digits mean something else there


@dataclass(frozen=True)
class DedupParams:
    """`duplicate_check_documents` are drawn after deduplication and compared with all others, exhaustively."""

    near_duplicate_jaccard: float = param(min=0.5, max=1.0, default=0.8)
    duplicate_check_documents: int = param(min=1, max=1_000_000, default=500)
    max_duplicate_fraction: float = share(0.02)  # gate; a search by signature misses some


@dataclass(frozen=True)
class DecontaminationParams:
    """Parameters of the search for battery items.

    An n-gram in more than `max_ngram_documents` documents, or of more than
    `max_ngram_items` items, is boilerplate. Of the items in `fact_categories`
    the answer alone is no contamination: the corpus is where it is learned.
    """

    fact_categories: tuple[str, ...] = ("docstring_recall", "error_meaning", "http_status", "module_recall")
    ngram_words: int = param(min=5, max=50, default=13)  # the usual length (Brown et al. 2020)
    max_ngram_documents: int = param(min=0, max=1_000_000, default=10)
    max_ngram_items: int = param(min=1, max=1_000_000, default=1)


@dataclass(frozen=True)
class CleanParams:
    """Section `clean`.

    `source_priority` names sources, the best first: of duplicates across
    sources the better one stays. Sources not named follow by name.
    """

    source_priority: tuple[str, ...]
    rules: RuleParams = RuleParams()
    pii: PiiKinds = PiiKinds()
    dedup: DedupParams = DedupParams()
    decontamination: DecontaminationParams = DecontaminationParams()

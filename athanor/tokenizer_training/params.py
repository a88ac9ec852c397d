"""The `tokenizer` section of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param

VOCAB_MULTIPLE = 64
MIN_VOCABULARY = 320  # every text fills it (train.py)
# Of training, for each byte of the sample: 11 to 17 measured (docs/decisions.md), and the text itself.
MEMORY_FACTOR = 16


@dataclass(frozen=True)
class TokenizerParams:
    """How the BPE is trained. What makes it lossless is fixed in code and not a knob.

    Training takes about 16 bytes of memory for each byte of the sample, so `sample_bytes` bounds both.
    """

    vocab_size: int = param(min=MIN_VOCABULARY, max=1 << 20)  # a multiple of 64, all kinds of ids counted
    sample_bytes: int = param(
        min=1000
    )  # UTF-8 bytes of training text it is trained on at most; 16 times as much memory
    check_bytes: int = param(min=1000)  # bytes per source that the gate encodes on top of the fuzz set
    character_coverage: float = param(min=0.98, max=1.0, default=0.9999)  # rarer characters are spelled in bytes
    max_piece_chars: int = param(min=1, max=64, default=16)
    split_by_unicode_script: bool = False  # false lets a piece join letters and punctuation: shorter code

    def __post_init__(self) -> None:
        if self.vocab_size % VOCAB_MULTIPLE:
            down = self.vocab_size // VOCAB_MULTIPLE * VOCAB_MULTIPLE
            raise ParamsError(
                f"{self.vocab_size} is not a multiple of {VOCAB_MULTIPLE}",
                where="vocab_size",
                fix=f"use {down} or {down + VOCAB_MULTIPLE}",
            )

"""Train the SentencePiece BPE, and write the tokenizer artifact.

What makes the tokenizer lossless is fixed here: identity normalisation, byte
fallback, no added or removed spaces, single digits, newline and tab as ids of
their own. The model's bytes depend on text and settings alone: one thread, and
text through an iterator, because the proto records threads and input paths.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece as spm

from athanor.base.artifacts import write_json, write_manifest
from athanor.base.errors import InputError, ParamsError
from athanor.base.work import Facts
from athanor.tokenizer import chat
from athanor.tokenizer import tokenizer as tk
from athanor.tokenizer_training.params import MEMORY_FACTOR, MIN_VOCABULARY, VOCAB_MULTIPLE, TokenizerParams

# The trainer drops longer sentences without a word, so lines are cut below it:
# 4096 characters are at most 16384 bytes.
MAX_SENTENCE_BYTES = 1 << 14
LINE_CHARS = 4096

# Newline and tab are ids of their own and merge with nothing, so cutting there
# changes nothing. U+2581 and U+2585 are the trainer's own marks (it drops a line that
# holds U+2585), NUL ends a C string. The last two keep "<|" and "|>" from
# becoming pieces: then no merge of learned pieces can spell a control symbol.
_SEPARATORS = re.compile("[\n\t\0\u2581\u2585]|(?<=<)(?=\\|)|(?<=\\|)(?=>)")

# Where spaces are fewer, `character_coverage` (0.98 at least) may drop the mark that stands for them, and no space
# would come back from its ids. It is required by name then, which the model records: so not where it needs no naming.
SPACE_SHARE = 0.03
_PRINTABLE = tuple(map(chr, range(0x21, 0x7F)))


class VocabularySize(ParamsError):
    """The vocabulary does not fit the text. `fits` is the nearest size that does; `missing` ids have no piece."""

    def __init__(self, what: str, fits: int, fix: str, missing: int = 0) -> None:
        super().__init__(what, where="tokenizer.vocab_size", fix=fix)
        self.fits, self.missing = fits, missing


def check_memory(sample_bytes: int, free_bytes: int) -> int:
    """Bytes of memory that training on such a sample takes; InputError where they are not free, with the sample that fits."""
    needed = MEMORY_FACTOR * sample_bytes
    if needed > free_bytes:
        max_bytes = free_bytes // MEMORY_FACTOR
        fits = max_bytes // 10 ** max(len(str(max_bytes)) - 2, 0) * 10 ** max(len(str(max_bytes)) - 2, 0)  # two digits
        what = f"training on {sample_bytes / 1e6:,.0f} MB takes about {needed / 1e9:,.1f} GB of memory, {free_bytes / 1e9:,.1f} GB are free"
        fix = f"set it to {fits} or less, or free some memory"
        raise InputError(what, where="tokenizer.sample_bytes", fix=fix)
    return needed


def training_lines(texts: Iterable[str]) -> Iterator[str]:
    """Text as the trainer gets it: every character except separators, in lines it will not drop."""
    for text in texts:
        for line in _SEPARATORS.split(text):
            for start in range(0, len(line), LINE_CHARS):
                yield line[start : start + LINE_CHARS]


def train(texts: Sequence[str], params: TokenizerParams) -> bytes:
    """Train on `texts`; returns the model proto.

    InputError if there is no text; VocabularySize if the vocabulary does not fit it. The smallest vocabulary fits
    every text: ASCII characters take the ids that its pieces leave, those first that the text has least of.
    """
    rare_spaces = sum(text.count(" ") for text in texts) <= SPACE_SHARE * sum(map(len, texts))
    required, filler = tk.SPACE_MARK if rare_spaces else "", ""
    while True:
        try:
            return _train(texts, params, required + filler)
        except VocabularySize as error:
            if not error.missing or params.vocab_size > MIN_VOCABULARY or len(filler) == len(_PRINTABLE):
                raise
            counts = Counter("".join(texts))
            filler = "".join(sorted(_PRINTABLE, key=lambda char: counts[char])[: len(filler) + error.missing])


def _train(texts: Iterable[str], params: TokenizerParams, required: str) -> bytes:
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=training_lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=params.vocab_size,
            character_coverage=params.character_coverage,
            max_sentencepiece_length=params.max_piece_chars,
            split_by_unicode_script=params.split_by_unicode_script,
            normalization_rule_name="identity",
            byte_fallback=True,
            split_digits=True,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=MAX_SENTENCE_BYTES,
            num_threads=1,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece=tk.PAD,
            unk_piece=tk.UNK,
            bos_piece=tk.BOS,
            eos_piece=tk.EOS,
            control_symbols=[*tk.ROLE_PIECES.values(), tk.STOP],
            user_defined_symbols=[tk.NEWLINE, tk.TAB],
            minloglevel=2,
            **({"required_chars": required} if required else {}),  # an empty one changes the model's bytes
        )
    except RuntimeError as error:
        raise _explained(str(error), params.vocab_size) from None
    return model.getvalue()


def _explained(message: str, vocab_size: int) -> Exception:
    """The trainer's error in our words; its messages name the sizes that would work."""
    if match := re.search(r"too high \(\d+\)\. Please set it to a value <= (\d+)", message):
        max_size = int(match[1])
        fits = max(max_size // VOCAB_MULTIPLE * VOCAB_MULTIPLE, MIN_VOCABULARY)
        what = f"{vocab_size} is more than the text supports, which is {max_size}"
        fix = f"use {fits}{' or less' if fits > MIN_VOCABULARY else ''}, or add text"
        return VocabularySize(what, fits, fix, vocab_size - max_size)
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        fits = -(-int(match[1]) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        what = f"{vocab_size} has no room for the {match[1]} ids that every character needs"
        return VocabularySize(what, fits, f"use {fits} or more, or lower tokenizer.character_coverage")
    if "sentences_.empty()" in message:
        return InputError("no text to train on", where="tokenizer sample", fix="check data/clean and mixture.sources")
    return InputError(f"SentencePiece failed: {message}", where="tokenizer training")


def write_tokenizer(folder: Path, model: bytes, parents: dict[str, str]) -> tk.Tokenizer:
    """Write model, facts, byte lengths and manifest into a new folder; returns the loaded tokenizer."""
    tokenizer = tk.Tokenizer(model)
    facts: Facts = {
        "vocab_size": tokenizer.vocab_size,
        "control_ids": tokenizer.control_ids,
        "digest": tokenizer.digest,
        "template_version": chat.TEMPLATE_VERSION,
        "template_hash": chat.template_hash(tokenizer),
        "chat_template": chat.CHAT_TEMPLATE_JINJA,
    }
    (folder / tk.MODEL_FILE).write_bytes(model)
    np.save(folder / tk.BYTES_FILE, tokenizer.token_bytes)
    write_json(folder / tk.FACTS_FILE, facts)
    write_manifest(
        folder,
        kind=tk.KIND,
        version=tk.VERSION,
        counts={"vocab_size": tokenizer.vocab_size},
        parents=parents,
        digest=tokenizer.digest,
        template_hash=facts["template_hash"],
    )
    return tokenizer

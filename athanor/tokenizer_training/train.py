"""Train the SentencePiece BPE, and write the tokenizer artifact.

What makes the tokenizer lossless is fixed here: identity normalisation, byte
fallback, no added or removed spaces, single digits, newline and tab as ids of
their own. The model's bytes depend on text and settings alone: one thread, and
text through an iterator, because the proto records threads and input paths.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import sentencepiece as spm

from athanor.base.artifacts import write_json, write_manifest
from athanor.base.errors import InputError, ParamsError
from athanor.base.work import Facts
from athanor.tokenizer import chat
from athanor.tokenizer import tokenizer as tk
from athanor.tokenizer_training.params import MEMORY_FACTOR, VOCAB_MULTIPLE, TokenizerParams

# The trainer drops longer sentences without a word, so lines are cut below it:
# 4096 characters are at most 16384 bytes.
MAX_SENTENCE_BYTES = 1 << 14
LINE_CHARS = 4096

# Newline and tab are ids of their own and merge with nothing, so cutting there
# changes nothing. U+2581 and U+2585 are the trainer's own marks (it drops a line that
# holds U+2585), NUL ends a C string. The last two keep "<|" and "|>" from
# becoming pieces: then no merge of learned pieces can spell a control symbol.
_SEPARATORS = re.compile("[\n\t\0\u2581\u2585]|(?<=<)(?=\\|)|(?<=\\|)(?=>)")


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


def train(texts: Iterable[str], params: TokenizerParams) -> bytes:
    """Train on `texts`; returns the model proto.

    InputError if there is no text; ParamsError if the vocabulary does not fit it, with the size that would.
    """
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
        )
    except RuntimeError as error:
        raise _explained(str(error), params.vocab_size) from None
    return model.getvalue()


def _explained(message: str, vocab_size: int) -> Exception:
    """The trainer's error in our words; its messages name the sizes that would work."""
    where = "tokenizer.vocab_size"
    if match := re.search(r"too high \(\d+\)\. Please set it to a value <= (\d+)", message):
        max_size = int(match[1])
        feasible = max_size // VOCAB_MULTIPLE * VOCAB_MULTIPLE
        return ParamsError(
            f"{vocab_size} is more than the text supports, which is {max_size}",
            where=where,
            fix=f"use {feasible} or less, or add text",
        )
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        min_size = -(-int(match[1]) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        return ParamsError(
            f"{vocab_size} has no room for the {match[1]} ids that every character needs",
            where=where,
            fix=f"use {min_size} or more, or lower tokenizer.character_coverage",
        )
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

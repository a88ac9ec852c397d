"""The tokenizer for transformers: `tokenizer.json` and its configuration, from the SentencePiece model.

Written as PreTrainedTokenizerFast with its own pipeline. The Llama tokenizer
classes rebuild parts of the pipeline from their own defaults and were wrong on
80 to 100 % of test texts; the class newer versions save by default cannot be
loaded by older ones.

Spaces stand in `tokenizer.json` as spaces, not as SentencePiece's U+2581. So
no normaliser is needed, and a literal U+2581 in a text falls back to its three
bytes exactly as our own encoder writes it.
"""

from __future__ import annotations

from typing import Any

from athanor.export.source import Source
from athanor.export.vocabulary import CONTROL, SPACE, UNKNOWN, USER_DEFINED


def tokenizer_json(source: Source) -> dict[str, Any]:
    """Content of tokenizer.json."""
    vocabulary, controls = source.vocabulary, source.controls
    pieces = vocabulary.pieces
    bos = pieces[controls["bos"]].text
    added = [
        {
            "id": number,
            "content": piece.plain,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            # A newline that were special would be lost by skip_special_tokens.
            "special": piece.type != USER_DEFINED,
        }
        for number, piece in enumerate(pieces)
        if piece.type in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    text_a, text_b = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1)))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text_a],
            "pair": [first, text_a, text_b],
            "special_tokens": {bos: {"id": bos, "ids": [controls["bos"]], "tokens": [bos]}},
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": pieces[vocabulary.unk].text,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece.plain: number for number, piece in enumerate(pieces)},
            "merges": [[half.replace(SPACE, " ") for half in pair] for pair in vocabulary.merges()],
        },
    }


def tokenizer_config(source: Source) -> dict[str, Any]:
    """Content of tokenizer_config.json."""
    pieces, controls = source.vocabulary.pieces, source.controls
    text = {name: pieces[number].text for name, number in controls.items()}
    added = tokenizer_json(source)["added_tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": text["bos"],
        "eos_token": text["eos"],
        "unk_token": pieces[source.vocabulary.unk].text,
        "pad_token": text["pad"],
        "additional_special_tokens": [text[name] for name in ("system", "user", "assistant", "stop")],
        "added_tokens_decoder": {str(row["id"]): {k: v for k, v in row.items() if k != "id"} for row in added},
        "chat_template": source.template,
        "model_max_length": source.config.context_tokens,
        "padding_side": "left",
    }

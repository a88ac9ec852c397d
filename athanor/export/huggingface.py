"""The Hugging Face directory: weights, configuration, tokenizer and template, as transformers reads them.

Every key is written out, also where it equals a default: a default that is
not our value is a model that loads and is wrong (rotary base: logits off by
1.9; tied embeddings: by 2.4).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from athanor.base.artifacts import sha256_file, write_bytes, write_json, write_text
from athanor.base.errors import GateError
from athanor.export.gguf_writer import tensor_names
from athanor.export.source import Source
from athanor.export.vocabulary import CONTROL, SPACE, UNKNOWN, USER_DEFINED
from athanor.model.tensorfile import write_tensors

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FACTS_FILE = "athanor.json"


def model_config(source: Source, dtype: str) -> dict[str, Any]:
    """Content of config.json."""
    config, controls = source.config, source.controls
    values = {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": source.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.norm_eps,
        # Version 4 reads the first, version 5 the second; with neither the base is silently 10000.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        # Absent from a tied model's, it makes a random output matrix, and no error.
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": controls["bos"],
        "eos_token_id": [controls["eos"], controls["stop"]],
        "pad_token_id": controls["pad"],
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if config.qk_norm:
        values |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": config.layers}
    else:
        values |= {"mlp_bias": False, "pretraining_tp": 1}
    return values


def generation_config(source: Source) -> dict[str, Any]:
    """Content of generation_config.json: greedy, as evaluated, ending at <|stop|> or <|eos|>."""
    controls = source.controls
    return {
        "bos_token_id": controls["bos"],
        "eos_token_id": [controls["eos"], controls["stop"]],
        "pad_token_id": controls["pad"],
        "do_sample": False,
        "max_new_tokens": max(1, source.config.context_tokens // 2),
    }


def own_facts(source: Source, dtype: str) -> dict[str, Any]:
    """Content of athanor.json: what our own loader checks before it believes the directory."""
    return {
        "name": source.name,
        "model": source.config.to_dict(),
        "dtype": dtype,
        "tokenizer_digest": source.tokenizer.digest,
        "template_hash": source.template_hash,
        "control_ids": source.controls,
        "lineage": dict(source.lineage),
        "lock": dict(source.lock),
    }


def write_huggingface(folder: str | Path, source: Source, dtype: str) -> None:
    """Write the directory. Equal sources make equal bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_names(source)
    weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in source.weights.items()}
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise GateError("finite weights", f"{name} overflows {dtype}", fix="export.dtype: float32")
    write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
    write_json(folder / "config.json", model_config(source, dtype))
    write_json(folder / "generation_config.json", generation_config(source))
    # The vocabulary in id order and on one line: readable by tools, and a fifth of the size of an indented one.
    text = json.dumps(tokenizer_json(source), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_text(folder / "tokenizer.json", text + "\n")
    write_json(folder / "tokenizer_config.json", tokenizer_config(source))
    write_text(folder / "chat_template.jinja", source.template)
    write_bytes(folder / "tokenizer.model", source.vocabulary.proto)
    hashes = {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.name != FACTS_FILE}
    write_json(folder / FACTS_FILE, own_facts(source, dtype) | {"files": hashes})


def check_names(source: Source) -> None:
    """GateError for a weight that transformers would drop or invent: it only logs such names."""
    mismatched = sorted(set(tensor_names(source.config)) ^ set(source.weights))
    if mismatched:
        family = "Qwen3" if source.config.qk_norm else "Llama"
        raise GateError("mapped weights", f"transformers' {family} does not match the weights at '{mismatched[0]}'")


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
    bos_token = {"SpecialToken": {"id": bos, "type_id": 0}}
    text_a, text_b = ({"Sequence": {"id": name, "type_id": type_id}} for name, type_id in (("A", 0), ("B", 1)))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos_token, text_a],
            "pair": [bos_token, text_a, text_b],
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

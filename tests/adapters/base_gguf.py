"""The GGUF of a tiny foreign checkpoint, as llama.cpp's own converter writes it, and what llama.cpp says with an adapter."""

from __future__ import annotations

import json

import numpy as np

from athanor.export.llamacpp import asking


def write(path, base):
    """fp32, with the rows of query and key in llama.cpp's order where its rotary positions want it."""
    import re

    import gguf
    from tokenizers import Tokenizer

    from athanor.export.gguf_writer import BLOCK, Value, interleave, write_raw
    from athanor.model.tensorfile import read_tensors

    config = json.loads((base / "config.json").read_text())
    arch, heads, kv = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    tokens = json.loads((base / "tokenizer.json").read_text())
    fast = Tokenizer.from_file(str(base / "tokenizer.json"))
    special = {token["id"] for token in tokens["added_tokens"]}
    texts = [fast.id_to_token(i) or f"[unused{i}]" for i in range(config["vocab_size"])]
    u32, f32, text, many = (gguf.GGUFValueType[n] for n in ("UINT32", "FLOAT32", "STRING", "ARRAY"))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tokens["model"]["merges"]]
    sizes = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 8),
    }
    values = {
        "general.type": Value(text, "model"),
        **{f"{arch}.{name}": Value(u32, size) for name, size in sizes.items()},
        f"{arch}.attention.layer_norm_rms_epsilon": Value(f32, config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": Value(f32, 10000.0),
        "tokenizer.ggml.model": Value(text, "gpt2"),
        "tokenizer.ggml.pre": Value(text, "qwen2"),
        "tokenizer.ggml.tokens": Value(many, texts),
        "tokenizer.ggml.token_type": Value(many, [3 if i in special else 1 for i in range(len(texts))]),
        "tokenizer.ggml.merges": Value(many, merges),
        "tokenizer.ggml.eos_token_id": Value(u32, config["eos_token_id"]),
        "tokenizer.ggml.add_bos_token": Value(gguf.GGUFValueType.BOOL, False),
    }
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    arrays = {}
    for name, tensor in read_tensors(base / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        array = tensor.float().numpy()
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
        if match:
            count = {"self_attn.q_proj": heads, "self_attn.k_proj": kv}.get(match[2])
            array = interleave(array, count) if arch == "llama" and count else array
            arrays[f"blk.{match[1]}.{BLOCK[match[2]]}.{kind}"] = array
        else:
            arrays[f"{names[stem]}.{kind}"] = array
    write_raw(path, arch, values, arrays, "f32")


def ask(base, adapter, windows):
    """log P of every next id after each window, [windows, vocabulary]."""
    calls = [[[*ids, 0], 512, [len(ids)]] for ids in windows]
    lora = [adapter] if adapter else []
    rows = asking.ask(base, {"score": calls}, context_tokens=64, exact=True, threads=1, timeout_seconds=120, lora=lora)[
        "score"
    ]
    return np.array([[logprob for _, logprob in sorted(top)] for [(_, _, top)] in rows])

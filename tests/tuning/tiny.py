"""Tiny models of others with random weights, made here, and their GGUF files."""

from __future__ import annotations

import json

import gguf
import numpy as np
import torch
import transformers

from athanor.tuning import export

HEADS = 4
SIZES = {"embedding_length": 32, "block_count": 2, "feed_forward_length": 64, "context_length": 128}
SIZES |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 8)


def make_base(kind, dtype="float32"):
    """A model with random weights in `base`, without a chat template, and its GGUF file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    alphabet = sorted(byte_level.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator([export.TEXT], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained("base")
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads(kind),
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        tie_word_embeddings=kind == "gemma",
        **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), 0),
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # as large as those of trained models, or nothing in here would depend on anything
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.2) if weight.dim() > 1 or "bias" in name else weight.normal_(1.0, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained("base")
    write_gguf(model, tokenizer, kind)
    return model


def kv_heads(kind):
    return HEADS if kind == "gpt_neox" else 2


def write_gguf(model, tokenizer, kind):
    """As llama.cpp's converter writes it, by hand."""
    arch = kind.replace("_", "")
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names, writer = gguf.get_tensor_name_map(numbers[arch], 2), gguf.GGUFWriter("base/base.gguf", arch)
    for key, size in SIZES.items():
        writer.add_uint32(f"{arch}.{key}", size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv_heads(kind))
    writer.add_layer_norm_rms_eps(getattr(model.config, "rms_norm_eps", 0))
    writer.add_layer_norm_eps(getattr(model.config, "layer_norm_eps", 0))
    writer.add_parallel_residual(True)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda piece: piece[1])
    writer.add_token_list([text for text, _ in pieces])
    writer.add_token_types([3, *[1] * (len(pieces) - 1)])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_eos_token_id(0)
    for key, weight in model.named_parameters():
        array, name = weight.detach().float().numpy(), names.get_name(key, (".weight", ".bias"))
        if kind == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            array = array.reshape(-1, 8, 32)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(array.shape)
        if "attn_qkv" in name:
            heads = [np.split(head, 3) for head in np.split(array, HEADS)]
            array = np.concatenate([head[part] for part in range(3) for head in heads])
        writer.add_tensor(name, np.ascontiguousarray(array + (kind == "gemma" and "norm" in name)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

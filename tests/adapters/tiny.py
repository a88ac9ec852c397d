"""Tiny foreign checkpoints with random weights, made here: Qwen2.5-, Qwen3- and Llama-shaped, with a tokenizer of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CONTEXT = 64
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# The expression that Qwen2 and Llama 3 cut text with, but for how many digits stay together.
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = ["What is 2 + 3?", "It is 5.", "user\nassistant\nsystem\n", "Name a colour. Red, green, blue.", "    return x\n"]


def make_tokenizer(folder: Path, kind: str) -> int:
    """A byte-level BPE with the control tokens of `kind` (qwen2, qwen3: ChatML; llama: Llama 3); returns its size."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    special = LLAMA3 if kind == "llama" else CHATML
    tokenizer = Tokenizer(models.BPE())
    if kind != "llama":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|eot_id|>" if kind == "llama" else "<|im_end|>",
        "pad_token": special[0] if kind != "llama" else "<|end_of_text|>",
        "chat_template": "{{ 'another one' }}",
    }
    if kind == "llama":
        bos = special[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        values["bos_token"] = bos
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return int(tokenizer.get_vocab_size())


def make_base(folder: Path, kind: str, *, seed: int = 0, dtype: str = "float32", tied: bool | None = None) -> Path:
    """A directory as it comes from a hub; `kind` is qwen2, qwen3 or llama (which has heads for llama.cpp to permute)."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    size = make_tokenizer(folder, kind)
    classes = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    config_class, model_class = classes[kind]
    config = config_class(
        vocab_size=size + 5,  # more rows than tokens, as Qwen's have
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4 * CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=kind != "llama" if tied is None else tied,
        bos_token_id=None,
        eos_token_id=size - 1,
        pad_token_id=None,
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():  # as large as those of trained models, or nothing in here would depend on anything
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.2) if weight.dim() > 1 or "bias" in name else weight.normal_(1.0, 0.1)
    torch.set_rng_state(state)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder

"""Exports of tiny models: merged weights are the base's plus B A, llama.cpp agrees on both GGUF files, faults are caught."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch

from athanor.base.artifacts import write_json, write_manifest
from athanor.base.errors import GateError
from athanor.export.params import ExportParams
from athanor.tuning import export

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
pytest.importorskip("xllamacpp")
ALPHA, RANK, HEADS, KV = 8.0, 4, 4, {"gpt_neox": 4}
SCALARS = {"embedding_length": 32, "block_count": 2, "feed_forward_length": 64, "context_length": 128}
SCALARS |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 8)
NAMES = {  # those that two of the architectures share
    "embed_tokens|embed_in": "token_embd",
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_base(kind: str, dtype: str = "float32") -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator([export.TEXT], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.save_pretrained("base")
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV.get(kind, 2),
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        tie_word_embeddings=kind == "gemma",
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # as large as those of trained models, or nothing in here would depend on anything
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.2) if weight.dim() > 1 or "bias" in name else weight.normal_(1.0, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained("base")
    write_gguf(Path("base/base.gguf"), model, tokenizer, config)
    return model


def write_gguf(path: Path, model, tokenizer, config) -> None:
    """As llama.cpp's converter does it, by hand."""
    arch = config.model_type.replace("_", "")
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], 2)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in SCALARS.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_uint32(f"{arch}.attention.head_count", HEADS)
    writer.add_uint32(f"{arch}.attention.head_count_kv", KV.get(config.model_type, 2))
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", getattr(config, "rms_norm_eps", 0))
    writer.add_float32(f"{arch}.attention.layer_norm_epsilon", getattr(config, "layer_norm_eps", 0))
    writer.add_bool(f"{arch}.use_parallel_residual", True)
    writer.add_float32(f"{arch}.rope.freq_base", 10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_token_list(vocab)
    writer.add_token_types([3, *[1] * (len(vocab) - 1)])
    import json

    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_eos_token_id(0)
    for key, tensor in model.named_parameters():
        array, name = tensor.detach().float().numpy(), names.get_name(key, (".weight", ".bias"))
        if arch == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            array = np.concatenate([head[[0, 4, 1, 5, 2, 6, 3, 7]] for head in np.split(array, len(array) // 8)])
        if "attn_qkv" in name:
            parts = [np.split(head, 3) for head in np.split(array, HEADS)]
            array = np.concatenate([part[n] for n in range(3) for part in parts])
        if arch == "gemma" and "norm" in name:
            array = array + 1
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def train(model, method: str = "lora"):
    """What a training leaves, with random changes."""
    folder = Path("models/tune")
    if method == "lora":
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        model.name_or_path = "base"
        model = peft.get_peft_model(model, config)
    changed = [w for n, w in model.named_parameters() if method == "full" or "lora_B" in n]
    with torch.no_grad():
        for weight in changed:
            weight += torch.randn_like(weight) * 0.1
    model.save_pretrained(folder)
    recipe = {"side": {"quantise": "none"}}
    facts = {"method": method, "base": "base", "recipe": recipe}
    write_manifest(folder, kind="side", version=1, counts={"steps": 3}, parents={}, **facts)
    Path("metrics").mkdir()
    write_json("metrics/tune.json", {"before": {"val_loss": 2.0}, "after": {"val_loss": 1.0}})
    return model


def run(notes=None) -> None:
    params = ExportParams(name="tiny", dtype="float32", gguf_types=("f16",), llama_cpp="required")
    export.export(
        SimpleNamespace(params=lambda *_: params, param=lambda _: "base", metrics=lambda _: None, note=print), "tune"
    )


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma", "gpt_neox"])
def test_a_lora(kind):
    train(make_base(kind))
    run()
    out = Path("models/tune-export")
    assert sorted(os.listdir(out)) == ["MODEL_CARD.md", "adapter", "adapter.gguf", "hf", "manifest.json", "model.gguf"]

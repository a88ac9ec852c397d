"""Exports of tiny models: merged weights are the base's plus B A, llama.cpp agrees on both GGUF files, faults are caught."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from athanor.base.artifacts import write_json, write_manifest
from athanor.base.errors import GateError, InputError
from athanor.catalog.discover import discover
from athanor.cli.evaluate.job import Job, kind_of, run
from athanor.export.params import ExportParams
from athanor.tuning import export

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
pytest.importorskip("xllamacpp")
OUT, HEADS = Path("models/tune-export"), 4
SIZES = {"embedding_length": 32, "block_count": 2, "feed_forward_length": 64, "context_length": 128}
SIZES |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 8)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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


def train(model, method="lora"):
    """Leave what a training leaves, with random changes."""
    model.name_or_path = "base"
    if method == "lora":
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if method == "full" or "lora_B" in name:
                weight += torch.randn_like(weight) * 0.1
    model.save_pretrained("models/tune")
    facts = {"method": method, "base": "base", "recipe": {"side": {"quantise": "none"}}}
    write_manifest("models/tune", kind="side", version=1, counts={"steps": 3}, parents={}, **facts)
    write_json("metrics/tune.json", {"before": {"val_loss": 2.0}, "after": {"val_loss": 1.0}})


def run_export():
    params = ExportParams(name="tiny", dtype="float32", gguf_types=("f16",), llama_cpp="required")
    stage = SimpleNamespace(params=lambda *_: params, param=lambda _: "base", metrics=lambda _: None)
    export.export(stage, "tune")


@pytest.mark.parametrize(("kind", "module"), [
    ("qwen3", "model.layers.1.self_attn.q_proj"),
    ("llama", "model.layers.1.self_attn.k_proj"),
    ("gemma", "model.layers.0.mlp.up_proj"),
    ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value"),
])  # fmt: skip
def test_a_lora_is_merged_and_llama_cpp_agrees(kind, module):
    train(make_base(kind))
    run_export()
    assert (OUT / "adapter/adapter.gguf").is_file() and (OUT / "model.gguf").is_file()
    base, merged = (load_file(folder / "model.safetensors") for folder in (Path("base"), OUT / "hf"))
    factors = load_file(OUT / "adapter/adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{module}.lora_{name}.weight"] for name in "AB")
    torch.testing.assert_close(merged[f"{module}.weight"], base[f"{module}.weight"] + 2 * b @ a)
    assert "| val_loss | 2 | 1 |" in (OUT / "MODEL_CARD.md").read_text()
    assert "Assistant" in transformers.AutoTokenizer.from_pretrained(OUT / "hf").chat_template
    (served,) = discover(Path(), [str(OUT)])
    assert served.path.endswith("model.gguf") and not served.problem


@pytest.mark.parametrize("kind", ["gemma", "gpt_neox"])
def test_all_weights_in_the_type_of_the_base(kind):
    train(make_base(kind, "bfloat16").float(), "full")
    run_export()
    assert not (OUT / "adapter").exists()
    kinds = {weight.dtype for weight in load_file(OUT / "hf/model.safetensors").values()}
    assert kinds == {torch.bfloat16} and json.loads((OUT / "hf/config.json").read_text())["dtype"] == "bfloat16"


def wrong_scale(patch):
    value = export.Value
    patch.setattr(export, "Value", lambda kind, x: value(kind, x * 1.5 if isinstance(x, float) else x))


def torn(patch):
    write = export.write_raw

    def cut(path, *rest):
        write(path, *rest)
        path.write_bytes(path.read_bytes()[:-500])

    patch.setattr(export, "write_raw", cut)


FAULTS = {
    "scale": wrong_scale,
    "torn": torn,
    "rows": lambda patch: patch.setattr(export, "interleave", lambda array, heads: array),
    "unmerged": lambda patch: patch.setattr("peft.LoraModel.merge_and_unload", peft.LoraModel.unload),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_nothing(fault, monkeypatch):
    train(make_base("llama"))
    FAULTS[fault](monkeypatch)
    with pytest.raises(GateError):
        run_export()
    assert not OUT.exists()


def test_a_checkpoint_is_scored_with_its_lora():
    train(make_base("llama"))
    run_export()
    Path("set.txt").write_text(export.TEXT * 12)

    def loss(model):
        (row,) = run(Job(str(model), kind_of(model), "", "set.txt", "none"))
        return row["loss"]

    scored = loss("models/tune")
    assert abs(scored - loss(OUT / "model.gguf")) < 1e-3 < abs(scored - loss("base/base.gguf"))
    Path("base/base.gguf").unlink()
    with pytest.raises(InputError, match="no GGUF"):
        loss("models/tune")

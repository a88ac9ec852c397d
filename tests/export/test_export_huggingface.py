from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from athanor.base.errors import GateError, InputError
from athanor.export.huggingface import write_huggingface
from athanor.export.source import load_source, make_source
from athanor.model.weights import load_model, save_model


def test_directory_is_complete(case, tmp_path):
    write_huggingface(tmp_path, case.source, "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "athanor.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]


def test_config_states_everything(case, tmp_path):
    write_huggingface(tmp_path, case.source, "bfloat16")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM" if case.source.config.qk_norm else "LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is case.source.config.tied_embeddings
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    tokenizer = case.source.tokenizer
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.eos, tokenizer.stop] and generation["do_sample"] is False
    own = json.loads((tmp_path / "athanor.json").read_text())
    assert own["tokenizer_digest"] == tokenizer.digest and own["template_hash"] == case.source.template_hash
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(case.source.weights)
        assert file.get_tensor("model.norm.weight").dtype == torch.bfloat16


def test_weight_that_transformers_would_drop_is_refused(llama, tmp_path):
    weights = {**llama.source.weights, "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    with pytest.raises(GateError, match="q_norm"):
        write_huggingface(tmp_path, replace(llama.source, weights=weights), "float32")


def test_weight_that_overflows_the_dtype_is_refused(llama, tmp_path):
    weights = {**llama.source.weights, "model.norm.weight": torch.full((64,), 1e6)}
    with pytest.raises(GateError, match="overflows float16"):
        write_huggingface(tmp_path, replace(llama.source, weights=weights), "float16")


def test_model_of_another_tokenizer_or_template_is_refused(llama, tmp_path):
    model, facts = load_model(llama.model_dir)
    for key, what in (("tokenizer_digest", "tokenizer"), ("template_hash", "chat template")):
        save_model(tmp_path / key, model, model.config, {**facts, key: "another"})
        with pytest.raises(InputError, match=f"another {what}"):
            load_source(tmp_path / key, llama.tokenizer_dir, "tiny", {})


def test_rows_without_a_token_are_refused(llama):
    model, _ = load_model(llama.model_dir)
    model.config = replace(model.config, vocab_size=model.config.vocab_size + 64)
    with pytest.raises(GateError, match="embedding rows"):
        make_source("tiny", model, llama.source.tokenizer, llama.source.vocabulary, {})


def test_weights_that_are_not_numbers_are_refused(llama):
    model, _ = load_model(llama.model_dir)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(GateError, match="model.norm.weight"):
        make_source("tiny", model, llama.source.tokenizer, llama.source.vocabulary, {})

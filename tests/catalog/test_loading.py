"""The directory of an export, read with our own reader."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from athanor.base.errors import InputError
from athanor.catalog.loading import load_export
from tests.catalog.models_tiny import write_export
from tests.evaluation.tiny import make_model, write_tiny_tokenizer


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    tokenizer = write_tiny_tokenizer(folder / "tokenizer")
    return write_export(folder / "export", make_model(tokenizer), tokenizer, folder / "tokenizer") / "hf"


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Qwen2ForCausalLM"]},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"hidden_act": "gelu"},
        {"num_hidden_layers": 3},
        {"head_dim": None},
    ],
)
def test_a_config_that_is_not_ours_is_refused(exported, tmp_path, change):
    shutil.copytree(exported, tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(InputError):
        load_export(tmp_path / "hf")


def test_what_is_no_export_says_how_to_make_one(tmp_path):
    with pytest.raises(InputError, match="make repro"):
        load_export("nothing/here")
    with pytest.raises(InputError, match="athanor.json"):
        load_export(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(InputError, match="athanor serve take GGUF files"):
        load_export(tmp_path / "model.gguf")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_export_computes_what_the_model_did(tmp_path, qk_norm, tied):
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer")
    model = make_model(tokenizer, qk_norm=qk_norm, tied=tied)
    loaded, again = load_export(write_export(tmp_path / "export", model, tokenizer, tmp_path / "tokenizer") / "hf")
    ids = torch.tensor([[tokenizer.bos, *tokenizer.encode("Some text to read.")]])
    assert again.digest == tokenizer.digest and loaded.config == model.config
    assert torch.equal(loaded(ids), model(ids))

"""Cross-field rules of the model, pretrain and sft sections."""

from __future__ import annotations

from pathlib import Path

import pytest

from athanor.base.errors import ParamsError
from athanor.base.strict import build, read_yaml
from athanor.training.model_params import ModelParams
from athanor.training.pretrain_params import PretrainParams
from athanor.training.sft_params import SftParams

VALUES = read_yaml(Path(__file__).resolve().parents[2] / "params.yaml")
SCHEMAS = {"model": ModelParams, "pretrain": PretrainParams, "sft": SftParams}


def made(section, **changes):
    return build(SCHEMAS[section], {**VALUES[section], **changes}, section)


@pytest.mark.parametrize(
    ("section", "changes", "where"),
    [
        ("model", {"heads": 5, "qk_norm": False}, "model.head_dim"),
        ("model", {"kv_heads": 4, "heads": 6, "qk_norm": True}, "model.kv_heads"),
        ("model", {"context_tokens": 4096, "rope_theta": 10000.0}, "model.rope_theta"),
        ("model", {"layers": 0}, "model.layers"),
        ("pretrain", {"tokens": 100, "batch_tokens": 256}, "pretrain.tokens"),
        ("pretrain", {"tokens": 10000, "batch_tokens": 256, "warmup_tokens": 9000}, "pretrain.warmup_tokens"),
        ("pretrain", {"sample_prompts": ["a", ""]}, "pretrain.sample_prompts"),
        ("pretrain", {"precision": "fp8"}, "pretrain.precision"),
        ("pretrain", {"leraning_rate": 1}, "pretrain.leraning_rate"),
        ("sft", {"schedule": "wsd", "warmup_fraction": 0.6, "cooldown_fraction": 0.5}, "sft.cooldown_fraction"),
        ("sft", {"epochs": 0.0}, "sft.epochs"),
    ],
)
def test_contradictions_name_their_key(section, changes, where):
    with pytest.raises(ParamsError) as error:
        made(section, **changes)
    assert str(error.value).startswith(f"{where}:")


def test_head_width_is_free_with_qk_norm():
    assert made("model", heads=4, kv_heads=2, head_dim=64, qk_norm=True).config(512).head_dim == 64


def test_embeddings_are_tied_unless_asked_otherwise():
    values = {name: value for name, value in VALUES["model"].items() if name != "tied_embeddings"}
    assert build(ModelParams, values, "model").config(512).tied_embeddings
    assert not made("model", tied_embeddings=False).config(512).tied_embeddings


def test_vocabulary_size_comes_from_the_tokenizer():
    assert made("model", vocab_size=None).config(4096).vocab_size == 4096
    with pytest.raises(ParamsError, match=r"model.vocab_size: 32000 asked for, the tokenizer has 4096"):
        made("model", vocab_size=32000).config(4096)

"""Shapes and exact parameter counts."""

from __future__ import annotations

import dataclasses

import pytest

from athanor.base.errors import ParamsError
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from tests.training import micro

SMALL = micro.CONFIG
SIZES = {
    235_705_344: ModelConfig(32000, 18, 1024, 16, 4, 64, 2816, 1024, 1e4, 1e-6, False),
    521_570_560: ModelConfig(48000, 26, 1280, 20, 4, 64, 3584, 1024, 1e4, 1e-6, False),
    756_442_112: ModelConfig(48000, 28, 1536, 24, 4, 64, 4096, 2048, 1e5, 1e-6, True),
}


@pytest.mark.parametrize("count", SIZES)
def test_reference_sizes_are_exact(count):
    assert SIZES[count].parameter_count() == count


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_count_is_the_sum_over_parameters(qk_norm, tied):
    config = dataclasses.replace(SMALL, qk_norm=qk_norm, ffn_dim=40, vocab_size=100, tied_embeddings=tied)
    assert sum(weight.numel() for weight in Transformer(config).parameters()) == config.parameter_count()


def test_dict_round_trip_and_strictness():
    for config in (SMALL, dataclasses.replace(SMALL, tied_embeddings=False)):
        assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ParamsError, match="dropout"):
        ModelConfig.from_dict({**SMALL.to_dict(), "dropout": 0.1})
    with pytest.raises(ParamsError, match="dim"):
        ModelConfig.from_dict({k: v for k, v in SMALL.to_dict().items() if k != "dim"})


def test_a_config_from_before_there_was_a_choice_is_tied():
    older = {name: value for name, value in SMALL.to_dict().items() if name != "tied_embeddings"}
    assert ModelConfig.from_dict(older) == SMALL and SMALL.tied_embeddings


@pytest.mark.parametrize(
    ("change", "where"), [({"kv_heads": 3}, "kv_heads"), ({"head_dim": 5}, "head_dim"), ({"layers": 0}, "layers")]
)
def test_impossible_shapes_are_refused(change, where):
    with pytest.raises(ParamsError, match=where):
        dataclasses.replace(SMALL, **change)

"""Advice on widths and proportions; the presets need none. Below 2 s."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from athanor.hardware.shape import advice
from athanor.model.config import ModelConfig
from athanor.runtime import presets
from athanor.runtime.schema import check_values

SOUND = ModelConfig(32000, 18, 1024, 16, 4, 64, 2816, 1024, 1e4, 1e-6, False)
PRESETS = sorted((Path(__file__).parents[2] / "presets").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_need_none_where_they_are_meant_to_run(preset):
    built = check_values(presets.values(preset))
    config = built["model"].config(built["model"].vocab_size or built["tokenizer"].vocab_size)
    assert advice(config, "cuda" if preset.stem.startswith("plasma") else "cpu") == []


@pytest.mark.parametrize(
    ("change", "device", "words"),
    [
        ({"vocab_size": 50257}, "cpu", "50304 costs nothing"),
        ({"dim": 1000}, "cuda", "dim 1000 is no multiple of 64 (cuda): 960 or 1024"),
        ({"ffn_dim": 2730}, "cuda", "ffn_dim 2730 is no multiple of 64 (cuda): 2688 or 2752"),
        ({"head_dim": 80}, "cuda", "head_dim 80 is slow in fused attention (cuda): 64 or 128"),
        ({"ffn_dim": 1024}, "cuda", "8/3 is usual for a gated MLP: 2752"),
        ({"ffn_dim": 8192}, "cpu", "ffn_dim is 8 times dim"),
        ({"context_tokens": 100_000, "rope_theta": 1e6}, "cuda", "below 7.8e+06"),
    ],
)
def test_each_sentence(change, device, words):
    assert advice(SOUND, device) == []
    (told,) = advice(dataclasses.replace(SOUND, **change), device)
    assert words in told


def test_a_processor_is_less_particular():
    odd = dataclasses.replace(SOUND, dim=1008, head_dim=80)
    assert advice(odd, "cpu") == [] and len(advice(odd, "cuda")) == 2

"""Sizes of three presets on nine cards: the same on every host, and near the account by hand of docs/machine.md. 5 s."""

from __future__ import annotations

from pathlib import Path

import pytest

from athanor.base import host
from athanor.hardware.policy import AUTO, Record, Requested, footprint, resolve
from athanor.model.config import ModelConfig
from athanor.model.cross_entropy import CHUNK_LOGITS
from athanor.model.gpu_family import Architecture, amd, nvidia
from athanor.model.rounded import forced
from athanor.runtime import presets
from athanor.runtime.schema import check_values
from athanor.training.activations import LOGIT_BYTES, trace_activations
from athanor.training.memory import StepFootprint

GIB = 2**30
CARDS = {  # GiB that may be used
    "MI50 16": (amd("gfx906"), 16),
    "MI50 32": (amd("gfx906"), 32),
    "RTX 3060": (nvidia((8, 6)), 12),
    "RTX 4070": (nvidia((8, 9)), 12),
    "RTX 4090": (nvidia((8, 9)), 24),
    "A100": (nvidia((8, 0)), 40),
    "H100": (nvidia((9, 0)), 80),
    "H200": (nvidia((9, 0)), 141),
    "Strix Halo": (amd("gfx1151"), 0.8 * 128),
}


def asked(preset: str, chip: Architecture) -> tuple[ModelConfig, Requested]:
    built = check_values(presets.values(Path("presets", f"{preset}.yaml")))
    pretrain, config = built["pretrain"], built["model"].config(built["tokenizer"].vocab_size)
    tokens = pretrain.batch_tokens
    return config, Requested(chip.native[0], AUTO, AUTO, AUTO, 0, tokens, 1000, optimizer=pretrain.optimizer)


def sized(preset: str, card: str) -> tuple[ModelConfig, StepFootprint, Record]:
    chip, gib = CARDS[card]
    config, requested = asked(preset, chip)
    record = resolve(requested, chip, config, None, int(gib * GIB))
    return config, footprint(config, record.choices, requested, chip), record


def by_hand(config: ModelConfig, load: StepFootprint) -> float:
    """The formulas of docs/machine.md, in bytes."""
    D, F, V, H = config.dim, config.ffn_dim, config.vocab_size, config.heads
    A, K, T, tokens = H * config.head_dim, config.kv_heads * config.head_dim, load.row_tokens, load.micro_batch_tokens
    weights, matrices = config.parameter_count(), config.layers * (2 * D * (A + K) + 3 * D * F)
    stream = 4 if load.precision != "bf16" else 2  # bytes of the residual
    layer = (14 + 3 * stream) * D + 8 * A + 8 * F + (6 * (A + K) if config.qk_norm else 0)
    layer += 4 * H * T + 6 * A if load.math_attention else 2 * T
    blocks = config.layers * tokens * (stream * D if load.checkpointing else layer) + 2 * matrices
    blocks += tokens * layer if load.checkpointing else 0
    logits = LOGIT_BYTES * min(tokens * V, CHUNK_LOGITS) + 8 * V * D + 10 * tokens * D
    moments = 8 * weights - (4 * matrices if load.optimizer == "muon" else 0)
    gradients = 4 * weights if load.accumulates else 0
    return 4 * weights + moments + 1.05 * (gradients + blocks + 8 * tokens * D + logits)


@pytest.mark.parametrize("preset", ["plasma-1.1", "one-gpu-hour", "default"])
def test_sizes_are_those_of_the_account_by_hand_on_every_host(preset, monkeypatch):
    found = {}
    for amx in (False, True):
        monkeypatch.setattr(host, "cpuinfo", lambda *names, amx=amx: "avx2 amx_bf16 avx512_bf16" if amx else "sse2")
        trace_activations.cache_clear()
        with forced(amx):
            found[amx] = {card: sized(preset, card) for card in CARDS}
    assert found[False] == found[True]
    for config, load, record in found[False].values():
        assert record.needed_bytes == pytest.approx(by_hand(config, load), rel=0.1)
    if preset == "plasma-1.1":
        rows = {card: (load.micro_batch_rows, load.checkpointing) for card, (_, load, _) in found[False].items()}
        assert rows["RTX 4090"] == (4, False) and rows["RTX 3060"] == (1, False) and rows["H100"] == (16, False)

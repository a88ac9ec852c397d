"""The one count of operations, against torch's counter and against the mask itself. About 2 s."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from athanor.model import kernels, loss, transformer
from athanor.model.config import ModelConfig
from athanor.model.flops import allowed_pairs, forward_flops, pass_flops, run_flops, training_flops
from athanor.model.loss import targets, token_losses
from athanor.model.transformer import Transformer, block_mask
from tests.training import micro

SHAPES = {
    "grouped": micro.CONFIG,
    "whole heads": ModelConfig(256, 3, 48, 3, 3, 16, 128, 64, 1e4, 1e-6, False),
    "an output matrix of its own": dataclasses.replace(micro.CONFIG, tied_embeddings=False),
    "wide heads, query norm": ModelConfig(512, 1, 32, 2, 1, 64, 96, 128, 1e4, 1e-6, True),
}


def counted(work):
    """What torch's counter sees of the plain arithmetic; for the fused attention of a CPU it has no formula."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), pytest.MonkeyPatch.context() as patch:
        for module in (kernels, loss, transformer):
            patch.setattr(module, "use_cpu_kernel", lambda x: False)
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", SHAPES)
def test_forward_and_training_agree_with_torch(name):
    """The counter is blind to masks, so it is compared with all pairs allowed; what causality spares it cannot see."""
    config = SHAPES[name]
    T = config.context_tokens
    model = Transformer.fresh(config, 0)
    ids_BS = np.random.default_rng(0).integers(0, config.vocab_size, (2, T + 1))
    batch = targets(ids_BS, np.zeros_like(ids_BS), None, document_mask=True)
    with torch.no_grad():
        forward = counted(lambda: model(batch.ids_BT))
    assert forward == pytest.approx(2 * T * forward_flops(config, T, causal=False), rel=0.01)
    both = counted(lambda: token_losses(model, batch).sum().backward())
    assert both == pytest.approx(2 * T * training_flops(config, T, causal=False), rel=0.01)
    assert both == pytest.approx(run_flops(config, 2 * T, 2 * T * T, 2 * T), rel=0.01)


def test_only_supervised_positions_reach_the_head():
    config = dataclasses.replace(SHAPES["whole heads"], vocab_size=1024)
    ids_BS = np.random.default_rng(0).integers(0, config.vocab_size, (2, 65))
    mask_BS = (np.arange(65) % 3 == 0).astype(np.uint8)[None].repeat(2, 0)
    batch = targets(ids_BS, np.zeros_like(ids_BS), mask_BS, document_mask=True)
    model = Transformer.fresh(config, 0)
    seen = counted(lambda: token_losses(model, batch).sum().backward())
    assert seen == pytest.approx(run_flops(config, 128, 2 * 64 * 64, len(batch.where_N)), rel=0.01)
    assert seen < 0.95 * run_flops(config, 128, 2 * 64 * 64, 128)  # so the test can fail


def test_pairs_are_those_of_the_mask():
    draw = np.random.default_rng(0)
    for _ in range(20):
        document_BT = draw.integers(-1, 4, (3, 24))
        if draw.random() < 0.7:
            document_BT.sort(axis=1)
        allowed = int(block_mask(torch.from_numpy(document_BT)).sum())
        assert allowed_pairs(document_BT, document_mask=True) == allowed
        assert allowed_pairs(document_BT, document_mask=False) == 3 * 24 * 25 // 2
    assert allowed_pairs(np.repeat([0, 1, 2, 3], 8)[None], document_mask=True) == 4 * 8 * 9 // 2


def test_whole_rows_are_a_special_case():
    config = SHAPES["grouped"]
    pairs = allowed_pairs(np.zeros((3, 16)), document_mask=True)
    assert run_flops(config, 48, pairs, 48) == pytest.approx(48 * training_flops(config, 16))
    assert forward_flops(config, 16) < forward_flops(config, 16, causal=False)
    assert pass_flops(config, 48, pairs, 0) == pytest.approx(
        48 * forward_flops(config, 16) - 2 * 48 * config.vocab_size * config.dim
    )

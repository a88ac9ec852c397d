"""What the card says about rounding: the divergence's formula, its positions and its digits."""

from __future__ import annotations

import math

import pytest
import torch

from athanor.export.huggingface import write_huggingface
from athanor.export.parity import Divergence, Limits, check_transformers, expect, prefix_lengths, rebuilt


def test_divergence_is_the_sum_over_all_ids():
    model, file = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.6, 0.3]]), torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.6, 0.3]])
    apart = Divergence()
    apart.add(model.log(), file.log())
    first = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert apart.nats == pytest.approx([first, 0.0], abs=1e-7)
    assert apart.facts() == {"positions": 2, "kl_mean": 0.087, "kl_max": 0.17, "same_best": 0.5}


def test_a_common_error_of_all_logarithms_is_no_divergence():
    """llama.cpp's fp32 sum is off by 1e-5; that is not a difference between two distributions."""
    logprobs = torch.randn(4, 600, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    apart = Divergence()
    apart.add(logprobs, logprobs - 1e-4)
    assert apart.facts() == {"positions": 4, "kl_mean": 0.0, "kl_max": 0.0, "same_best": 1.0}


def test_positions_are_spread_to_the_end():
    assert prefix_lengths(95, 1) == [95] and prefix_lengths(96, 4) == [24, 48, 72, 96]
    assert prefix_lengths(3, 16) == [1, 2, 3]
    assert len(set(prefix_lengths(255, 12))) == 12 and prefix_lengths(255, 12)[-1] == 255


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float32", 0, 0), ("float16", 0, 1e-4), ("bfloat16", 1e-6, 1e-2)]
)
def test_each_dtype_is_compared_with_the_unrounded_weights(dtype, least, most, case, tmp_path):
    write_huggingface(tmp_path, case.source, dtype)
    stored = expect(case.source, rebuilt(case.source, dtype), case.probe, 4)
    limits = Limits(1e-4, 0.1)
    facts = check_transformers(tmp_path, case.probe, stored, limits, case.expected.logits)
    assert facts["positions"] == sum(len(ids) for ids in case.probe.windows) > 300
    assert least <= facts["kl_mean"] <= most and facts["same_best"] > 0.98

"""The ranges of numbers in each block against values worked out by hand; reading them changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from athanor.model.precision import autocast
from athanor.training.meter import Meter
from athanor.training.number_range import GRADIENT_ROWS, BlockRange, Frame, gradient_range
from athanor.training.vitals import FRAMES, WIDE_EVERY, Vitals
from tests.training import micro

CPU = torch.device("cpu")
IDS = torch.arange(16)[None] % 23


@torch.no_grad()
def test_the_largest_number_of_a_block_is_that_of_its_products():
    """The factor of the last product as well: it can be infinite before any result of a matrix is."""
    model = micro.make_model()
    model.model.layers[0].mlp.up_proj.weight *= 3e4
    model.model.layers[0].mlp.down_proj.weight *= 1e-4
    block = model.model.layers[0]
    with BlockRange(model.model.layers, "fp16") as ranges, autocast("fp16", CPU):
        model.hidden(IDS)
    largest, tiny = ranges.numbers()[:, 0].tolist(), ranges.numbers()[:, 1].tolist()
    x = model.model.embed_tokens(IDS)
    table = model.rotary[:16]
    with autocast("fp16", CPU):
        h = block.post_attention_layernorm(x + block.self_attn(block.input_layernorm(x), table, None, None))
        up, gate = block.mlp.up_proj(h), block.mlp.gate_proj(h)
        product = torch.nn.functional.silu(gate) * up
    assert product.dtype == torch.float16
    assert largest[0] == max(float(part.abs().max()) for part in (up, gate, product)) > 100 > largest[1]
    assert 0 <= max(tiny) < 0.05
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_what_is_below_the_format_counts_as_tiny():
    model = micro.make_model()
    model.model.embed_tokens.weight[:] = 1e-6  # subnormal in fp16, normal in fp32
    for block in model.model.layers:
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    for precision, share in (("fp16", 1.0), ("fp32", 0.0)):
        with BlockRange(model.model.layers, precision) as ranges:
            model.hidden(IDS)
        assert ranges.numbers()[:, 1].tolist() == [share, share]


def test_gradients_are_judged_as_backward_made_them():
    """A loss scale of 1024, and a clipping to a half: what is 1e-6 now was 2e-3, and a zero is a zero."""
    model = micro.make_model()
    assert gradient_range(model.model.layers, "fp16", 1.0) is None
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 1e-6)
    lost = model.model.layers[1].mlp.up_proj.weight
    lost.grad[:GRADIENT_ROWS] = 0.0
    factor = 0.5 / 1024
    rows = [w.grad[:GRADIENT_ROWS].numel() for w in model.model.layers[1].parameters() if w.dim() == 2]
    first, second = gradient_range(model.model.layers, "fp16", factor).tolist()
    assert first == pytest.approx([2.048e-3, 0.0])
    assert second == pytest.approx([2.048e-3, GRADIENT_ROWS * lost.shape[1] / sum(rows)])
    assert gradient_range(model.model.layers, "fp16", 1.0)[0].tolist() == pytest.approx([1e-6, 1.0])
    assert gradient_range(model.model.layers, "fp16", math.nan)[0, 1] == 0.0  # a step whose gradient was not finite


def test_readings_come_at_each_reading_of_fp16_and_more_rarely_elsewhere():
    tokens = np.arange(34).reshape(2, 17) % 23
    for precision, count in (("fp16", 12), ("fp32", 12 // WIDE_EVERY)):
        model = micro.make_model()
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        vitals = Vitals(model, Meter(CPU), precision, 160)
        told = [vitals.read(step, tokens) for step in range(10, 121, 10)]
        assert sum("vitals.largest" in row for row in told) == count
        assert [frame.step for frame in vitals.frames][-1] == 120 and len(vitals.frames) == min(FRAMES, count)
        assert told[-1]["vitals.gradient_tiny"] == 0.0 and 0 < told[-1]["vitals.largest"] < 10


def test_the_block_at_the_edge_speaks_for_all_and_what_is_no_number_comes_first():
    frame = Frame(7, [1.0, 9.0, 3.0], [0.0] * 3, [1.0] * 3, [0.25, 0.0, 0.5])
    assert frame.summary() == {"largest": 9.0, "largest_block": 1.0, "gradient_tiny": 0.5, "gradient_tiny_block": 2.0}
    broken = frame._replace(largest=[1.0, math.inf, math.nan]).summary()
    assert math.isnan(broken["largest"]) and broken["largest_block"] == 2.0

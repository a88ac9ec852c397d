"""The parts of a step's memory add up to what a training is refused by, and shrink where devices share them."""

from __future__ import annotations

import dataclasses

import pytest

from athanor.sizing.memory import cpu_parts, parts
from athanor.sizing.shapes import LADDER
from athanor.training.memory import StepFootprint, training_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", LADDER[1:4:2])
def test_parts_add_up_to_the_estimate_of_a_training(shape, precision):
    config = shape.config(4096, 256)
    footprint = StepFootprint(2, 256, precision, replicas=4, parallel=2, accumulates=False, optimizer="muon")
    found = cpu_parts(config, footprint)
    assert found.total - found.runtime == pytest.approx(training_bytes(config, footprint), rel=0.3)
    assert found.weights == 4 * config.parameter_count()


def test_shards_of_a_model_are_smaller_and_activations_are_not():
    config, footprint = LADDER[1].config(4096, 256), StepFootprint(4, 256, "fp16", optimizer="muon")
    one, four = parts(config, footprint), parts(config, footprint, 4)
    for name in ("weights", "gradients", "moments"):
        assert getattr(four, name) == getattr(one, name) / 4
    assert four.activations == one.activations and four.total < one.total
    again = parts(config, dataclasses.replace(footprint, checkpointing=True))
    assert again.activations < 0.7 * one.activations

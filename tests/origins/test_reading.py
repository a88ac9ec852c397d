"""The steps that read a window, beside what the real samplers hand to each step."""

from __future__ import annotations

from collections import defaultdict

import pytest

from athanor.data.sampler import PretrainSampler, SftSampler
from athanor.origins.reading import Reading
from athanor.training.skipped_ranges import entry, skipped_before
from tests.data.conftest import sft_folder, shard_documents, shard_folder  # noqa: F401

CONTEXT, BATCH = 31, 124
SKIPPED = [entry(9, 5, 496, 744, "spike"), entry(9, 4, 372, 620, "spike"), entry(40, 33, 4340, 4464, "spike")]


def steps_of_samples(sampler, begin: int, end: int, ranges) -> dict[int, list[int]]:
    found = defaultdict(set)
    for position in range(begin, end, BATCH):
        for sample in sampler.sample_numbers(position - begin + skipped_before(ranges, position), BATCH):
            found[sample].add(position // BATCH + 1)
    return {sample: sorted(steps) for sample, steps in found.items()}


@pytest.mark.parametrize("ranges", [[], SKIPPED])
@pytest.mark.parametrize(("begin", "steps"), [(0, 50), (0, 3), (10, 40)])
def test_a_window_is_read_at_the_steps_in_which_the_sampler_gives_it(shard_folder, ranges, begin, steps) -> None:  # noqa: F811
    sampler = PretrainSampler(shard_folder, CONTEXT, seed=3)
    begin, end = begin * BATCH, (begin + steps) * BATCH
    told = steps_of_samples(sampler, begin, end, ranges)
    reading = Reading(sampler.samples, CONTEXT, 3, BATCH, end, begin, ranges)
    assert {sample: reading.steps([sample]) for sample in range(sampler.samples) if reading.steps([sample])} == told
    assert reading.steps([-1, sampler.samples]) == []  # before the stream, and in its tail


def test_a_row_of_conversations_is_read_at_its_steps(sft_folder) -> None:  # noqa: F811
    sampler = SftSampler(sft_folder, CONTEXT, seed=5)
    told = steps_of_samples(sampler, 0, 12 * BATCH, [])
    reading = Reading(sampler.samples, CONTEXT, 5, BATCH, 12 * BATCH)
    assert {sample: reading.steps([sample]) for sample in range(sampler.samples)} == told

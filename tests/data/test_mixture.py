from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from athanor.base.errors import InputError, ParamsError
from athanor.data.mixture import MixSource, mix_sources, plan_mixture, weights
from athanor.sharding.shard_gate import SLACK_DOCUMENTS


def source(name: str, lengths: list[int], share: float = 1.0, max_epochs: float = 1.0) -> MixSource:
    return MixSource(name, np.array(lengths, dtype=np.int64), share, max_epochs)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.floats(0.01, 10), st.floats(0.5, 4)),
        min_size=1,
        max_size=6,
    ),
    st.none() | st.integers(1, 20_000),
)
def test_shares_hold_in_every_prefix_and_caps_are_kept(rows, target):
    sources = [source(f"s{i}", lengths, share, epochs) for i, (lengths, share, epochs) in enumerate(rows)]
    plan = plan_mixture(sources, target, seed=1)
    longest = max(int(s.lengths.max()) for s in sources)
    weight = weights(sources)
    taken, total = [0] * len(sources), 0
    for number, document in zip(plan.sources.tolist(), plan.documents.tolist(), strict=True):
        length = int(sources[number].lengths[document])
        taken[number] += length
        total += length
        for w, t in zip(weight, taken, strict=True):
            assert abs(t - total * w / sum(weight)) <= SLACK_DOCUMENTS * longest
    assert tuple(taken) == plan.taken
    assert all(t <= s.cap for t, s in zip(taken, sources, strict=True))
    assert plan.total <= min(plan.allowed, target or plan.allowed) + longest


def test_every_document_comes_once_per_epoch_in_another_order_each_time():
    plan = plan_mixture([source("a", [10] * 50, max_epochs=3)], None, seed=1)
    epochs = plan.documents.reshape(3, 50)
    assert all(sorted(epoch.tolist()) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3


def test_the_scarce_source_limits_the_whole_and_is_named():
    plan = plan_mixture([source("big", [10] * 1000, 0.5), source("small", [10] * 20, 0.5, 2.0)], None, seed=1)
    assert (plan.allowed, plan.limited_by) == (800, "small")
    assert plan.taken == (400, 400)


def test_adding_a_source_leaves_the_order_of_the_others_alone():
    alone = plan_mixture([source("a", [5] * 40)], None, seed=3).documents.tolist()
    both = plan_mixture([source("a", [5] * 40), source("b", [5] * 40)], None, seed=3)
    assert both.documents[both.sources == 0].tolist() == alone
    assert plan_mixture([source("a", [5] * 40)], None, seed=4).documents.tolist() != alone


def test_a_source_without_text_is_an_error_and_not_a_smaller_mixture():
    with pytest.raises(InputError, match="mixture source 'b'"):
        plan_mixture([source("a", [5]), source("b", [])], None, seed=1)


@dataclass(frozen=True)
class Share:
    share: float
    max_epochs: float = 1.0


def test_sources_of_data_and_params_must_be_the_same():
    shares = {"a": Share(2.0), "off": Share(0.0), "b": Share(1.0)}
    made = mix_sources(shares, {"b": [1, 2], "a": [3], "off": [9]})
    assert [s.name for s in made] == ["a", "b"]
    assert weights(made) == [666_666_667, 333_333_333]
    with pytest.raises(ParamsError, match="'new' has documents but no share"):
        mix_sources(shares, {"new": [1]})
    with pytest.raises(InputError, match="mixture source 'b': no training text"):
        mix_sources(shares, {"a": [3]})


def test_a_plan_is_fixed_for_ever():
    # A cached mixture is this plan: a change here silently changes what a seed means.
    shares = {"a": (7, 0.5), "b": (31, 0.3), "c": (5, 0.2)}
    sources = [source(name, (np.arange(1, 120) * k % 97 + 1).tolist(), s, 2.5) for name, (k, s) in shares.items()]
    plan = plan_mixture(sources, None, seed=3)
    assert plan.total == 28350
    found = hashlib.sha256(plan.sources.tobytes() + plan.documents.tobytes()).hexdigest()
    assert found == "d10b688c5bc796dc865b57db892104ba01316ee761cdd7d6e73ad35d7637f25d"


def test_backwards_begins_with_what_a_shorter_stream_has_not_come_to():
    sources = [source("a", [10] * 50, 0.5), source("b", [10] * 90, 0.5)]
    forth, back = plan_mixture(sources, 600, seed=1), plan_mixture(sources, 300, seed=1, backwards=True)
    for number in (0, 1):
        seen, later = (set(plan.documents[plan.sources == number].tolist()) for plan in (forth, back))
        assert seen and later and not seen & later
    twice = plan_mixture([source("a", [10] * 50, max_epochs=2)], None, seed=1, backwards=True).documents.reshape(2, 50)
    assert all(sorted(epoch.tolist()) == list(range(50)) for epoch in twice)


def test_a_plan_needs_few_bytes_for_each_document():
    """Lists of Python numbers once took 140 bytes for each."""
    sources = [source(name, np.full(60_000, 7).tolist()) for name in ("a", "b")]
    tracemalloc.start()
    plan = plan_mixture(sources, None, seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(plan.documents) == 120_000
    assert peak < 50 * len(plan.documents)

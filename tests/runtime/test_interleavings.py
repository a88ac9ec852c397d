"""A sample of what tools/interleavings tries, and that it can fail."""

from __future__ import annotations

import pytest

from athanor.runtime import locks
from tools.interleavings.__main__ import SCENARIOS, explore


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_schedule_of_a_sample_breaks_anything(name):
    tried, violations = explore(name, 2, 60)
    assert tried > 50 and not violations


def test_a_lock_that_is_not_looked_at_again_lets_two_stages_into_one_slot(monkeypatch):
    """As it was: whoever waited had the lock of a removed file, and the next stage that of the new one."""
    monkeypatch.setattr(locks, "_is_at", lambda handle, path: True)
    monkeypatch.setattr(locks, "TRIES", 1)
    _, violations = explore("stages-prune", 2, 600)
    assert violations["two at once: writers in one slot"] and any("FileNotFoundError" in text for text in violations)

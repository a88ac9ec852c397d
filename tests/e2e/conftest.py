"""The micro preset, built once for all end-to-end tests."""

from __future__ import annotations

import sys

import pytest

from tests.e2e.clone import Clone, commit, make_clone


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    clone = make_clone(tmp_path_factory.mktemp("micro"))
    done = clone.run(sys.executable, "-m", "athanor", "repro")
    (clone.path / "dvc_plots").mkdir()
    (clone.path / "dvc_plots" / "first.log").write_text(done.stdout + done.stderr)
    commit(clone, "built")
    return clone

"""Assertions in the helpers of these tests tell what differs, as those in the tests do."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.runtime.view", "tests.runtime.shippers")


@pytest.fixture(scope="module")
def raw_shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Shards to work on, and the bytes that one process makes of them."""
    from athanor.runtime.executor import Executor
    from tests.runtime.toy_work import SHARDS, contents, make_raw, make_tasks, score

    folder = tmp_path_factory.mktemp("shards")
    raw, control = make_raw(folder / "raw"), folder / "control"
    control.mkdir()
    tasks = make_tasks(raw, control)
    assert len(tasks) == SHARDS
    Executor(1)(score, tasks, folder / "serial")
    return raw, contents(folder / "serial")

"""Names: of this project, which belongs to another one on the package index, and of its tests."""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import pytest_make_parametrize_id
from tests.runtime.view import ROOT


def test_nothing_says_to_install_athanor_by_name() -> None:
    """`pip install athanor` would fetch somebody else's code; this project runs from its checkout."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = [
        f"{name}: {line.strip()}"
        for name in files
        if name.endswith((".py", ".md", ".toml", ".yaml", ".txt", "Makefile")) and name != Path(__file__).name
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if re.search(r"pip3? install[^#`]*['\" ]athanor\b", line) and "`pip install athanor`" not in line
    ]
    assert not found


def test_bytes_that_are_no_text_do_not_name_a_test(pytestconfig) -> None:
    """A gzip header holds the time: workers that collected a second apart disagreed, and no test ran at all."""
    assert pytest_make_parametrize_id(pytestconfig, gzip.compress(b"x"), "data") == "data"
    assert pytest_make_parametrize_id(pytestconfig, b"no gzip", "data") is None
    assert pytest_make_parametrize_id(pytestconfig, "\xe9", "data") is None


def test_a_file_stays_in_one_process(request: pytest.FixtureRequest) -> None:
    """xdist passes groups on in a test's id. Read too early, or by a pytest that keeps none, each process made every fixture."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("only where several processes run the tests")
    assert request.node.nodeid.endswith("@tests/runtime/test_names.py")

"""Tiers of tests, how they are shared out when several processes run them, and what several folders of tests use."""

from __future__ import annotations

import fnmatch
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.runtime.toy_pipeline import Toy

TIERS = YAML(typ="safe").load(Path(__file__).with_name("tiers.yaml"))


@pytest.fixture(scope="session", autouse=True)
def hears_its_terminal() -> None:
    """A suite started with nohup ignores SIGHUP, one started with & by a script SIGINT, and so would all that tests start."""
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Toy]:
    """A pipeline to kill things in; what it has started ends with the test."""
    toy = Toy(tmp_path)
    try:
        yield toy
    finally:
        toy.kill_all()


@pytest.fixture
def few_files() -> Iterator[int]:
    """The process may open 56 files more than it has open now."""
    import resource

    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is of numbers, of which some in between are taken.
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(56)]
    for number in free:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, usual[1]))
    yield len(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes that are no text do not name a test. A gzip header holds the second it was written in: two workers that
    collected a second apart had two names for one test, and the whole suite refused to start."""
    return argname if isinstance(val, bytes) and not (val.isascii() and val.decode().isprintable()) else None


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests stay in one process, and so do all that look at the one micro build: it takes a minute to make."""
    for item in items:
        file = item.nodeid.split("::")[0]
        for tier, patterns in TIERS.items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in (file, item.nodeid)):
                item.add_marker(tier)
                if tier == "linux" and not sys.platform.startswith("linux"):
                    item.add_marker(pytest.mark.skip(reason="needs Linux"))
        if item.config.pluginmanager.hasplugin("xdist"):
            built = item.nodeid.startswith("tests/e2e/") and "micro" in getattr(item, "fixturenames", ())
            group = "micro" if built else file
            item.add_marker(pytest.mark.xdist_group(group))

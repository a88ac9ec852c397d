from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def micro():
    """The module next door; tests are no package, so that their names need not be unique to it."""
    return load("micro")


@pytest.fixture(scope="session")
def healing(micro):
    """The same, for runs that go wrong on purpose."""
    return load("healing")


def load(name):
    spec = importlib.util.spec_from_file_location(f"training_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

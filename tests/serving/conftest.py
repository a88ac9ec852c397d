from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest
import torch

from athanor.tokenizer.tokenizer import Tokenizer
from tests.evaluation.tiny import write_tiny_tokenizer
from tests.serving.live import PATIENCE
from tests.serving.parrot import write_export, write_parts


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that is a coroutine runs in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), PATIENCE))
    return True


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_numbers():
    """A backend in the test's own thread flushes denormals there, and hypothesis refuses to draw floats after that."""
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tiny") / "tokenizer")


@pytest.fixture(scope="session")
def parrot_parts(tmp_path_factory) -> Path:
    """The parrot's weights and tokenizer; `write_export` makes exports of them under any name."""
    return write_parts(tmp_path_factory.mktemp("parrot-parts") / "parts")


@pytest.fixture(scope="session")
def parrot_dir(parrot_parts, tmp_path_factory) -> Path:
    """An exported model that answers what parrot.py taught it."""
    return write_export(tmp_path_factory.mktemp("parrot") / "hf", parrot_parts)

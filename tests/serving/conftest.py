from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from athanor.catalog.convert import convert
from tests.catalog import models_tiny
from tests.evaluation.tiny import always_says, write_tiny_tokenizer
from tests.serving.parrot import write_export, write_parts


@pytest.fixture(scope="session")
def parrot_parts(tmp_path_factory) -> Path:
    """The parrot's weights and tokenizer; `write_export` makes exports of them under any name."""
    return write_parts(tmp_path_factory.mktemp("parrot-parts") / "parts")


@pytest.fixture(scope="session")
def parrot_dir(parrot_parts, tmp_path_factory) -> Path:
    """An exported model that answers what parrot.py taught it."""
    return write_export(tmp_path_factory.mktemp("parrot") / "hf", parrot_parts)


@pytest.fixture(scope="session")
def parrot_gguf(parrot_dir, tmp_path_factory) -> Path:
    """The parrot as a GGUF file, with its tokenizer in the same folder."""
    folder = tmp_path_factory.mktemp("parrot-gguf") / "made"
    convert(parrot_dir, folder)
    return (folder / "model.gguf").rename(folder / "parrot.gguf")


@pytest.fixture(scope="session")
def endless(tmp_path_factory) -> Path:
    """The export, named tiny, of a model that says one word until it is stopped."""
    folder = tmp_path_factory.mktemp("endless")
    tokenizer = write_tiny_tokenizer(folder / "tokenizer")
    model = always_says(tokenizer, tokenizer.encode(" the")[0], 30_000)
    return models_tiny.write_export(folder / "endless", model, tokenizer, folder / "tokenizer", types=("f32",))


# -- the chat page in a browser --------------------------------------------------


@pytest.fixture(scope="module")
def playwright():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NODE_OPTIONS", f'--require="{Path(__file__).with_name("older_firefox.cjs")}"')
        with api.sync_playwright() as playwright:
            yield playwright


@pytest.fixture(scope="module")
def browser(request, playwright):
    from playwright.sync_api import Error

    from tests.serving.browser import launched

    name = getattr(request, "param", "chromium")
    try:
        browser = launched(playwright, name)
    except Error as error:
        if os.environ.get("ATHANOR_TEST_BROWSER") == "required":
            raise
        pytest.skip(f"no {name} starts here (apt install chromium firefox-esr): {error.message[:200]}")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def models(parrot_parts, endless, tmp_path_factory) -> list[Path]:
    """Of a checkout an export and its base model, an export more, one whose weights are gone, and `endless`."""
    from tests.serving.browser import write_checkout

    folder = tmp_path_factory.mktemp("models")
    for name in ("broken", "polly"):  # the newest comes first
        write_export(folder / name, parrot_parts, name)
    (folder / "broken/model.safetensors").unlink()
    export, base = write_checkout(folder / "checkout", parrot_parts)
    return [export, folder / "polly", folder / "broken", endless, base]


@pytest.fixture(scope="module")
def server(models):
    from tests.serving.browser import serve

    with serve(models[0].parents[2], models) as server:  # in the checkout, whose data tell where an answer is from
        yield server


@pytest.fixture
def open_reader(browser):
    """Opens readers; what must never happen is checked of each at the end."""
    from tests.serving.browser import Reader, let_driver_evaluate

    with ExitStack() as stack:

        def opened(server, **settings) -> Reader:
            given = {"viewport": {"width": 1280, "height": 800}, "accept_downloads": True} | settings
            context = stack.enter_context(browser.new_context(**given))
            if browser.browser_type.name == "firefox":
                let_driver_evaluate(context)
            reader = Reader(context, server.url)
            stack.callback(reader.check)
            return reader

        yield opened


@pytest.fixture
def reader(open_reader, server):
    reader = open_reader(server)
    reader.see("#models button")
    return reader

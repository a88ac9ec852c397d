"""What goes wrong at the chat page: models, engine or server that fail in the middle, and a server with a key."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
from tests.serving.browser import serve
from tests.serving.parrot import PLAIN

pytestmark = pytest.mark.extra


def test_a_model_that_fails_says_why_and_the_question_is_not_lost(reader):
    page, long, why = reader.page, "far too long " * 400, re.compile("model.safetensors", re.I)
    reader.model("broken")
    reader.ask("Something I thought about for long")
    reader.see(".problem", why)
    reader.value("#question", "Something I thought about for long")
    page.click("#model-0")
    reader.see(".menu .reason", why)
    page.locator(".menu button", has_text="parrot").first.click()
    reader.press("Try again")
    reader.answered()
    reader.count(".problem", 0)
    reader.value("#question", "")
    page.click("#compare")
    reader.model("broken", slot=1)
    reader.ask(PLAIN[0])  # one failing model does not hide the other
    reader.see(".problem", why)
    reader.value("#question", "")
    assert reader.texts()[-1] == PLAIN[1]
    page.click("#compare")
    reader.ask(long)
    reader.see(".problem", re.compile(r"\d"))
    reader.value("#question", long.strip())


@pytest.mark.parametrize("whole", [False, True], ids=["engine", "server"])
def test_what_dies_in_the_middle_costs_no_text_and_the_answer_goes_on_after_one_click(
    open_reader, models, tmp_path, whole
):
    with ExitStack() as servers:
        server = servers.enter_context(serve(tmp_path, models[3:4]))
        reader = open_reader(server)
        reader.see("#models button")
        reader.ask("Go", wait=False)
        reader.see(".answer .prose", "the")
        for one in [server.process] if whole else server.engines():
            one.kill()
        reader.see(".problem")
        if whole:
            reader.see("#gone")
            server.process.wait()
            servers.enter_context(serve(tmp_path, models[3:4], f"--port={server.port}"))
            reader.count("#gone", 0)
        reader.continued("Try again")


def test_nothing_to_serve_says_how_to_make_a_model(open_reader, tmp_path):
    with serve(tmp_path, []) as server:
        reader = open_reader(server)
        reader.see(".command", "make repro")
        reader.see("#send:disabled")


def test_a_server_with_a_key_asks_for_it_until_it_is_right_and_keeps_it_for_the_tab(open_reader, models, tmp_path):
    key = tmp_path / "key"
    key.write_text("open-sesame", encoding="utf-8")
    with serve(tmp_path, models[:1], f"--api-key-file={key}") as server:
        reader = open_reader(server)
        for typed, seen in (("wrong", "dialog span:text('That key was not right')"), ("open-sesame", "#model-0")):
            reader.page.fill("#key", typed)
            reader.page.keyboard.press("Enter")
            reader.see(seen)
        reader.ask(PLAIN[0])
        reader.reload()
        assert reader.texts() == [PLAIN[1]]

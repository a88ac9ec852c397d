"""What goes wrong at the chat page: models, engine or server that fail in the middle, and a server with a key."""

from __future__ import annotations

import re
import signal

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
from playwright.sync_api import expect

from tests.serving.browser import choose_model, running
from tests.serving.parrot import PLAIN

pytestmark = pytest.mark.extra


def test_a_model_that_fails_says_why_and_the_question_is_not_lost(reader):
    page = reader.page
    choose_model(reader, "broken")
    reader.ask("Something I thought about for long")
    reader.see(".problem").to_contain_text(re.compile("model.safetensors", re.I))
    reader.see("#question").to_have_value("Something I thought about for long")
    page.click("#model-0")
    reader.see(".menu .reason").to_contain_text(re.compile("model.safetensors", re.I))
    page.locator(".menu button", has_text="parrot").click()
    reader.press("Try again")
    reader.answered()
    reader.see(".problem").to_have_count(0)
    reader.see("#question").to_have_value("")
    page.click("#compare")
    choose_model(reader, "broken", slot=1)
    reader.ask(PLAIN[0])  # one failing model does not hide the other
    reader.see(".problem").to_contain_text(re.compile("model.safetensors", re.I))
    assert reader.answers()[-1] == PLAIN[1] and page.input_value("#question") == ""
    page.click("#compare")
    reader.ask("far too long " * 400)
    reader.see(".problem").to_contain_text(re.compile(r"\d"))
    reader.see("#question").to_have_value(("far too long " * 400).strip())


@pytest.mark.parametrize("whole", [False, True], ids=["engine", "server"])
def test_what_dies_in_the_middle_costs_no_text_and_the_answer_goes_on_after_one_click(
    open_reader, models, tmp_path, whole
):
    with running(tmp_path, models[3:]) as server:
        reader = open_reader(server)
        reader.ask("Go", wait=False)
        reader.until("window.lengths.at(-1) > 0")
        if whole:
            server.kill()
        else:
            server.engine().send_signal(signal.SIGKILL)
        reader.see(".problem").to_be_visible()
        said = reader.answers()[-1]
        assert said.startswith("the")
        if whole:
            reader.see("#gone").to_be_visible()
            server.start()
            reader.see("#gone").to_be_hidden()
        reader.press("Try again")
        reader.until(f"window.lengths.at(-1) > {len(said) + 50}")
        reader.press("Stop the answer")
        reader.answered()
        assert reader.answers()[0].startswith(said) and reader.questions() == ["Go"]


def test_nothing_to_serve_says_how_to_make_a_model(open_reader, tmp_path):
    with running(tmp_path / "server", []) as server:
        reader = open_reader(server)
        reader.see(".command").to_have_text("make repro")
        reader.see("#send").to_be_disabled()


def test_a_server_with_a_key_asks_for_it_until_it_is_right_and_keeps_it_for_the_tab(open_reader, models, tmp_path):
    key = tmp_path / "key"
    key.write_text("open-sesame", encoding="utf-8")
    with running(tmp_path / "server", models[:1], f"--api-key-file={key}") as server:
        reader = open_reader(server, wait=False)
        page = reader.page
        for typed in ("wrong", "open-sesame"):
            page.fill("#key", typed)
            page.keyboard.press("Enter")
            if typed == "wrong":
                expect(page.get_by_text("That key was not right")).to_be_visible()
        reader.see("#model-0").to_contain_text("parrot")
        reader.ask(PLAIN[0])
        reader.reload()
        assert reader.answers() == [PLAIN[1]]

"""The chat page in Chromium, and what a person does first also in Firefox, on the real server with real models."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
from playwright.sync_api import expect

from tests.serving.browser import choose_model, menu, running
from tests.serving.parrot import CODE, MARKDOWN, PLAIN, WHO

pytestmark = pytest.mark.extra

# What a person does first is tried in both browsers, all else in Chromium.
BOTH = pytest.mark.parametrize("browser", ["chromium", "firefox"], indirect=True)


# -- asking and answering --------------------------------------------------------


@BOTH
def test_an_answer_is_shown_as_markdown(reader):
    reader.ask(MARKDOWN[0])
    for selector, text in (("h2", "Birds"), ("li strong", "parrot"), ("math[display=block] msup", "x2")):
        reader.see(f".prose {selector}").to_have_text(text)
    assert re.fullmatch(r"parrot.* · \d+ tokens · [\d,]+ tokens/s", reader.stats())
    reader.new_chat()
    reader.ask(CODE[0])
    reader.see(".code code").to_have_text("def add(a, b):\n    return a + b  # <b>both</b>")
    reader.see(".code .hljs-keyword >> nth=0").to_have_text("def")


@BOTH
@pytest.mark.parametrize("closed", [False, True])
def test_an_answer_grows_and_what_was_said_of_it_stays_and_is_continued(reader, closed):
    """Stopped, or in the middle of it the page was closed."""
    choose_model(reader, "tiny")
    reader.ask("Go", wait=False)
    reader.until("new Set(window.lengths).size > 4")
    if not closed:
        reader.page.keyboard.press("Escape")
        reader.answered()
        lengths = reader.page.evaluate("window.lengths")
        assert lengths == sorted(lengths)
    reader.reload()
    said = reader.answers()[0]
    assert reader.questions() == ["Go"] and said.startswith("the") and reader.stats().endswith("stopped")
    reader.press("Continue")
    reader.until(f"window.lengths.at(-1) > {len(said) + 50}")
    reader.press("Stop the answer")
    reader.answered()
    assert reader.answers()[0].startswith(said) and len(reader.chat()["messages"]) == 2


@BOTH
def test_answering_again_and_asking_in_other_words_make_variants_to_leaf_through(reader):
    page = reader.page
    reader.ask(PLAIN[0])
    for number in (2, 3):
        reader.press("Answer again")
        reader.see(".answer .arrows").to_have_text(f"{number}/{number}")
        reader.answered()
    reader.see(".toast", has_text="The same answer again").to_have_count(1)
    reader.press("Another at 0.7")
    reader.see(".answer .arrows").to_have_text("4/4")
    reader.answered()
    assert [body["sampling"].get("temperature") for body in reader.sent] == [None, None, None, 0.7]
    reader.press("Variant before")
    reader.see(".answer .arrows").to_have_text("3/4")
    page.locator(".message.user").hover()
    reader.press("Edit the question")
    page.fill("textarea.edit", WHO[0])
    page.press("textarea.edit", "Enter")
    reader.see(".user .arrows").to_have_text("2/2")
    reader.answered()
    assert (reader.questions(), reader.answers()) == ([WHO[0]], [WHO[1]])
    page.locator(".user .arrows").get_by_role("button", name="Variant before").click()
    reader.see(".bubble").to_have_text(PLAIN[0])
    reader.reload()
    assert reader.questions() == [PLAIN[0]] and "temperature" not in reader.chat()["sampling"]


def test_settings_reach_the_model_and_stay_with_the_chat(reader):
    page = reader.page
    page.click("#settings")
    reader.see("#set-temperature").to_have_value("0")
    numbers = {"temperature": 0.25, "top_k": 9, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.25}
    numbers |= {"seed": 7, "max_new_tokens": 3}
    for name, value in numbers.items():
        page.fill(f"#set-{name}", str(value))
    page.fill("#system", "Be brief.")
    page.keyboard.press("Escape")
    reader.ask(PLAIN[0])
    assert reader.sent[-1]["sampling"] == numbers
    assert reader.sent[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "3 tokens" in reader.stats() and reader.stats().endswith("cut at the limit")
    reader.press("Answer again")
    reader.see(".answer .arrows").to_have_text("2/2")
    reader.answered()
    assert reader.sent[-1]["sampling"]["seed"] == 8 and reader.chat()["sampling"] == numbers
    reader.reload()
    reader.see("#settings").to_have_class(re.compile("changed"))  # a dot tells, also when they are closed
    page.click("#settings")
    reader.see("#system").to_have_value("Be brief.")
    reader.press("Reset sampling")
    reader.see("#set-top_k").to_have_value("0")
    page.keyboard.press("Escape")
    reader.ask(PLAIN[0])
    assert reader.sent[-1]["sampling"] == reader.chat()["sampling"] == {}


def test_the_probabilities_of_tokens_are_shown_on_demand_and_stay_with_the_answer(reader):
    page = reader.page
    page.click("#settings")
    page.check("#set-chances")
    page.keyboard.press("Escape")
    reader.ask(PLAIN[0])
    for _ in range(2):
        assert "".join(page.locator(".token").all_inner_texts()) == PLAIN[1]
        page.locator(".token").nth(2).hover()
        reader.see(".chances strong").to_contain_text("%")
        reader.see(".chances li").to_have_count(5)
        reader.reload()
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    reader.see(".chances").to_have_count(1)
    reader.press("Show as text")
    reader.see(".token").to_have_count(0)


def test_two_models_answer_side_by_side_and_one_is_picked_to_go_on_with(reader):
    page = reader.page
    page.click("#compare")
    reader.see(".model").to_have_count(2)
    reader.ask(PLAIN[0])
    assert reader.answers() == [PLAIN[1], PLAIN[1]]
    reader.reload()
    left, right = (page.locator(".pair .message").nth(n).bounding_box() for n in (0, 1))
    assert left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]
    reader.press(re.compile("Go on with the answer of polly"))
    reader.see(".pair").to_have_count(0)
    reader.ask(WHO[0])
    assert [body["models"] for body in reader.sent] == [["parrot", "polly"], ["polly"]]
    messages = {message["id"]: message for message in reader.chat()["messages"]}
    last = messages[reader.chat()["leaf"]]
    assert messages[messages[last["parent"]]["parent"]]["model"] == last["model"] == "polly"


def test_a_base_model_goes_on_with_a_text_in_one_piece(open_reader, parrot_parts, models, tmp_path):
    shutil.copytree(parrot_parts / "model", tmp_path / "models/base")
    shutil.copytree(parrot_parts / "tokenizer", tmp_path / "models/tokenizer")
    with running(tmp_path / "server", [models[0], tmp_path / "models/base"]) as server:
        reader = open_reader(server)
        choose_model(reader, "base")
        reader.see(".welcome h1").to_have_text("Go on from here")
        reader.ask("# I *am* a")
        reader.reload()
        more = reader.chat()["messages"][-1]["content"]
        assert reader.page.locator(".answer .raw").inner_text().strip() == f"# I *am* a{more}".strip()
        for nothing in (".bubble", "[aria-label='Bad answer']"):
            reader.see(nothing).to_have_count(0)


# -- chats ----------------------------------------------------------------------------


def test_chats_are_found_renamed_exported_deleted_and_imported(reader):
    page = reader.page
    reader.ask(CODE[0])
    first = page.url
    reader.new_chat()
    reader.ask(WHO[0])
    page.go_back()
    expect(page).to_have_url(first)
    reader.see("#chats .current .title").to_have_text(CODE[0])
    menu(reader, CODE[0], "Rename")
    page.fill(".rename", "Sums in Python")
    page.press(".rename", "Enter")
    expect(page).to_have_title("Sums in Python · Athanor")
    page.keyboard.press("Control+k")
    page.keyboard.type("RÉTURN both")
    reader.see("#chats .snippet").to_contain_text("return a + b")
    reader.see("#chats .title").to_have_count(1)
    files = {}
    for item in ("Export as Markdown", "Export for training (JSONL)", "Export as JSON"):
        with page.expect_download() as download:
            menu(reader, "Sums in Python", item)
        files[item] = Path(download.value.path()).read_text(encoding="utf-8")
    markdown, rows, whole = files.values()
    assert CODE[1] in markdown and markdown.startswith("# Sums in Python")
    assert [message["content"] for message in json.loads(rows)["messages"]] == list(CODE)
    menu(reader, "Sums in Python", "Delete")
    reader.see("#chats .none").to_be_visible()
    reader.press("Undo")
    reader.see("#chats .title").to_have_text("Sums in Python")
    menu(reader, "Sums in Python", "Delete")
    reader.reload()  # leaving the page does not bring it back
    reader.see("#chats .title").to_have_text(WHO[0])
    for text in (whole.replace('"role": "user"', '"role": "other"', 1), whole):
        page.click("#files")
        with page.expect_file_chooser() as chooser:
            page.get_by_role("menuitem", name="Import chats").click()
        chooser.value.set_files({"name": "chat.json", "mimeType": "application/json", "buffer": text.encode()})
    reader.see(".toast", has_text="does not follow").to_be_visible()
    page.locator("#chats .title", has_text="Sums in Python").click()
    reader.see(".code code").to_contain_text("def add")


def test_two_tabs_show_the_same_chats(reader):
    reader.ask(PLAIN[0])
    other = reader.context.new_page()
    other.goto(reader.page.url)
    other.fill("#question", WHO[0])
    other.press("#question", "Enter")
    reader.see(".answer .prose").to_have_count(2)
    reader.until("document.querySelectorAll('.answer .prose')[1].textContent.includes('parrot')")
    other.close()
    menu(reader, PLAIN[0], "Rename")
    reader.page.fill(".rename", "Birds")
    reader.page.press(".rename", "Enter")
    assert reader.titles() == ["Birds"]


def test_what_is_typed_while_an_answer_is_made_stays_with_its_chat(reader):
    choose_model(reader, "tiny")
    reader.ask("Go", wait=False)
    reader.page.fill("#question", "and then")
    reader.until("window.lengths.at(-1) > 0")
    reader.new_chat()
    reader.see("#question").to_have_value("")
    reader.page.go_back()
    reader.see(".answer.live").to_have_count(1)
    reader.page.keyboard.press("Escape")
    reader.reload()
    reader.see("#question").to_have_value("and then")


# -- feedback -------------------------------------------------------------------------


def test_a_correction_is_kept_by_the_server_accepted_and_exported(reader):
    page = reader.page
    reader.ask(PLAIN[0])
    reader.press("Bad answer")
    expect(page.get_by_role("button", name="Keep", exact=True)).to_be_disabled()  # the answer itself is no correction
    page.fill(".better textarea", "It is **seven**.")
    reader.press("Keep", exact=True)
    reader.see(".answer .stats").to_contain_text("corrected")
    reader.press("Good answer")
    reader.press("Undo")
    reader.see(".answer .stats").to_contain_text("corrected")
    reader.press("Bad answer")
    reader.see(".better textarea").to_have_value("It is **seven**.")
    for decision, tab, expected in (("Accept", "Accepted", "It is **seven**."), ("Reject", "Rejected", PLAIN[1])):
        page.click("#to-corrections")
        card = page.locator(".correction").first
        expect(card.locator(".should strong")).to_have_text("seven")
        card.get_by_role("button", name=decision).click()
        reader.press(re.compile(tab))
        card.locator("a").click()
        with page.expect_download() as download:
            menu(reader, PLAIN[0], "Export for training (JSONL)")
        said = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))["messages"][-1]["content"]
        assert said == expected
        if decision == "Accept":
            page.click("#to-corrections")
            card.get_by_role("button", name="Take back").click()
            reader.press(re.compile("To decide"))
            page.go_back()


def test_a_training_is_started_from_the_corrections_and_its_end_is_told_after_a_reload(open_reader, models, tmp_path):
    # A server of its own: what others leave to be accepted has such buttons, too.
    with running(tmp_path, models[:1]) as server:
        reader = open_reader(server)
        page, now = reader.page, {"state": "none", "text": ""}

        def state(route) -> None:
            answer = route.fetch()
            route.fulfill(response=answer, json=answer.json() | {"retraining": dict(now)})

        def start(route) -> None:
            now.update(state="running", text="sft 20 %")
            route.fulfill(status=202, json=now)

        page.route("**/api/state", state)
        page.route("**/api/retraining", start)
        reader.ask(PLAIN[0])
        reader.press("Bad answer")
        page.fill(".better textarea", "It is six.")
        reader.press("Keep", exact=True)
        page.click("#to-corrections")
        reader.press("Accept", exact=True)
        reader.press(re.compile(r"Train on the accepted \([1-9]"))
        reader.see("#retraining pre").to_have_text("sft 20 %")
        page.reload()
        reader.see("#retraining").to_contain_text("answers meanwhile")
        now.update(state="failed", text="sft: out of room")
        reader.see("#retraining pre").to_have_text("sft: out of room")
        reader.see(".toast").to_contain_text("Corrections says why")

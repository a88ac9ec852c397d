"""The chat page in Chromium, and what a person does first also in Firefox, on the real server with real models."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
from playwright.sync_api import Browser, Error, Page, Playwright, Route, expect, sync_playwright

from athanor.base.artifacts import manifest_digest, read_json, write_json
from athanor.tokenizer.tokenizer import Tokenizer
from tests.e2e.clone import ELSEWHERE
from tests.origins.world import write_data
from tests.serving.browser import DESKTOP, PATIENCE, PHONE, Reader, Server, launched, let_driver_evaluate, running
from tests.serving.parrot import CODE, LONG, MARKDOWN, PLAIN, WHO, XSS, asking, write_export
from tests.serving.test_starters import checkout, row

expect.set_options(timeout=PATIENCE)

pytestmark = pytest.mark.extra

# What a person does first is tried in both browsers, all else in Chromium.
BOTH = pytest.mark.parametrize("browser", ["chromium", "firefox"], indirect=True)


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NODE_OPTIONS", f'--require="{Path(__file__).with_name("older_firefox.cjs")}"')
        with sync_playwright() as playwright:
            yield playwright


@pytest.fixture(scope="module")
def browser(request, playwright) -> Iterator[Browser]:
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
def models(parrot_parts, tmp_path_factory) -> list[Path]:
    """Two that answer, and one whose weights are gone."""
    folder = tmp_path_factory.mktemp("models")
    made = [write_export(folder / name, parrot_parts, name) for name in ("parrot", "polly", "broken")]
    (made[2] / "model.safetensors").unlink()
    return made


@pytest.fixture(scope="module")
def server(models, tmp_path_factory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server"), models) as server:
        yield server


@pytest.fixture
def open_reader(browser):
    """Opens readers; what must never happen is checked of each at the end."""
    readers = []

    def opened(server: Server, *, wait: bool = True, **settings) -> Reader:
        context = browser.new_context(**{"viewport": DESKTOP, "accept_downloads": True} | settings)
        if browser.browser_type.name == "firefox":
            let_driver_evaluate(context, server.url)
        readers.append(Reader(context, server.url, wait=wait))
        return readers[-1]

    yield opened
    for reader in readers:
        reader.check()
        reader.context.close()


@pytest.fixture
def reader(open_reader, server) -> Reader:
    return open_reader(server)


def choose_model(reader: Reader, name: str, slot: int = 0) -> None:
    reader.page.click(f"#model-{slot}")
    reader.page.locator(".menu .label", has_text=re.compile(rf"^{name}\b")).last.click()
    reader.see(f"#model-{slot}").to_contain_text(name)


@contextmanager
def held(page: Page, address: str) -> Iterator[Callable[[], None]]:
    """Requests to this address wait until what this yields is called."""
    waiting: list[Route] = []
    page.route(address, lambda route: route.continue_() if released else waiting.append(route))
    released = False

    def release() -> None:
        nonlocal released
        deadline = time.monotonic() + PATIENCE / 1000
        while not waiting:
            assert time.monotonic() < deadline, f"nothing asked for {address}"
            page.wait_for_timeout(20)
        released = True
        for route in waiting:
            route.continue_()

    yield release


def menu(reader: Reader, title: str, item: str) -> None:
    row = reader.page.locator("#chats li", has_text=title).first
    row.hover()
    row.get_by_role("button").click()
    reader.page.get_by_role("menuitem", name=item).click()


# -- asking and answering --------------------------------------------------------


def test_an_answer_grows_in_steps_and_ends_as_the_model_said_it(reader):
    """Over a slow line: a busy machine may have made most of an answer before the page looks once."""
    line = reader.context.new_cdp_session(reader.page)
    line.send("Network.enable")
    slow = {"offline": False, "latency": 0, "downloadThroughput": 8000, "uploadThroughput": -1}
    line.send("Network.emulateNetworkConditions", slow)
    reader.ask(LONG[0])
    assert reader.answers() == [LONG[1]]
    lengths = reader.page.evaluate("window.lengths")
    assert len(set(lengths)) >= 5 and lengths == sorted(lengths)
    assert re.fullmatch(r"parrot.* · \d+ tokens · [\d,]+ tokens/s", reader.stats())


@BOTH
def test_markdown_and_code_are_shown_as_such_and_copied_as_written(open_reader, server):
    reader = open_reader(server, permissions=["clipboard-read", "clipboard-write"])
    reader.ask(MARKDOWN[0])
    for selector, text in (("h2", "Birds"), ("li strong", "parrot"), ("td[align=right] >> nth=0", "2")):
        reader.see(f".prose {selector}").to_have_text(text)
    reader.see(".prose math[display=block] msup").to_have_text("x2")
    reader.press("Copy the answer")
    reader.page.wait_for_selector("text=Copied", state="attached")
    assert reader.page.evaluate("navigator.clipboard.readText()") == MARKDOWN[1]
    reader.new_chat()
    reader.ask(CODE[0])
    code = "def add(a, b):\n    return a + b  # <b>both</b>"
    assert reader.page.locator(".code code").inner_text() == code
    expect(reader.page.locator(".code .hljs-keyword").first).to_have_text("def")
    reader.press("Copy code")
    reader.until("navigator.clipboard.readText().then((text) => text.startsWith('def'))")
    assert reader.page.evaluate("navigator.clipboard.readText()") == code


@BOTH
@pytest.mark.parametrize("how", ["button", "key"])
def test_a_stopped_answer_keeps_what_was_said(reader, server, how):
    with server.slowed():
        for _ in range(10):  # a busy machine may hold up what slows the server
            reader.new_chat()
            reader.page.evaluate("window.lengths.length = 0")
            if how == "button":
                reader.page.evaluate("window.stopAtOnce = true")
                reader.ask(LONG[0])
            else:
                reader.ask(LONG[0], wait=False)
                reader.until("window.lengths.at(-1) > 0")
                reader.page.keyboard.press("Escape")
                reader.answered()
            if reader.stats().endswith("stopped"):
                break
    said = reader.answers()[0]
    assert said and LONG[1].startswith(said) and said != LONG[1]
    reader.reload()
    assert reader.answers() == [said]


@BOTH
def test_answering_again_and_asking_in_other_words_make_variants_to_leaf_through(reader):
    page = reader.page
    reader.ask(PLAIN[0])
    reader.press("Answer again")
    reader.see(".answer .arrows").to_have_text("2/2")
    reader.press("Variant before")
    reader.see(".answer .arrows").to_have_text("1/2")
    page.locator(".message.user").hover()
    reader.press("Edit the question")
    page.fill("textarea.edit", WHO[0])
    page.press("textarea.edit", "Enter")
    reader.see(".user .arrows").to_have_text("2/2")
    reader.answered()
    assert (reader.questions(), reader.answers()) == ([WHO[0]], [WHO[1]])
    leaf = reader.chat()["leaf"]
    page.locator(".user .arrows").get_by_role("button", name="Variant before").click()
    reader.see(".bubble").to_have_text(PLAIN[0])
    deadline = time.monotonic() + PATIENCE / 1000
    while reader.chat()["leaf"] == leaf:  # Firefox tells playwright of no request that may outlive its page
        assert time.monotonic() < deadline
    reader.reload()
    assert (reader.questions(), reader.answers()) == ([PLAIN[0]], [PLAIN[1]])
    assert [message["parent"] for message in reader.chat()["messages"] if message["role"] == "user"] == [None, None]


def test_another_answer_at_temperature_0_is_offered_at_another_temperature(reader):
    """It was the same answer again, and equal notes piled up over the page."""
    reader.ask(PLAIN[0])
    for number in (2, 3):
        reader.press("Answer again")
        reader.see(".answer .arrows").to_have_text(f"{number}/{number}")
        reader.answered()
    reader.see(".toast", has_text="The same answer again").to_have_count(1)
    for size in (DESKTOP, PHONE):
        reader.page.set_viewport_size(size)
        note, composer = (reader.page.locator(place).bounding_box() for place in (".toast", "#composer"))
        assert note["y"] + note["height"] < composer["y"]
    reader.press("Another at 0.7")
    reader.see(".answer .arrows").to_have_text("4/4")
    reader.answered()
    assert [body["sampling"].get("temperature") for body in reader.sent] == [None, None, None, 0.7]
    assert "temperature" not in reader.chat()["sampling"]


def test_another_answer_has_another_seed_than_that_of_the_chat(reader):
    reader.press("Settings")
    reader.page.fill("#set-seed", "7")
    reader.page.keyboard.press("Escape")
    reader.ask(PLAIN[0])
    reader.press("Answer again")
    reader.see(".answer .arrows").to_have_text("2/2")
    reader.answered()
    assert [body["sampling"]["seed"] for body in reader.sent] == [7, 8] and reader.chat()["sampling"] == {"seed": 7}


def own_export(root: Path, parrot_parts: Path) -> Path:
    """An export in a checkout with the evaluation that it was made with."""
    export = checkout(root, [row("arithmetic", PLAIN[0], kind="numeric"), row("identity", WHO[0])])
    facts = json.loads((export / "hf/athanor.json").read_text())
    shutil.rmtree(export / "hf")
    write_export(export / "hf", parrot_parts, "own")
    path = export / "hf/athanor.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return export


CARD = """# own <img src=x onerror=pwned(1)>

| property | value |
| --- | --- |
| parameters | 21 (all counted) |
| context | 9 tokens |

| source | tokens | share | wanted share | times read |
| --- | --- | --- | --- | --- |
| birds | 100 | 60.0% | 60.0% | 2.00 |

| source | documents | train documents | licence |
| --- | --- | --- | --- |
| birds | 1 | 1 | CC0-1.0 |

| category | items | base | sft |
| --- | --- | --- | --- |
| arithmetic | 36 | 0.0% ± 1.0% | 97.2% ± 4.2% |
| identity | 9 | 0.0% ± 1.0% | 9.0% ± 4.2% |
| all | 45 | 0.0% ± 1.0% | 80.0% ± 4.2% |

- Not clearly above its floor (within 3 standard errors): identity. Read these scores as chance.
"""


def test_the_cards_are_questions_that_the_chosen_model_has_answered(open_reader, models, parrot_parts, tmp_path):
    """They were fixed, and wrong for a model of one's own text."""
    export = own_export(tmp_path, parrot_parts)
    with running(tmp_path / "server", [export, models[1]]) as server:
        reader = open_reader(server)
        reader.see(".card").to_have_count(2)
        assert reader.page.locator(".card").all_inner_texts() == [f"Identity\n{WHO[0]}", f"Arithmetic\n{PLAIN[0]}"]
        choose_model(reader, "polly")
        reader.see(".card").to_have_count(0)
        choose_model(reader, "own")
        reader.page.locator(".card", has_text=PLAIN[0]).click()
        reader.answered()
        assert reader.answers() == [PLAIN[1]]


def test_the_panel_about_a_model_tells_its_card_and_asks_what_it_was_taught(
    open_reader, models, parrot_parts, tmp_path
):
    export = own_export(tmp_path, parrot_parts)
    (export / "MODEL_CARD.md").write_text(CARD)
    with running(tmp_path / "server", [export, models[1]]) as server:
        reader = open_reader(server)
        for _ in range(2):
            reader.page.click("#model-0")
            reader.page.get_by_role("menuitem", name="About own").click()
            for text in (
                "21 parameters",
                "sees 9 tokens",
                "birds",
                "CC0-1.0",
                "97.2% ± 4.2%",
                "as chance",
                "Arithmetic",
            ):
                reader.see("dialog.about").to_contain_text(text)
            reader.press("The whole card")
            reader.see("dialog.whole h1").to_have_text("own <img src=x onerror=pwned(1)>")
            reader.page.keyboard.press("Escape")
            reader.page.set_viewport_size(PHONE)
        reader.press(re.compile("What it was taught"))
        assert reader.page.evaluate(WIDE)[1] == []
        assert reader.page.locator(".example").first.bounding_box()["height"] >= 44
        reader.press(PLAIN[0], exact=True)
        reader.answered()
        assert reader.answers() == [PLAIN[1]]
        reader.new_chat()
        choose_model(reader, "polly")
        reader.press(re.compile("What it was taught"))
        reader.see("dialog.about").to_contain_text("no card beside this model")


def test_an_answer_shows_where_it_stands_in_the_training_data_on_a_wide_and_a_narrow_screen(
    open_reader, models, parrot_parts, tmp_path
):
    export = own_export(tmp_path, parrot_parts)
    shutil.copytree(parrot_parts / "tokenizer", tmp_path / "models/tokenizer")
    tokenizer = Tokenizer.load(tmp_path / "models/tokenizer")
    attack, begins = (asking(XSS[1]), XSS[1]), LONG[1][: LONG[1].index(" november")]
    write_data(tmp_path, tokenizer, [f"Chapter one.\n{begins} and so on."], [WHO, attack])
    facts = read_json(export / "hf/athanor.json")
    for name, folder in (("shards", "data/shards"), ("sft_data", "data/sft")):
        facts["lineage"][name] = manifest_digest(tmp_path / folder)
    write_json(export / "hf/athanor.json", facts)
    with running(tmp_path / "server", [export, models[1]]) as server:
        reader = open_reader(server)
        for question, marked, told in (
            (WHO[0], WHO[1], ("talks · CC0-1.0", f"in the answer to: {WHO[0]}", "1 time in 1 different text")),
            (LONG[0], begins, ("books · MIT", "chapter Chapter o", "no model here was trained on it")),
            (attack[0], attack[1], ("talks · MIT", "in the answer to: Say <img")),
        ):
            reader.new_chat()
            choose_model(reader, "own")
            reader.ask(question)
            reader.press("Where is this from?")
            for text in told:
                reader.see(".origins").to_contain_text(text)
            assert reader.page.locator(".answer mark").evaluate("mark => mark.firstChild.data") == marked
            assert reader.page.evaluate(WIDE)[1] == []
            reader.page.set_viewport_size(PHONE)
            assert reader.page.evaluate(WIDE) == [[], []]
            reader.press("Where is this from?")
            reader.see(".origins").to_have_count(0)
            reader.see(".answer mark").to_have_count(0)
            reader.page.set_viewport_size(DESKTOP)
        reader.new_chat()
        choose_model(reader, "polly")
        reader.ask(WHO[0])
        reader.press("Where is this from?")
        reader.see(".origins").to_contain_text("is not here as this model was made from it")


@BOTH
def test_an_answer_that_was_cut_goes_on_in_its_place_until_it_ends(reader):
    reader.press("Settings")
    field = reader.page.locator("#set-max_new_tokens")
    field.press("Control+a")  # filling adds to a number in Firefox
    field.press_sequentially("150")
    reader.page.keyboard.press("Escape")
    reader.ask(LONG[0])
    begun = reader.answers()[0]
    assert LONG[1].startswith(begun) and reader.stats().endswith("cut at the limit")
    reader.press("Continue")
    reader.see("text=Continue").to_have_count(0)
    reader.answered()
    whole = reader.answers()
    assert len(whole) == 1 and whole[0].startswith(begun) and whole[0].endswith("and that is all.")
    reader.reload()
    assert reader.answers() == whole and len(reader.chat()["messages"]) == 2


def test_the_probabilities_of_tokens_are_shown_on_demand_and_stay_with_the_answer(reader):
    reader.press("Settings")
    reader.page.check("#set-chances")
    reader.page.keyboard.press("Escape")
    reader.ask(PLAIN[0])
    for _ in range(2):
        assert "".join(reader.page.locator(".token").all_inner_texts()) == PLAIN[1]
        reader.page.locator(".token").nth(2).hover()
        reader.see(".chances strong").to_contain_text("%")
        reader.see(".chances li").to_have_count(5)
        reader.reload()
    reader.page.locator(".tokens").focus()
    reader.page.keyboard.press("ArrowRight")
    reader.see(".chances").to_have_count(1)
    reader.press("Show as text")
    reader.see(".token").to_have_count(0)
    reader.press("Show probabilities")
    reader.see(".chances").to_have_count(0)


def test_another_model_can_answer_the_next_question(reader):
    reader.ask(PLAIN[0])
    choose_model(reader, "polly")
    reader.ask(WHO[0])
    assert reader.answers() == [PLAIN[1], WHO[1]]
    assert [body["models"] for body in reader.sent] == [["parrot"], ["polly"]]
    assert reader.stats().startswith("polly")
    reader.reload()
    reader.see("#model-0").to_contain_text("polly")


def test_two_models_answer_side_by_side_and_one_is_picked_to_go_on_with(reader):
    page = reader.page
    page.click("#compare")
    reader.see(".model").to_have_count(2)
    reader.ask(PLAIN[0])
    assert reader.answers() == [PLAIN[1], PLAIN[1]]
    left, right = (page.locator(".pair .message").nth(n).bounding_box() for n in (0, 1))
    assert left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]
    reader.reload()
    reader.see(".pair .message").to_have_count(2)
    reader.press(re.compile("Go on with the answer of polly"))
    reader.see(".pair").to_have_count(0)
    reader.ask(WHO[0])
    chat = reader.chat()
    assert [body["models"] for body in reader.sent] == [["parrot", "polly"], ["polly"]]
    picked = next(message for message in chat["messages"] if message["model"] == "polly")
    assert chat["messages"][-2]["parent"] == picked["id"]
    # Variants go by their age, and of two that were made at once either may be the older.
    both = sorted(message["id"] for message in chat["messages"] if message["parent"] == picked["parent"])
    assert page.locator(".answer .arrows").all_inner_texts() == [f"{both.index(picked['id']) + 1}/2"]


def test_a_base_model_goes_on_with_a_text_in_one_piece(open_reader, parrot_parts, models, tmp_path):
    shutil.copytree(parrot_parts / "model", tmp_path / "models/base")
    shutil.copytree(parrot_parts / "tokenizer", tmp_path / "models/tokenizer")
    with running(tmp_path / "server", [models[0], tmp_path / "models/base"]) as server:
        reader = open_reader(server)
        choose_model(reader, "base")
        reader.see(".welcome h1").to_have_text("Go on from here")
        reader.ask("# I *am* a")
        for again in range(2):
            given = reader.page.locator(".answer .raw .given")
            expect(given).to_have_text("# I *am* a")
            reader.see(".bubble").to_have_count(0)
            more = reader.chat()["messages"][-1]["content"]
            assert reader.page.locator(".answer .raw").inner_text().strip() == f"# I *am* a{more}".strip()
            expect(reader.page.get_by_role("button", name="Bad answer")).to_have_count(0)
            if not again:
                reader.reload()
        choose_model(reader, "parrot")
        reader.ask(PLAIN[0])
        reader.see(".bubble").to_have_text(PLAIN[0])
        assert reader.answers()[1] == PLAIN[1]


def test_a_training_is_started_from_the_corrections_and_its_end_is_told_after_a_reload(open_reader, models, tmp_path):
    # A server of its own: what others leave to be accepted has such buttons, too.
    with running(tmp_path, models[:1]) as server:
        reader = open_reader(server)
        page, told = reader.page, {"state": "none", "text": ""}

        def state(route: Route) -> None:
            answer = route.fetch()
            route.fulfill(response=answer, json=answer.json() | {"retraining": dict(told)})

        def start(route: Route) -> None:
            told.update(state="running", text="sft 20 %")
            route.fulfill(status=202, json=told)

        page.route("**/api/state", state)
        page.route("**/api/retraining", start)
        reader.ask(PLAIN[0])
        reader.press("Bad answer")
        page.fill(".better textarea", "It is six.")
        reader.press("Keep", exact=True)
        page.click("#to-corrections")
        reader.press("Accept", exact=True)
        reader.press(re.compile(r"Train on the accepted \([1-9]"))
        for again in range(2):
            reader.see("#retraining").to_contain_text("answers meanwhile")
            reader.see("#retraining pre").to_have_text("sft 20 %")
            expect(page.locator("#retraining button")).to_be_disabled()
            if not again:
                page.reload()
        told.update(state="failed", text="sft: out of room")
        reader.see("#retraining").to_contain_text("The training did not finish.")
        reader.see("#retraining pre").to_have_text("sft: out of room")
        reader.see(".toast").to_contain_text("Corrections says why")
        reader.press(re.compile("Train on the accepted"))
        reader.see("#retraining").to_contain_text("answers meanwhile")
        told.update(state="done", text="all 5 s")
        reader.see(".toast", has_text="the new model has the next question").to_be_visible()


# -- history ----------------------------------------------------------------------


@BOTH
def test_a_reload_and_the_back_button_show_the_chats_that_the_address_names(reader):
    reader.ask(PLAIN[0])
    first = reader.page.url
    reader.new_chat()
    reader.ask(WHO[0])
    assert re.search(r"#/chat/\w+$", reader.page.url) and reader.page.url != first
    reader.reload()
    reader.see(".answer .prose").to_have_text(WHO[1])
    reader.page.go_back()
    expect(reader.page).to_have_url(first)
    reader.see(".answer .prose").to_have_text(PLAIN[1])


def test_until_a_chat_is_there_nothing_is_done_to_another_and_what_is_typed_stays(reader):
    page = reader.page
    reader.ask(PLAIN[0])
    chat = page.url.rsplit("/")[-1]
    with held(page, f"**/api/chats/{chat}") as release:
        page.reload()
        expect(page.locator("#chats .title").first).to_be_visible()
        reader.see("#question").to_be_focused()
        page.goto(reader.url + "#/corrections")
        reader.see("#question").to_be_hidden()
        page.go_back()
        reader.see("#question").to_be_visible()
        page.fill("#question", WHO[0])
        page.press("#question", "Enter")
        reader.see("#send").to_be_disabled()
        reader.see("#settings").to_be_disabled()
        reader.see("#compare").to_be_disabled()
        reader.see(".welcome").to_have_count(0)
        release()
    reader.see(".answer .prose").to_have_text(PLAIN[1])
    reader.see("#question").to_have_value(WHO[0])
    page.press("#question", "Enter")
    reader.answered()
    assert page.url.endswith(chat) and reader.answers() == [PLAIN[1], WHO[1]]


def test_a_chat_that_could_not_be_opened_opens_when_the_server_is_back(reader):
    page = reader.page
    reader.ask(PLAIN[0])
    here = page.url
    lost = []
    page.route("**/api/chats/*", lambda route: (lost.append(route.request.url), route.abort()))
    page.reload()
    expect(page.locator("#chats .title").first).to_be_visible()
    while not lost:
        page.wait_for_timeout(20)
    page.unroute("**/api/chats/*")
    reader.see(".answer .prose").to_have_text(PLAIN[1])
    assert page.url == here


def test_what_is_typed_and_set_while_a_new_chat_is_stored_stays(reader):
    page = reader.page
    with held(page, "**/api/chats") as release:
        reader.ask(PLAIN[0], wait=False)
        page.fill("#question", "and then")
        page.click("#settings")
        page.fill("#system", "Be brief.")
        page.fill("#set-seed", "7")
        page.keyboard.press("Escape")
        reader.see("dialog").to_have_count(0)
        choose_model(reader, "polly")
        with held(page, "**/api/chats/*") as release_settings:
            release()
            page.wait_for_url("**/#/chat/*")
            reader.see("#stop").to_be_visible()
            reader.see("#send").to_be_hidden()
            release_settings()
    reader.answered()
    reader.see(".answer .prose").to_have_text(PLAIN[1])
    reader.see("#question").to_have_value("and then")
    chat = reader.chat()
    assert (chat["system"], chat["sampling"], chat["models"]) == ("Be brief.", {"seed": 7}, ["polly"])
    reader.see("#model-0").to_contain_text("polly")
    reader.reload()
    reader.see("#question").to_have_value("and then")
    reader.new_chat()
    reader.see("#question").to_have_value("")


def test_settings_that_could_not_be_stored_with_a_new_chat_leave_no_answer_behind(reader):
    page = reader.page
    page.route("**/api/chats/*", lambda route: route.abort())
    with held(page, "**/api/chats") as release:
        reader.ask(PLAIN[0], wait=False)
        choose_model(reader, "polly")
        release()
    reader.see(".problem").to_be_visible()
    reader.see("#question").to_have_value(PLAIN[0])
    page.unroute("**/api/chats/*")
    reader.new_chat()
    reader.see("#stop").to_be_hidden()
    reader.ask(WHO[0])
    assert reader.answers() == [WHO[1]]


def test_chats_are_searched_renamed_exported_and_deleted_with_undo(reader):
    page = reader.page
    reader.ask(CODE[0])
    reader.see("#chats .current .title").to_have_text(CODE[0])
    menu(reader, CODE[0], "Rename")
    page.fill(".rename", "Sums in Python")
    page.press(".rename", "Enter")
    reader.see("#chats .current .title").to_have_text("Sums in Python")
    expect(page).to_have_title("Sums in Python · Athanor")
    page.keyboard.press("Control+k")
    page.keyboard.type("RETURN both")
    reader.see("#chats .snippet").not_to_have_count(0)
    assert "Sums in Python" in reader.titles()
    page.fill("#search", "no such words anywhere")
    reader.see("#chats .none").to_be_visible()
    page.fill("#search", "")
    reader.see("#chats .title", has_text="Sums in Python").to_be_visible()
    for item, read in (
        ("Export as Markdown", lambda text: CODE[1] in text and text.startswith("# Sums in Python")),
        ("Export as JSON", lambda text: json.loads(text)["title"] == "Sums in Python"),
        (
            "Export for training (JSONL)",
            lambda text: [m["content"] for m in json.loads(text)["messages"]] == list(CODE),
        ),
    ):
        with page.expect_download() as download:
            menu(reader, "Sums in Python", item)
        assert read(Path(download.value.path()).read_text(encoding="utf-8")), item
    menu(reader, "Sums in Python", "Delete")
    expect(page.locator(".welcome")).to_be_visible()
    assert "Sums in Python" not in reader.titles()
    reader.press("Undo")
    reader.see("#chats .title", has_text="Sums in Python").to_be_visible()
    menu(reader, "Sums in Python", "Delete")
    reader.reload()  # leaving the page makes it final
    reader.see("#chats .title", has_text="Sums in Python").to_have_count(0)


def test_a_title_being_typed_is_kept_while_the_list_is_drawn_anew(reader):
    page = reader.page
    reader.ask(CODE[0])
    reader.see("#chats .current .title").to_have_text(CODE[0])
    with held(page, "**/api/chats") as release:
        reader.ask(PLAIN[0])
        menu(reader, CODE[0], "Rename")
        page.fill(".rename", "Sums")
        with page.expect_response("**/api/chats"):
            release()
        page.wait_for_timeout(200)  # for what an answer may set off
        page.keyboard.type(" in Python")
    page.keyboard.press("Enter")
    reader.see("#chats .current .title").to_have_text("Sums in Python")
    assert reader.chat()["title"] == "Sums in Python"


# -- settings ---------------------------------------------------------------------


def test_settings_and_the_system_prompt_reach_the_model_and_stay_with_the_chat(reader):
    page = reader.page
    page.click("#settings")
    reader.see("#set-temperature").to_have_value("0")
    expected = {
        "temperature": 0.25,
        "top_k": 9,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.25,
        "seed": 7,
        "max_new_tokens": 3,
    }
    for name, value in expected.items():
        page.fill(f"#set-{name}", str(value))
    page.fill("#system", "Be brief.")
    page.keyboard.press("Escape")
    reader.ask(PLAIN[0])
    assert reader.sent[-1]["sampling"] == expected
    assert "3 tokens" in reader.stats() and reader.stats().endswith("cut at the limit")
    chat = reader.chat()
    assert (chat["system"], chat["sampling"]) == ("Be brief.", expected)
    reader.reload()
    page.click("#settings")
    reader.see("#settings").to_have_class(re.compile("changed"))  # a dot tells, also when they are closed
    reader.see("#system").to_have_value("Be brief.")
    reader.see("#set-seed").to_have_value("7")
    reader.press("Reset sampling")
    reader.see("#set-temperature").to_have_value("0")
    page.keyboard.press("Escape")
    reader.see("dialog").to_have_count(0)
    reader.ask(PLAIN[0])
    assert reader.sent[-1]["sampling"] == {}
    assert reader.chat()["sampling"] == {}


# -- feedback ---------------------------------------------------------------------


def test_a_correction_is_stored_and_can_be_accepted_or_rejected(reader):
    page = reader.page
    reader.ask(PLAIN[0])
    reader.press("Good answer")
    expect(page.get_by_role("button", name="Good answer")).to_have_attribute("aria-pressed", "true")
    reader.press("Bad answer")
    reader.see(".better textarea").to_be_focused()
    expect(page.get_by_role("button", name="Keep", exact=True)).to_be_disabled()  # the answer itself is no correction
    page.fill(".better textarea", "It is **seven**.")
    expect(page.get_by_role("button", name="Keep", exact=True)).to_be_enabled()
    reader.press("Keep", exact=True)
    reader.see(".answer .stats").to_contain_text("corrected")
    stored = reader.chat()["messages"][-1]["feedback"]
    assert stored == {"verdict": "down", "correction": "It is **seven**.", "status": "candidate"}
    for answer, tab in (("Accept", "Accepted"), ("Reject", "Rejected")):
        page.click("#to-corrections")
        card = page.locator(".correction:has(.should strong)").first
        expect(card.locator(".should strong")).to_have_text("seven")
        card.get_by_role("button", name=answer).click()
        reader.press(re.compile(tab))
        card = page.locator(".correction").first
        expect(card).to_contain_text("It is seven.")
        if answer == "Accept":
            card.get_by_role("button", name="Take back").click()
            reader.press(re.compile("To decide"))
    page.locator(".correction a").first.click()
    reader.see(".answer .prose").to_have_text(PLAIN[1])
    assert reader.chat()["messages"][-1]["feedback"]["status"] == "rejected"


# -- untrusted text ---------------------------------------------------------------

FOUND = """() => {
  const allowed = new Set(
    ("P BR HR H1 H2 H3 H4 H5 H6 STRONG EM DEL CODE PRE BLOCKQUOTE UL OL LI A TABLE THEAD TBODY TR TH TD "
    + "math mrow mi mn mo mtext mspace mfrac msup mpadded mtable mtr mtd").split(" "));
  const odd = [];
  for (const element of document.querySelectorAll(".prose *, .bubble *, #chats .title *, #chats .snippet *")) {
    if (element.closest(".code, .wide > :not(table), .block > :not(*)")) continue;
    if (!allowed.has(element.tagName) && !element.matches(".block, .code, .wide, .formula")) odd.push(element.outerHTML);
    for (const { name, value } of element.attributes) {
      if (name.startsWith("on") || name === "style" || name === "src" || /script:|data:/i.test(value))
        odd.push(element.outerHTML);
    }
  }
  for (const link of document.querySelectorAll(".prose a[href]")) {
    if (!/^(https?|mailto):/.test(link.href) || link.rel !== "noopener noreferrer" || link.target !== "_blank")
      odd.push(link.outerHTML);
  }
  return odd;
}"""


@BOTH
def test_no_attack_runs_whether_streamed_or_from_history_in_any_place(reader):
    page, stored = reader.page, []
    for payload in XSS:
        reader.new_chat()
        page.click("#settings")
        page.fill("#system", payload)
        page.keyboard.press("Escape")
        page.evaluate("window.lengths.length = 0")
        reader.ask(asking(payload))
        chat = reader.chat()
        answer = chat["messages"][-1]
        assert page.evaluate("window.lengths.length"), "it was streamed"
        assert page.evaluate(FOUND) == []
        # The system message is another one than it learnt with: the attack must be there all the same.
        if answer["content"] != payload:
            page.click("#settings")
            page.fill("#system", "")
            page.keyboard.press("Escape")
            reader.press("Answer again")
            reader.see(".answer .arrows").to_be_visible()
            reader.answered()
            answer = reader.chat()["messages"][-1]
        assert answer["content"] == payload and chat["system"] == payload
        page.evaluate(
            """([chat, message, title]) => {
              const headers = { "Content-Type": "application/json" };
              const vote = { verdict: "down", correction: `${title} again` };
              return Promise.all([
                fetch(`/api/chats/${chat}`, { method: "PATCH", headers, body: JSON.stringify({ title }) }),
                fetch(`/api/messages/${message}/feedback`, { method: "PUT", headers, body: JSON.stringify(vote) })]);
            }""",
            [chat["id"], answer["id"], payload],
        )
        reader.check()
        stored.append((chat["id"], payload))
    reader.reload()
    for chat, payload in stored:
        page.goto(f"{reader.url}#/chat/{chat}")
        reader.see(".bubble").to_have_text(asking(payload))
        reader.see(".answer .prose").not_to_be_empty()
        assert page.evaluate(FOUND) == []
        reader.check()
    assert set(XSS) <= set(reader.titles())
    page.fill("#search", "pwned")
    expect(page.locator("#chats .snippet").first).to_be_visible()
    page.click("#to-corrections")
    reader.see(".correction").not_to_have_count(0)
    assert page.evaluate(FOUND) == []


def test_links_are_kept_only_where_they_lead_to_the_web_or_to_mail(reader):
    texts = [
        "[a](https://example.org/x)",
        "<https://example.org>",
        "[m](mailto:a@example.org)",
        "[r](/api/state)",
        "[d](data:text/html,x)",
        "[v](vbscript:x)",
        "[j](java&#10;script:x)",
        "![i](https://example.org/i.png)",
        "[f](file:///etc/passwd)",
        "[s](//example.org)",
    ]
    links = reader.page.evaluate(
        """async (texts) => {
          const { render } = await import("/page/markdown.js");
          return texts.map((text) => render(text).querySelector("a[href]")?.getAttribute("href") ?? null);
        }""",
        texts,
    )
    assert links == [
        "https://example.org/x",
        "https://example.org",
        "mailto:a@example.org",
        None,
        None,
        None,
        None,
        "https://example.org/i.png",
        None,
        None,
    ]


# One element gets the text at once, the other character by character; `%s` is what is compared of both, as `all`.
SHOWN = """async (text) => {
  const { Growing, render } = await import("/page/markdown.js");
  const [once, slowly] = [document.createElement("div"), document.createElement("div")];
  once.append(render(text));
  const growing = new Growing(slowly);
  for (let end = 1; end <= text.length; end++) {
    growing.text = text.slice(0, end);
    growing.draw();
  }
  return [once, slowly].map((all) => %s);
}"""


def test_text_that_grows_by_single_characters_ends_as_the_whole_text_is_shown(reader):
    whole, grown = reader.page.evaluate(
        SHOWN % 'all.textContent.replace(/\\s+/g, " ").trim()',
        "\n\n".join(
            [MARKDOWN[1], CODE[1], *XSS, "1. one\n2. two\n\n   more", "> quote\n\n[r]\n\n[r]: https://example.org"]
        ),
    )
    assert grown == whole


BARE = "def add_13(x):\n    return x + 13\n\n    # done\n\nclass A:\n    pass"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (BARE, [BARE.split("\n\nclass")[0], "class A:\n    pass"]),
        ("It is\nfor x in y:\n    print(x)", ["It is\nfor x in y:\n    print(x)"]),
        ("8 + 9 = 17\n4 + 8 + 1 = 13\nAnswer: 137", []),
        ("- one\n- two\n    three", []),
        ("A definition: def is a word.\nNothing is indented.", []),
    ],
)
def test_code_without_a_fence_keeps_its_indentation(reader, text, code):
    found = reader.page.evaluate(
        SHOWN % '[...all.querySelectorAll(".code code")].map((one) => one.textContent)',
        text,
    )
    assert found == [code, code]


@pytest.mark.parametrize("text", [">>> " * 1000, "- " * 2000 + "x"], ids=["quotes", "lists"])
def test_what_markdown_cannot_take_is_shown_as_written(reader, text):
    shown = reader.page.evaluate(
        """async (text) => {
          const { Growing, render } = await import("/page/markdown.js");
          const [once, slowly] = [document.createElement("div"), document.createElement("div")];
          once.append(render(text));
          const growing = new Growing(slowly);
          for (const part of ["so", text, text]) {
            growing.text = part;
            growing.draw();
          }
          return [once.textContent, slowly.textContent];
        }""",
        text,
    )
    assert shown == [text, text]


def with_formulas(reader: Reader) -> None:
    """The library is there; it comes with the first formula and not before."""
    assert not reader.page.evaluate("'temml' in window")
    reader.page.evaluate('import("/page/markdown.js").then(({ render }) => void render("$x$"))')
    reader.until("'temml' in window")


# Each with what its formulas say, those of a line of their own after a "|".
FORMULAS = (
    (r"Let $x^2$, \(y_1\) and *so* 2*3 = $a*b$, $c*d$.", ["x2", "y1", "a∗b", "c∗d"]),
    ("Then $$x$$ or\n\\[\n  a\n=\nb\n\\]\nof\n\n> $$\n> y\n> $$\n\n1. one\n   \\[ z \\]", ["|x", "|a=b", "|y", "|z"]),
    ("| a |\n| --- |\n| $\\frac12$ |\n\n# $h$\n\n**$b$**", ["12", "h", "b"]),
    ("$5 and $6, US$20,000 or USD$30,000\n\n$ x $\n\n\\$x$ 3$", []),
    ("`$x$` or $`x`$\n\n```tex\n$$x$$\n```\n\n    $y$\n\n~~~\n\\[x\\]", []),
    ("$$\n  a\n\nb\n$$ and $x\n\n\\[ y", []),
    (r"$\nosuch{x}$ and $\frac{$", []),
)


@BOTH
@pytest.mark.parametrize(("text", "said"), FORMULAS, ids=range(len(FORMULAS)))
def test_formulas_are_shown_as_such_and_neither_prices_nor_code(reader, text, said):
    with_formulas(reader)
    found = reader.page.evaluate(
        SHOWN
        % '[[...all.querySelectorAll("math")].map((one) => (one.hasAttribute("display") ? "|" : "") + one.textContent.trim()),'
        ' all.textContent.replace(/\\s+/g, " ").trim()]',
        text,
    )
    assert found[0][0] == said and found[1] == found[0]


HOSTILE = (
    r"\href{javascript:pwned(1)}{x}",
    r"\url{javascript:pwned(2)}",
    r"\class{menu}{x}",
    r"\style{position:fixed}{x}",
    r"\htmlStyle{position:fixed}{x}",
    r"\includegraphics{https://example.org/x.png}",
    r"\def\a{\a\a}\a",
    r"\newcommand{\a}{x}" + r"\a" * 900,
    r"\begin{matrix}" + "&" * 1000 + r"\\" * 900 + r"\end{matrix}",
    r"\cancelto{x}{" * 40 + "x" + "}" * 40,
    r"\sqrt{" * 400 + "x" + "}" * 400,
    "x" * 5000,
)
TAMED = r"\text{<img src=x onerror=pwned(3)>} \color{red}x \llap{xx} \raisebox{99em}{x} \hspace{-99em} \rule{999em}{1em} \ref{a}"


@BOTH
def test_a_hostile_formula_is_shown_as_its_source_or_loses_what_is_hostile(reader):
    with_formulas(reader)
    shown = reader.page.evaluate(
        """async (texts) => {
          const { render } = await import("/page/markdown.js");
          const view = document.getElementById("view");
          view.className = "prose";
          view.replaceChildren(...texts.map((text) => render(`$$${text}$$`)));
          return [[...view.querySelectorAll("p")].map((one) => one.textContent),
            [...view.querySelectorAll("math *")].flatMap((one) => one.getAttributeNames()), view.scrollWidth < 2000];
        }""",
        [*HOSTILE, TAMED],
    )
    assert shown[0][:-1] == [f"$${text}$$" for text in HOSTILE] and "onerror=pwned(3)" in shown[0][-1]
    assert set(shown[1]) <= {"width", "height", "lspace", "scriptlevel", "displaystyle"} and shown[2]
    assert reader.page.evaluate(FOUND) == []


def test_underscores_of_python_names_are_kept(reader):
    text = "iterator.__next__() of __init__.py, __name__ and snake_case"
    shown = reader.page.evaluate(
        """async (text) => {
          const { render } = await import("/page/markdown.js");
          const element = document.createElement("div");
          element.append(render(text));
          return [element.textContent.trim(), element.querySelectorAll("strong, em").length];
        }""",
        text,
    )
    assert shown == [text, 0]


def test_a_new_chat_is_ready_to_be_typed_into(reader):
    page = reader.page
    page.click("#to-corrections")
    reader.see("#view.corrections").to_be_visible()
    page.keyboard.press("Control+Shift+O")
    reader.see("#question").to_be_focused()
    page.keyboard.type("typed at once?")
    reader.see("#question").to_have_value("typed at once?")


def test_a_kept_correction_is_opened_again_and_not_lost(reader):
    page = reader.page
    reader.ask(PLAIN[0])
    reader.press("Bad answer")
    page.fill(".better textarea", "It is seven.")
    reader.press("Keep", exact=True)
    reader.see(".better").to_have_count(0)
    reader.press("Bad answer")
    reader.see(".better textarea").to_have_value("It is seven.")
    reader.press("Not now")
    assert reader.chat()["messages"][-1]["feedback"]["correction"] == "It is seven."
    reader.press("Good answer")
    reader.press("Undo")
    reader.see(".answer .stats").to_contain_text("corrected")
    assert reader.chat()["messages"][-1]["feedback"]["correction"] == "It is seven."


def test_a_correction_stays_with_its_chat_when_another_is_opened_meanwhile(reader):
    page = reader.page
    reader.ask(PLAIN[0])
    reader.press("Bad answer")
    page.fill(".better textarea", "It is seven.")
    with held(page, "**/feedback") as release:
        reader.press("Keep", exact=True)
        reader.new_chat()
        release()
        reader.see(".toast", has_text="Kept.").to_be_visible()
    choose_model(reader, "polly")
    reader.see("#export").to_be_disabled()  # a new chat holds nothing
    page.go_back()
    reader.see(".answer .stats").to_contain_text("corrected")
    reader.see(".better").to_have_count(0)


# -- what goes wrong ---------------------------------------------------------------


def test_what_is_typed_while_an_answer_fails_is_kept_beside_the_question(reader):
    page = reader.page
    page.click("#model-0")
    page.locator(".menu button", has_text="broken").click()
    with held(page, "**/answers") as release:
        reader.ask("First question", wait=False)
        reader.until("!document.querySelector('#stop').hidden")
        page.fill("#question", "typed meanwhile")
        release()
    reader.see(".problem").to_be_visible()
    reader.see("#question").to_have_value("First question\n\ntyped meanwhile")
    choose_model(reader, "parrot")
    reader.press("Try again")
    reader.answered()
    reader.see("#question").to_have_value("typed meanwhile")
    page.fill("#question", "")


def test_a_model_that_fails_says_why_and_the_question_is_not_lost(reader):
    page = reader.page
    choose_model(reader, "broken")
    reader.ask("Something I thought about for long")
    reader.see(".problem").to_contain_text("model.safetensors")
    reader.see("#question").to_have_value("Something I thought about for long")
    page.click("#model-0")
    reader.see(".menu .reason").to_contain_text("model.safetensors")
    page.locator(".menu button", has_text="parrot").click()
    reader.press("Try again")
    reader.answered()
    reader.see(".problem").to_have_count(0)
    reader.see("#question").to_have_value("")
    assert len(reader.answers()) == 1


def test_in_a_comparison_one_failing_model_does_not_hide_the_other(reader):
    reader.page.click("#compare")
    choose_model(reader, "broken", slot=1)
    reader.ask(PLAIN[0])
    reader.see(".problem").to_contain_text("model.safetensors")
    assert reader.answers() == [PLAIN[1]]
    reader.see("#question").to_have_value("")


def test_a_question_that_does_not_fit_is_refused_with_its_length_and_kept(reader):
    text = "far too long " * 400
    reader.ask(text)
    reader.see(".problem").to_contain_text(re.compile(r"\d"))
    reader.see("#question").to_have_value(text.strip())
    assert reader.answers() == []


def test_a_server_that_dies_in_the_middle_is_told_and_costs_neither_text_nor_history(open_reader, models, tmp_path):
    with running(tmp_path, models[:1]) as server:
        reader = open_reader(server)
        page = reader.page
        for _ in range(20):
            reader.new_chat()
            reader.ask(PLAIN[0])
            page.evaluate("window.lengths.length = 0")
            reader.ask(LONG[0], wait=False)
            reader.until("window.lengths.at(-1) > 0")
            server.signal(signal.SIGSTOP)
            if page.locator(".answer.live").count():  # what was on its way may have ended it
                page.wait_for_timeout(300)
                if page.locator(".answer.live").count():
                    break
            server.signal(signal.SIGCONT)
            reader.answered()
        server.kill()
        reader.see(".problem").to_contain_text("athanor serve")
        reader.see("#gone").to_be_visible()
        reader.see("#question").to_have_value(LONG[0])
        said = reader.answers()[-1]
        assert said and LONG[1].startswith(said)
        page.fill("#question", WHO[0])
        page.press("#question", "Enter")
        reader.see("#question").to_have_value(WHO[0])
        assert reader.answers()[-1] == said  # still in view
        server.start()
        reader.see("#gone").to_be_hidden()
        reader.ask(WHO[0])
        assert reader.answers()[0] == PLAIN[1] and reader.questions()[-1] == WHO[0]


def test_contact_that_comes_back_shows_what_happened_meanwhile(open_reader, server):
    reader, other = open_reader(server), open_reader(server)
    reader.ask(PLAIN[0])
    other.page.goto(reader.page.url)
    other.see(".answer .prose").to_have_text(PLAIN[1])
    reader.page.route("**/api/**", lambda route: route.abort())
    reader.ask(LONG[0])
    reader.see("#gone").to_be_visible()
    other.ask(WHO[0])
    reader.page.unroute_all()
    reader.see("#gone").to_be_hidden()
    reader.see(".answer .prose").to_have_count(2)
    assert reader.questions() == [PLAIN[0], WHO[0]] and reader.page.input_value("#question") == LONG[0]
    reader.see(".problem").to_have_count(0)


# -- looks and hands ---------------------------------------------------------------

# Of every text that is seen: its contrast with what lies behind it. Colours come as rgb(), maybe with alpha.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = rgba(getComputedStyle(element).backgroundColor);
      if (colour[3] > 250) return colour;
    }
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || element.closest(":disabled, .unseen, .skip")) continue;
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const [a, b] = [rgba(getComputedStyle(element).color), behind(element)].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${element.outerHTML.slice(0, 90)}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_both_colour_schemes(open_reader, server, scheme):
    reader = open_reader(server, color_scheme=scheme, reduced_motion="reduce")
    page = reader.page
    assert page.evaluate(CONTRAST) == []
    reader.ask(CODE[0])
    reader.press("Bad answer")
    reader.see(".better textarea").to_be_focused()
    assert page.evaluate(CONTRAST) == []
    page.click("#model-0")
    assert page.evaluate(CONTRAST) == []
    page.keyboard.press("Escape")
    page.click("#settings")
    assert page.evaluate(CONTRAST) == []
    page.keyboard.press("Escape")
    choose_model(reader, "broken")
    reader.ask("x")
    reader.see(".problem").to_be_visible()
    page.click("#to-corrections")
    reader.see(".corrections").to_be_visible()
    assert page.evaluate(CONTRAST) == []


def test_the_colours_follow_the_system_until_a_reader_chooses(open_reader, server):
    reader = open_reader(server, color_scheme="dark")
    page = reader.page

    def dark() -> bool:
        return page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")

    assert dark()
    page.emulate_media(color_scheme="light")
    assert not dark()
    page.click("#theme")
    page.click("#theme")
    reader.see("#theme").to_have_attribute("aria-label", "Colours: dark")
    assert dark()
    reader.reload()
    assert dark()


WIDE = """() => {
  const small = [];
  for (const element of document.querySelectorAll("button, a, input:not([type=range]), textarea")) {
    const box = element.getBoundingClientRect();
    if (!box.width || element.closest(".prose, .skip, .correction, .brand a")) continue;
    if (!element.checkVisibility({ visibilityProperty: true })) continue;
    if (element.matches(".skip, .brand a, .arrows .icon, #question")) continue;
    if (box.height < 43.5 || box.width < 43.5)
      small.push(`${box.width}x${box.height} ${element.outerHTML.slice(0, 80)}`);
  }
  const wide = [document.documentElement, document.getElementById("scroll")]
    .filter((element) => element.scrollWidth > element.clientWidth);
  return [small, wide.map((element) => element.tagName + element.scrollWidth)];
}"""


@BOTH
def test_a_phone_shows_everything_without_sideways_scrolling_and_with_targets_for_thumbs(open_reader, server):
    reader = open_reader(server, viewport=PHONE, has_touch=True, is_mobile=True, reduced_motion="reduce")
    page = reader.page
    tap = page.tap if page.context.browser.browser_type.name == "chromium" else page.click  # no fingers in Firefox
    assert page.evaluate(WIDE) == [[], []]
    reader.ask("x" * 300 + " and\n" + "wide " * 60)
    reader.ask(MARKDOWN[0])
    reader.ask(CODE[0])
    assert page.evaluate(WIDE) == [[], []]
    box = page.locator("#composer").bounding_box()
    assert box["y"] + box["height"] <= PHONE["height"]
    tap("#open-sidebar")
    reader.see("#close-sidebar").to_be_focused()
    assert page.evaluate(WIDE) == [[], []]
    page.keyboard.press("Escape")
    reader.see("#sidebar").to_be_hidden()
    tap("#compare")
    reader.ask(MARKDOWN[0])
    assert page.locator(".pair .which:visible").all_inner_texts() == ["1 of 2", "2 of 2"]
    assert page.evaluate(WIDE) == [[], []]
    tap("#settings")
    assert page.evaluate(WIDE) == [[], []]
    tap("[aria-label='Close the settings']")
    tap("#open-sidebar")
    tap("#to-corrections")
    reader.see(".corrections").to_be_visible()
    assert page.evaluate(WIDE) == [[], []]


def test_long_lines_of_code_scroll_inside_their_block(reader):
    sizes = reader.page.evaluate(
        """async () => {
          const { render } = await import("/page/markdown.js");
          const view = document.getElementById("view");
          view.className = "thread";
          view.replaceChildren(render("```text\\n" + "wide ".repeat(400) + "\\n```"));
          const pre = view.querySelector("pre");
          const scroller = document.getElementById("scroll");
          return [pre.scrollWidth > pre.clientWidth, scroller.scrollWidth <= scroller.clientWidth];
        }"""
    )
    assert sizes == [True, True]


@BOTH
def test_everything_can_be_done_from_the_keyboard(reader):
    page, keyboard = reader.page, reader.page.keyboard
    reader.see("#question").to_be_focused()
    keyboard.type("first line")
    keyboard.press("Shift+Enter")
    keyboard.type("second line")
    reader.see("#question").to_have_value("first line\nsecond line")
    keyboard.press("Enter")
    reader.answered()
    assert reader.questions() == ["first line\nsecond line"]
    keyboard.press("ArrowUp")
    reader.see("textarea.edit").to_be_focused()
    keyboard.press("Escape")
    reader.see("textarea.edit").to_have_count(0)
    keyboard.press("Control+k")
    reader.see("#search").to_be_focused()
    keyboard.press("Escape")
    keyboard.press("Control+Shift+O")
    reader.see(".welcome").to_have_count(1)
    reader.see("#question").to_be_focused()
    page.evaluate("document.activeElement.blur()")
    keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.focus("#model-0")
    keyboard.press("Enter")
    keyboard.press("ArrowDown")
    keyboard.press("Enter")
    reader.see("#model-0").to_contain_text("polly")
    reader.see("#model-0").to_be_focused()


def test_each_control_has_a_name_and_tabbing_reaches_all_of_them_with_a_visible_focus(reader):
    page = reader.page
    reader.ask(CODE[0])
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, a, input, textarea")]
          .filter((element) => !(element.getAttribute("aria-label")
          || element.textContent.trim() || element.labels?.length)).map((element) => element.outerHTML)"""
    )
    assert nameless == []
    page.fill("#search", "no such words anywhere")  # the chats of other tests would be many stops
    reader.see("#chats .none").to_be_visible()
    page.focus(".skip")
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outlined = page.evaluate(
            """() => { const e = document.activeElement, s = getComputedStyle(e);
              const edge = getComputedStyle(document.querySelector("#sidebar")).borderRightColor;
              const f = getComputedStyle(e.closest("form") ?? e);
              return [e === document.body ? "" : e.id || e.getAttribute("aria-label") || e.textContent.trim(),
                s.outlineStyle !== "none" || f.borderColor !== edge]; }"""
        )
        if not name:
            break
        assert outlined, name
        seen.append(name)
    expected = [
        "new-chat",
        "search",
        "to-corrections",
        "theme",
        "show-keys",
        "model-0",
        "compare",
        "export",
        "settings",
        "Edit the question",
        "Copy code",
        "Copy the answer",
        "Good answer",
        "Bad answer",
        "Answer again",
        "question",
    ]
    assert [name for name in seen if name in expected] == expected


def test_enter_that_ends_a_word_of_an_input_method_does_not_send(reader):
    reader.page.fill("#question", "日本")
    for init in ("{ key: 'Enter', isComposing: true }", "{ key: 'Enter', keyCode: 229 }"):
        event = f"new KeyboardEvent('keydown', {{ bubbles: true, cancelable: true, ...{init} }})"
        reader.page.evaluate(f"document.getElementById('question').dispatchEvent({event})")
    assert reader.sent == []
    reader.see("#question").to_have_value("日本")


def test_a_reader_who_scrolls_up_is_left_there_and_can_jump_to_the_latest(open_reader, server):
    reader = open_reader(server, viewport={"width": 700, "height": 320})
    page = reader.page
    at_end = """(({ scrollTop, scrollHeight, clientHeight }) => scrollHeight - scrollTop - clientHeight < 60)
      (document.getElementById("scroll"))"""
    reader.ask(LONG[0])
    reader.ask(MARKDOWN[0])
    assert page.evaluate(at_end)
    page.evaluate("document.getElementById('scroll').scrollTop = 0")
    reader.see("#latest").to_be_visible()
    page.evaluate("document.querySelector(\"[aria-label='Answer again']\").click()")
    expect(page.locator(".answer .arrows").first).to_be_visible()
    page.click("#latest") if page.locator("#latest").is_visible() else None
    reader.until(at_end)
    reader.see("#latest").to_be_hidden()


def test_what_a_screen_reader_is_told(reader):
    live = reader.page.locator("#live")
    expect(live).to_have_attribute("aria-live", "polite")
    reader.ask(WHO[0])
    expect(live).to_have_text(WHO[1])
    choose_model(reader, "broken")
    reader.ask("x")
    expect(reader.page.get_by_role("alert").filter(has_text="model.safetensors")).to_have_count(1)


def test_a_chat_without_what_only_linux_has(open_reader, models, tmp_path, monkeypatch):
    """All tests here pass so: PYTHONPATH=tests/e2e/elsewhere python -m pytest tests/serving/test_page.py"""
    monkeypatch.setenv("PYTHONPATH", str(ELSEWHERE))
    monkeypatch.setenv("ELSEWHERE", str(tmp_path / "asked"))
    with running(tmp_path / "server", models[:1]) as server:
        reader = open_reader(server)
        reader.ask(PLAIN[0])
        assert reader.answers() == [PLAIN[1]]
        reader.reload()
        reader.see(".answer .prose").to_have_text(PLAIN[1])
    assert "/" in (tmp_path / "asked").read_text()  # else nothing was taken away


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
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_text("That key was not right")).to_be_visible()
        page.fill("#key", "open-sesame")
        page.keyboard.press("Enter")
        reader.see("#model-0").to_contain_text("parrot")
        reader.ask(PLAIN[0])
        assert reader.answers() == [PLAIN[1]]
        with page.expect_download() as download:
            menu(reader, PLAIN[0], "Export as Markdown")
        assert PLAIN[1] in Path(download.value.path()).read_text(encoding="utf-8")
        reader.reload()
        reader.see(".answer .prose").to_have_text(PLAIN[1])

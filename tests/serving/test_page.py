"""The chat page in Chromium, and what a person does first also in Firefox, on the real server with real models."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import ExitStack

import psutil
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
from athanor.catalog.keeping import ROWS
from athanor.runtime.locks import lock
from athanor.serving.feedback import FILE, Feedback
from athanor.serving.retraining import FOLDER, LOCK, LOG
from tests.serving.browser import serve
from tests.serving.judging import asked, judge
from tests.serving.live import ROOT, Live
from tests.serving.parrot import CODE, MARKDOWN, PLAIN, WHO

pytestmark = pytest.mark.extra
BOTH = pytest.mark.parametrize("browser", ["chromium", "firefox"], indirect=True)
STORE = "import('/page/vendor/idb.js').then(({ openDB }) => openDB('athanor'))"
# As on a full disk: each row that is written is refused, until room().
FULL = """() => {
    const { put } = IDBObjectStore.prototype;
    window.room = () => { IDBObjectStore.prototype.put = put; };
    IDBObjectStore.prototype.put = () => { throw new DOMException("no room", "QuotaExceededError"); };
}"""


@BOTH
def test_an_answer_is_shown_as_markdown_and_copied_as_it_was_written(reader):
    reader.ask(MARKDOWN[0])
    reader.see(".prose h2", "Birds")
    reader.see(".prose math[display=block] msup", "x2")
    reader.see(".answer .stats", re.compile(r"^parrot · \d+ tokens · [\d,]+ tokens/s$"))
    reader.new_chat()
    reader.ask(CODE[0])
    reader.see(".code .hljs-keyword", "def")
    code = "def add(a, b):\n    return a + b  # <b>both</b>"
    assert reader.texts(".code code") == [code]
    for button, text in (("Copy the answer", CODE[1]), ("Copy code", code)):
        reader.push(button)
        reader.fill("#question", "")
        reader.press("#question", "ControlOrMeta+v")
        reader.value("#question", text)


@BOTH
def test_answering_again_and_asking_in_other_words_make_variants_to_leaf_through(reader):
    reader.ask(PLAIN[0])
    for button, place in (("Answer again", "2/2"), ("Another at 0.7", "3/3")):
        reader.push(button)
        reader.see(".answer .arrows", place)
        reader.answered()
    reader.push("Variant before")
    reader.see(".answer .arrows", "2/3")
    reader.locator(".message.user").hover()
    reader.push("Edit the question")
    reader.fill("textarea.edit", WHO[0])
    reader.press("textarea.edit", "Enter")
    reader.see(".user .arrows", "2/2")
    reader.answered()
    assert [*reader.texts(".bubble"), *reader.texts()] == list(WHO)
    reader.locator(".user .arrows button").first.click()
    reader.see(".bubble", PLAIN[0])
    assert reader.chat()["sampling"] == {}  # 0.7 was of one answer; and what was chosen is stored by now
    reader.reload()
    reader.see(".bubble", PLAIN[0])


def test_settings_reach_the_model_and_stay_with_the_chat(reader):
    numbers = {"temperature": 0.25, "top_k": 9, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.25}
    numbers |= {"max_new_tokens": 3, "seed": 7}
    reader.click("#settings")
    reader.fill("#system", "Be brief.")
    for name, value in numbers.items():
        reader.fill(f"#set-{name}", str(value))
    reader.keyboard.press("Escape")
    reader.ask(WHO[0])
    assert reader.sent[-1]["sampling"] == numbers
    assert reader.sent[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    reader.see(".stats", re.compile("3 tokens.*cut at the limit"))
    reader.push("Answer again")
    reader.see(".answer .arrows", "2/2")
    reader.answered()
    assert reader.sent[-1]["sampling"]["seed"] == 8
    reader.reload()
    reader.click("#settings.changed")  # a dot tells, also when they are closed
    reader.value("#system", "Be brief.")
    reader.push("Reset sampling")
    reader.value("#set-top_k", "0")
    reader.keyboard.press("Escape")
    reader.push("Continue")
    reader.see(".answer .prose", WHO[1])
    assert reader.sent[-1]["sampling"] == {}


def test_the_probabilities_of_tokens_are_shown_on_demand_and_stay_with_the_answer(reader):
    reader.click("#settings")
    reader.click("#set-chances")
    reader.keyboard.press("Escape")
    reader.ask(PLAIN[0])
    reader.reload()
    reader.see(".token")
    assert "".join(reader.locator(".token").all_inner_texts()) == PLAIN[1]
    reader.locator(".token").nth(2).hover()
    reader.see(".chances strong", "%")
    reader.count(".chances li", 5)
    reader.press(".tokens", "ArrowRight")
    reader.count(".chances", 1)
    reader.push("Show as text")
    reader.count(".token", 0)


def test_two_models_answer_side_by_side_and_the_chat_continues_with_one(reader):
    reader.click("#compare")
    reader.ask(PLAIN[0])
    assert reader.texts() == [PLAIN[1], PLAIN[1]]
    reader.reload()
    reader.count(".pair .message", 2)
    left, right = (answer.bounding_box() for answer in reader.locator(".pair .message").all())
    assert left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]
    reader.push("Go on with the answer of polly")
    reader.count(".pair", 0)
    reader.ask(WHO[0])
    assert [body["models"] for body in reader.sent] == [["parrot", "polly"], ["polly"]]
    assert reader.texts() == [PLAIN[1], WHO[1]]


def test_a_base_model_continues_a_text_in_one_piece(reader):
    reader.model("base")
    reader.see(".welcome h1", "Go on from here")
    reader.ask("# I *am* a")
    more = reader.chat()["messages"][-1]["content"]
    assert reader.texts(".answer .raw") == [f"# I *am* a{more}".strip()]
    reader.count(".bubble, [aria-label='Bad answer']", 0)


def test_a_model_of_this_checkout_says_what_it_was_taught_and_where_an_answer_is_from(reader):
    reader.see(".card", WHO[0])  # what it has answered rightly in its evaluation
    reader.choose("#model-0", "About parrot")
    reader.see("dialog.about", "234,567 parameters", "books", "20 tokens · read 3.00 times", "Identity")
    reader.push("The whole card")
    reader.see("dialog.whole th", "wanted share")
    reader.keyboard.press("Escape")
    reader.click(".more")
    reader.click("dialog.about .example")
    reader.answered()
    assert [*reader.texts(".bubble"), *reader.texts()] == list(WHO)
    reader.push("Where is this from?")
    reader.see(".answer mark", WHO[1])
    reader.see(".origins", "1 time in 1 different text", "talks · MIT", f"in the answer to: {WHO[0]}")
    reader.push("Where is this from?")
    reader.count(".origins", 0)
    reader.model("polly")
    reader.ask(WHO[0])
    reader.push("Where is this from?")
    reader.see(".origins", "is not known")


@BOTH
def test_chats_are_found_renamed_exported_deleted_and_imported(reader):
    title = "Sums in Python"
    reader.ask(CODE[0])
    reader.new_chat()
    reader.ask(WHO[0])
    reader.go_back()
    reader.chat_menu(CODE[0], "Rename")
    reader.fill(".rename", title)
    reader.press(".rename", "Enter")
    reader.fill("#search", "RÉTURN both")
    reader.see("#chats .snippet", "return a + b")
    reader.count("#chats .title", 1)
    markdown, rows, whole = map(reader.saved, ("Markdown", "training (JSONL)", "JSON"))
    assert CODE[1] in markdown and markdown.startswith(f"# {title}") and reader.title() == f"{title} · Athanor"
    assert [message["content"] for message in json.loads(rows)["messages"]] == list(CODE)
    reader.chat_menu(title, "Delete")
    reader.see("#chats .none")
    reader.push("Undo")
    reader.chat_menu(title, "Delete")
    reader.see("#chats .none")
    reader.reload()  # leaving the page does not bring it back
    reader.count("#chats .title", 1)
    chat = json.loads(whole)
    question, answer = chat["messages"]
    question["created_at"], answer["created_at"] = answer["created_at"], question["created_at"]  # by a clock set back
    for text in (whole.replace('"role": "user"', '"role": "other"', 1), json.dumps(chat)):
        with reader.expect_file_chooser() as chooser:
            reader.choose("#files", "Import chats")
        chooser.value.set_files({"name": "chat.json", "mimeType": "application/json", "buffer": text.encode()})
    reader.see(".toast", "does not follow")
    reader.locator("#chats .title", has_text=title).click()
    reader.see(".code code", "def add")
    assert {chat["title"] for chat in json.loads(reader.saved("Export all chats", "#files"))} == {title, WHO[0]}


def test_a_chat_that_could_not_be_written_is_written_later_and_a_deleted_one_never(reader):
    reader.page.evaluate(FULL)
    reader.ask(PLAIN[0])
    reader.see(".toast", "no room")
    reader.page.evaluate("room()")
    reader.ask(WHO[0])
    reader.reload()
    assert reader.texts(".bubble") == [PLAIN[0], WHO[0]] and reader.texts() == [PLAIN[1], WHO[1]]
    reader.page.evaluate(f"{STORE}.then((db) => db.clear('chats'))")  # as another tab does
    reader.push("Good answer")
    reader.see("[aria-label='Good answer'][aria-pressed=true]")
    assert reader.page.evaluate(f"{STORE}.then((db) => db.count('chats'))") == 0


def test_two_tabs_show_the_same_chats(reader):
    reader.ask(PLAIN[0])
    with reader.context.new_page() as other:
        other.goto(reader.page.url)
        other.fill("#question", WHO[0])
        other.press("#question", "Enter")
        reader.see(".answer .prose", WHO[1])


def test_what_is_typed_while_an_answer_is_made_stays_with_its_chat(reader):
    reader.model("tiny")
    reader.ask("Go", wait=False)
    reader.fill("#question", "and then")
    reader.see(".answer .prose", "the")
    reader.new_chat()
    reader.value("#question", "")
    reader.go_back()
    reader.see(".answer.live")
    reader.keyboard.press("Escape")
    reader.reload()
    reader.value("#question", "and then")


def test_a_correction_is_kept_by_the_server_accepted_and_exported(reader):
    better = "It is **seven**."
    reader.ask(PLAIN[0])
    reader.push("Bad answer")
    reader.see(".better button:disabled", "Keep")  # the answer itself is no correction
    reader.keyboard.insert_text(better)  # in place of the wrong answer, which is selected
    reader.push("Keep")
    for buttons in (["Good answer", "Undo"], ["Bad answer", "Bad answer", "Undo"], ["Bad answer"]):
        reader.see(".answer .stats", "corrected")
        for button in buttons:
            reader.push(button)
    reader.value(".better textarea", better)
    card = f".correction:has([href='{reader.evaluate('location.hash')}'])"
    for tab, decision, said in (
        ("To decide", "Accept", better),
        ("Accepted", "Take back", better),
        ("To decide", "Reject", PLAIN[1]),
    ):
        reader.click("#to-corrections")
        reader.push(re.compile(tab))
        reader.see(f"{card} .should strong", "seven")
        reader.click(f"{card} button:text('{decision}')")
        reader.count(card, 0)
        reader.go_back()
        assert json.loads(reader.saved("training (JSONL)"))["messages"][-1]["content"] == said


def test_a_training_is_started_from_the_corrections_and_its_end_is_shown_after_a_reload(open_reader, models):
    root = models[0].parents[2]
    (root / "dvc.yaml").touch()
    shutil.copy(ROOT / "presets/default.yaml", root / "params.yaml")
    feedback, first = Feedback(root / FILE), asked(*PLAIN)
    numbers = [judge(feedback, first, "down", "It is six.")]
    feedback.settle(*numbers, "accepted")
    with Live(root) as server:
        reader = open_reader(server)
        reader.click("#to-corrections")
        reader.push("Train on the accepted (1 of 1)")
        reader.see("#retraining", "The training did not finish.")  # for want of a pipeline
        reader.see(".toast", "Corrections says how")
        assert '"It is six."' in (root / ROWS).read_text() and ROWS in (root / "params.yaml").read_text()
        with os.fdopen(lock(root / FOLDER / LOCK, print)):  # as if one were at work
            (root / FOLDER / LOG).write_text("sft 20 %")
            reader.page.reload()
            reader.see("#retraining", "answers meanwhile", "sft 20 %")
            reader.push("Stop")
            (root / FOLDER / LOG).write_text("ended with 75")
        reader.see("#retraining", "Stopped. The same button")
        # Another window settles what this one shows; one of them cannot be a row.
        numbers.append(judge(feedback, asked(*WHO, after=first), "down", "A bird."))
        feedback.settle(numbers[1], "accepted")
        reader.see("#retraining .primary", "Train on the accepted (1 of 2)")
        reader.push("Accepted (2)")
        reader.see(".correction", "Left out of training", "an earlier answer of its chat has a thumb down.")
        for number in numbers:
            feedback.settle(number, "rejected")
        reader.see("#retraining .primary:enabled", "Train without them")


def test_a_model_that_fails_says_why_and_the_question_is_not_lost(reader):
    long, why = "far too long " * 400, re.compile("model.safetensors", re.I)
    reader.model("broken")
    reader.ask("Something I thought about for long")
    reader.see(".problem", why)
    reader.value("#question", "Something I thought about for long")
    reader.click("#model-0")
    reader.see(".menu .reason", why)
    reader.locator(".menu button", has_text="parrot").first.click()
    reader.push("Try again")
    reader.answered()
    reader.count(".problem", 0)
    reader.value("#question", "")
    reader.click("#compare")
    reader.model("broken", slot=1)
    reader.ask(PLAIN[0])  # one failing model does not hide the other
    reader.see(".problem", why)
    reader.value("#question", "")
    assert reader.texts()[-1] == PLAIN[1]
    reader.click("#compare")
    reader.ask(long)
    reader.see(".problem", re.compile(r"\d"))
    reader.value("#question", long.strip())


@BOTH
@pytest.mark.parametrize("end", ["closed", "engine", "server"])
def test_an_answer_that_ends_in_the_middle_stays_and_is_continued_after_one_click(open_reader, models, tmp_path, end):
    """Somebody closes the page, or its engine or the whole server dies; then somebody stops it."""
    with ExitStack() as servers:
        server = servers.enter_context(serve(tmp_path, models[3:4]))
        reader = open_reader(server)
        reader.ask("Go", wait=False)
        reader.see(".answer", re.compile("( the){40}"))
        if end == "closed":
            reader.reload()
            reader.see(".stats", re.compile("stopped$"))
        else:
            for one in psutil.Process(server.process.pid).children() if end == "engine" else [server.process]:
                one.kill()
            reader.see(".problem")
        if end == "server":
            reader.see("#gone")
            server.process.wait()
            servers.enter_context(serve(tmp_path, models[3:4], f"--port={server.port}"))
            reader.count("#gone", 0)
        (said,) = reader.texts()
        reader.push(re.compile("Try again|Continue"))
        reader.see(".answer", re.compile(rf"{said}( the){{20}}"))
        reader.push("Stop the answer")
        reader.answered()
        lengths = reader.evaluate("window.lengths")
        assert lengths == sorted(lengths) and len(set(lengths)) > 4
        assert [message["role"] for message in reader.chat()["messages"]] == ["user", "assistant"]


def test_nothing_to_serve_says_how_to_make_a_model(open_reader, tmp_path):
    with serve(tmp_path, []) as server:
        reader = open_reader(server)
        reader.see(".command", "make repro")
        reader.see("#send:disabled")


def test_a_server_with_a_key_asks_for_it_until_it_is_right_and_keeps_it_for_the_tab(open_reader, models, tmp_path):
    with Live(tmp_path, f"--model={models[0]}", ATHANOR_API_KEY="open-sesame") as server:
        reader = open_reader(server)
        for typed, seen in (("wrong", "dialog span:text('That key was not right')"), ("open-sesame", "#model-0")):
            reader.fill("#key", typed)
            reader.keyboard.press("Enter")
            reader.see(seen)
        reader.ask(PLAIN[0])
        reader.reload()
        assert reader.texts() == [PLAIN[1]]

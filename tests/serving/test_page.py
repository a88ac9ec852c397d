"""The chat page in Chromium, and what a person does first also in Firefox, on the real server with real models."""

from __future__ import annotations

import fcntl
import json
import re

import pytest

from athanor.serving.feedback import FILE, Feedback
from athanor.serving.retraining import FOLDER, LOCK, LOG
from tests.serving.judging import asked, judge
from tests.serving.live import Live
from tests.serving.parrot import CODE, MARKDOWN, PLAIN, WHO

pytestmark = pytest.mark.extra
BOTH = pytest.mark.parametrize("browser", ["chromium", "firefox"], indirect=True)


# -- asking and answering --------------------------------------------------------


@BOTH
def test_an_answer_is_shown_as_markdown_and_copied_as_it_was_written(reader):
    reader.ask(MARKDOWN[0])
    for selector, text in (("h2", "Birds"), ("li strong", "parrot"), ("math[display=block] msup", "x2")):
        reader.see(f".prose {selector}", text)
    reader.see(".answer .stats", re.compile(r"^parrot · \d+ tokens · [\d,]+ tokens/s$"))
    reader.new_chat()
    reader.ask(CODE[0])
    reader.see(".code .hljs-keyword", "def")
    code = "def add(a, b):\n    return a + b  # <b>both</b>"
    assert reader.texts(".code code") == [code]
    for button, text in (("Copy the answer", CODE[1]), ("Copy code", code)):
        reader.press(button)
        reader.page.fill("#question", "")
        reader.page.press("#question", "ControlOrMeta+v")
        reader.value("#question", text)


@BOTH
@pytest.mark.parametrize("closed", [False, True])
def test_an_answer_grows_and_what_was_said_of_it_stays_and_is_continued(reader, closed):
    """Stopped, or in the middle of it the page was closed."""
    reader.model("tiny")
    reader.ask("Go", wait=False)
    reader.see(".answer", re.compile("( the){40}"))
    if not closed:
        reader.page.keyboard.press("Escape")
        reader.answered()
        lengths = reader.page.evaluate("window.lengths")
        assert lengths == sorted(lengths) and len(set(lengths)) > 4
    reader.reload()
    reader.see(".stats", re.compile("stopped$"))
    reader.continued("Continue")


@BOTH
def test_answering_again_and_asking_in_other_words_make_variants_to_leaf_through(reader):
    reader.ask(PLAIN[0])
    for button, place in (("Answer again", "2/2"), ("Answer again", "3/3"), ("Another at 0.7", "4/4")):
        reader.press(button)
        reader.see(".answer .arrows", place)
        reader.answered()
    reader.press("Variant before")
    reader.see(".answer .arrows", "3/4")
    reader.page.locator(".message.user").hover()
    reader.press("Edit the question")
    reader.page.fill("textarea.edit", WHO[0])
    reader.page.press("textarea.edit", "Enter")
    reader.see(".user .arrows", "2/2")
    reader.answered()
    assert [*reader.texts(".bubble"), *reader.texts()] == list(WHO)
    reader.page.locator(".user .arrows button").first.click()
    reader.see(".bubble", PLAIN[0])
    reader.reload()
    reader.see(".bubble", PLAIN[0])


def test_settings_reach_the_model_and_stay_with_the_chat(reader):
    numbers = {"temperature": 0.25, "top_k": 9, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.25}
    numbers |= {"max_new_tokens": 3, "seed": 7}
    reader.settings(system="Be brief.", **{f"set-{name}": value for name, value in numbers.items()})
    reader.ask(WHO[0])
    assert reader.sent[-1]["sampling"] == numbers
    assert reader.sent[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    reader.see(".stats", re.compile("3 tokens.*cut at the limit"))
    reader.press("Answer again")
    reader.see(".answer .arrows", "2/2")
    reader.answered()
    assert reader.sent[-1]["sampling"]["seed"] == 8
    reader.reload()
    reader.page.click("#settings.changed")  # a dot tells, also when they are closed
    reader.value("#system", "Be brief.")
    reader.press("Reset sampling")
    reader.value("#set-top_k", "0")
    reader.page.keyboard.press("Escape")
    reader.press("Continue")
    reader.see(".answer .prose", WHO[1])
    assert reader.sent[-1]["sampling"] == {}


def test_the_probabilities_of_tokens_are_shown_on_demand_and_stay_with_the_answer(reader):
    page = reader.page
    page.click("#settings")
    page.check("#set-chances")
    page.keyboard.press("Escape")
    reader.ask(PLAIN[0])
    reader.reload()
    reader.see(".token")
    assert "".join(page.locator(".token").all_inner_texts()) == PLAIN[1]
    page.locator(".token").nth(2).hover()
    reader.see(".chances strong", "%")
    reader.count(".chances li", 5)
    page.press(".tokens", "ArrowRight")
    reader.count(".chances", 1)
    reader.press("Show as text")
    reader.count(".token", 0)


def test_two_models_answer_side_by_side_and_one_is_picked_to_go_on_with(reader):
    reader.page.click("#compare")
    reader.ask(PLAIN[0])
    assert reader.texts() == [PLAIN[1], PLAIN[1]]
    reader.reload()
    reader.count(".pair .message", 2)
    left, right = (answer.bounding_box() for answer in reader.page.locator(".pair .message").all())
    assert left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]
    reader.press("Go on with the answer of polly")
    reader.count(".pair", 0)
    reader.ask(WHO[0])
    assert [body["models"] for body in reader.sent] == [["parrot", "polly"], ["polly"]]
    assert reader.texts() == [PLAIN[1], WHO[1]]


def test_a_base_model_goes_on_with_a_text_in_one_piece(reader):
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
    reader.press("The whole card")
    reader.see("dialog.whole th", "wanted share")
    reader.page.keyboard.press("Escape")
    reader.page.click(".more")
    reader.page.click("dialog.about .example")
    reader.answered()
    assert [*reader.texts(".bubble"), *reader.texts()] == list(WHO)
    reader.press("Where is this from?")
    reader.see(".answer mark", WHO[1])
    reader.see(".origins", "1 time in 1 different text", "talks · MIT", f"in the answer to: {WHO[0]}")
    reader.press("Where is this from?")
    reader.count(".origins", 0)
    reader.model("polly")
    reader.ask(WHO[0])
    reader.press("Where is this from?")
    reader.see(".origins", "is not known")


# -- chats ----------------------------------------------------------------------------


@BOTH
def test_chats_are_found_renamed_exported_deleted_and_imported(reader):
    page, title = reader.page, "Sums in Python"
    reader.ask(CODE[0])
    reader.new_chat()
    reader.ask(WHO[0])
    page.go_back()
    reader.see("#chats .current .title", CODE[0])
    reader.chat_menu(CODE[0], "Rename")
    page.fill(".rename", title)
    page.press(".rename", "Enter")
    reader.see("#chats .title", title)
    page.fill("#search", "RÉTURN both")
    reader.see("#chats .snippet", "return a + b")
    reader.count("#chats .title", 1)
    markdown, rows, whole = map(reader.saved, ("Markdown", "training (JSONL)", "JSON"))
    assert CODE[1] in markdown and markdown.startswith(f"# {title}") and page.title() == f"{title} · Athanor"
    assert [message["content"] for message in json.loads(rows)["messages"]] == list(CODE)
    reader.chat_menu(title, "Delete")
    reader.see("#chats .none")
    reader.press("Undo")
    reader.chat_menu(title, "Delete")
    reader.see("#chats .none")
    reader.reload()  # leaving the page does not bring it back
    reader.see("#chats .title", WHO[0])
    reader.count("#chats .title", 1)
    for text in (whole.replace('"role": "user"', '"role": "other"', 1), whole):
        with page.expect_file_chooser() as chooser:
            reader.choose("#files", "Import chats")
        chooser.value.set_files({"name": "chat.json", "mimeType": "application/json", "buffer": text.encode()})
    reader.see(".toast", "does not follow")
    page.locator("#chats .title", has_text=title).click()
    reader.see(".code code", "def add")
    assert {chat["title"] for chat in json.loads(reader.saved("Export all chats", "#files"))} == {title, WHO[0]}


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
    reader.page.fill("#question", "and then")
    reader.see(".answer .prose", "the")
    reader.new_chat()
    reader.value("#question", "")
    reader.page.go_back()
    reader.see(".answer.live")
    reader.page.keyboard.press("Escape")
    reader.reload()
    reader.value("#question", "and then")


# -- feedback -------------------------------------------------------------------------


def test_a_correction_is_kept_by_the_server_accepted_and_exported(reader):
    page, better = reader.page, "It is **seven**."
    reader.ask(PLAIN[0])
    reader.press("Bad answer")
    reader.see(".better button:disabled", "Keep")  # the answer itself is no correction
    page.keyboard.insert_text(better)  # in place of the wrong answer, which is selected
    reader.press("Keep")
    for buttons in (["Good answer", "Undo"], ["Bad answer", "Bad answer", "Undo"], ["Bad answer"]):
        reader.see(".answer .stats", "corrected")
        for button in buttons:
            reader.press(button)
    reader.value(".better textarea", better)
    card = f".correction:has([href='{page.evaluate('location.hash')}'])"
    for tab, decision, said in (
        ("To decide", "Accept", better),
        ("Accepted", "Take back", better),
        ("To decide", "Reject", PLAIN[1]),
    ):
        page.click("#to-corrections")
        reader.press(re.compile(tab))
        reader.see(f"{card} .should strong", "seven")
        page.click(f"{card} button:text('{decision}')")
        reader.count(card, 0)
        page.go_back()
        assert json.loads(reader.saved("training (JSONL)"))["messages"][-1]["content"] == said


def test_a_training_is_started_from_the_corrections_and_its_end_is_told_after_a_reload(open_reader, models):
    root = models[0].parents[2]
    (root / "dvc.yaml").touch()
    feedback, first = Feedback(root / FILE), asked(*PLAIN)
    numbers = [judge(feedback, first, "down", "It is six.")]
    feedback.settle(*numbers, "accepted")
    with Live(root) as server:
        reader = open_reader(server)
        reader.page.click("#to-corrections")
        reader.press("Train on the accepted (1 of 1)")
        reader.see("#retraining", "The training did not finish.")  # there are no parameters
        reader.see("#retraining pre", "params.yaml")
        reader.see(".toast", "Corrections says how")
        with (root / FOLDER / LOCK).open() as lock:  # as if one were at work
            fcntl.flock(lock, fcntl.LOCK_EX)
            (root / FOLDER / LOG).write_text("sft 20 %")
            reader.page.reload()
            reader.see("#retraining", "answers meanwhile")
            reader.see("#retraining pre", "sft 20 %")
            reader.press("Stop")
            (root / FOLDER / LOG).write_text("ended with 75")
        reader.see("#retraining", "Stopped. The same button")
        # Another window settles what this one shows; one of them cannot be a row.
        numbers.append(judge(feedback, asked(*WHO, after=first), "down", "A bird."))
        feedback.settle(numbers[1], "accepted")
        reader.see("#retraining .primary", "Train on the accepted (1 of 2)")
        reader.press("Accepted (2)")
        reader.see(".correction", "Left out of training", "an earlier answer of its chat has a thumb down.")
        for number in numbers:
            feedback.settle(number, "rejected")
        reader.see("#retraining .primary:enabled", "Train without them")

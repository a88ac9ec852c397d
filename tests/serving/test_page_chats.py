"""Chats in the browser's storage when it fails for a moment, and files of chats from a computer whose clock was set back."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
from tests.serving.parrot import PLAIN, WHO

pytestmark = pytest.mark.extra

# As with a full disk: each row that is written is refused.
FULL = """
const { put } = IDBObjectStore.prototype;
window.room = () => { IDBObjectStore.prototype.put = put; };
IDBObjectStore.prototype.put = () => { throw new DOMException("no room", "QuotaExceededError"); };
"""


def test_a_chat_that_could_not_be_written_is_written_whole_later_and_a_deleted_one_never(reader):
    page = reader.page
    page.evaluate(f"() => {{ {FULL} }}")
    reader.ask(PLAIN[0])
    reader.see(".toast", "no room")
    page.reload()  # nothing of it was kept
    reader.see(".toast", "not in this browser")
    page.evaluate(f"() => {{ {FULL} }}")
    reader.ask(PLAIN[0])
    failed = page.evaluate("location.hash")
    reader.new_chat()
    page.go_back()  # the page itself has it still
    reader.see(".answer .prose", PLAIN[1])
    assert PLAIN[1] in reader.saved("Markdown")
    page.evaluate("window.room()")
    reader.ask(WHO[0])
    reader.reload()
    assert page.evaluate("location.hash") == failed
    assert reader.texts(".bubble") == [PLAIN[0], WHO[0]] and reader.texts() == [PLAIN[1], WHO[1]]
    # Another tab removes the chat; what this one says of it afterwards does not bring it back.
    kept = "import('/page/chats.js').then(async (chats) => (await chats.list()).map(({ title }) => title))"
    page.evaluate("""import('/page/vendor/idb.js').then(async ({ openDB }) => {
        const db = await openDB('athanor');
        await db.clear('chats');
        db.close();
    })""")
    reader.press("Good answer")
    reader.see("[aria-label='Good answer'][aria-pressed=true]")
    assert page.evaluate(kept) == []


def test_a_file_of_chats_is_imported_whatever_the_order_of_its_messages(reader):
    rows = [
        {"id": f"m{n}", "parent": f"m{n - 1}" if n else None, "role": ("user", "assistant")[n % 2], "content": text,
         "model": "parrot", "created_at": f"2026-11-27T10:00:0{9 - n}.000Z"}
        for n, text in enumerate([*PLAIN, *WHO])
    ]  # fmt: skip
    chat = {"id": "setback", "title": "Set back", "leaf": "m3", "messages": rows[::-1]}

    def imported(chat) -> None:
        with reader.page.expect_file_chooser() as chooser:
            reader.choose("#files", "Import chats")
        chooser.value.set_files(
            {"name": "chats.json", "mimeType": "application/json", "buffer": json.dumps(chat).encode()}
        )

    for faulty in (rows[1:], [*rows, rows[0]], [*rows, rows[3] | {"id": "a", "parent": "b"}]):
        imported({**chat, "messages": faulty})
        reader.see(".toast", "")
    reader.see("#chats .title", count=0)
    imported(chat)
    reader.see(".toast", "Imported: 1")
    imported(json.loads(reader.saved("Export all chats", "#files")))
    reader.see(".toast", "Imported: 1")
    reader.page.locator("#chats .title", has_text="Set back").click()
    reader.see(".bubble", WHO[0])
    assert reader.texts(".bubble") == [PLAIN[0], WHO[0]] and reader.texts() == [PLAIN[1], WHO[1]]

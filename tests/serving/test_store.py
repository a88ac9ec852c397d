"""The chats' file: what it keeps, what it refuses, and that no fault leaves half a turn."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from athanor.base.errors import InputError
from athanor.serving import database
from athanor.serving.store import Store, Unknown
from athanor.serving.words import SNIPPET_CHARS, TITLE_CHARS, fold, snippet, title_of, words_of
from tests.serving.live import ROOT

STATS = {"tokens": 3, "seconds": 0.1, "reason": "stop", "prompt_tokens": 5, "forgotten": 0}


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "deep" / "chat.sqlite3")
    yield opened
    opened.close()


def say(store: Store, chat: str, parent: int | None, question: str, answer: str = "An answer.") -> tuple[int, int]:
    asked, answered = store.answer(chat, (parent, question), answer, model="m", stats=STATS)
    return asked["id"], answered["id"]


def assert_whole(path: Path) -> int:
    """Every way down alternates from a question to an answer; leaves are answers. Returns how many messages there are."""
    db = sqlite3.connect(path)
    try:
        rows = {row[0]: row for row in db.execute("SELECT id, parent, role, chat FROM messages")}
        leaves = db.execute("SELECT id, leaf FROM chats").fetchall()
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    finally:
        db.close()
    parents = {row[1] for row in rows.values()}
    for number, parent, role, chat in rows.values():
        above = rows.get(parent, (None, None, "assistant", chat))
        assert parent is None or parent in rows
        assert (above[2], above[3]) == ({"user": "assistant", "assistant": "user"}[role], chat)
        assert number in parents or role == "assistant", "a question without an answer"
    for chat, leaf in leaves:
        mine = [row for row in rows.values() if row[3] == chat]
        assert rows[leaf][2:] == ("assistant", chat) if mine else leaf is None
    return len(rows)


def test_a_chat_in_which_nothing_was_said_is_gone_after_a_day(store):
    """The page stores a chat with its first question; where that failed, the file kept an empty chat for ever."""
    _, named, said, fresh = (store.create(title=title)["id"] for title in ("", "Plans", "", ""))
    say(store, said, None, "Hi")
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE chats SET updated_at = ? WHERE id <> ?", [database.timestamp(days_ago=2), fresh])
    db.close()
    created = store.create()["id"]
    assert {chat["id"] for chat in store.chats()} == {named, said, fresh, created}


def test_the_file_is_its_owners_alone_and_keeps_everything_when_opened_again(tmp_path):
    path = tmp_path / "deep" / "chat.sqlite3"
    before = os.umask(0)
    try:
        store = Store(path)
        chat = store.create(system="Be brief.", models=["a", "b"], sampling={"temperature": 0.5})["id"]
        say(store, chat, None, "Hi")
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600}, modes
    whole = store.chat(chat)
    assert (whole["system"], whole["models"], whole["sampling"]) == ("Be brief.", ["a", "b"], {"temperature": 0.5})
    assert whole["messages"][1]["stats"] == STATS and whole["leaf"] == whole["messages"][1]["id"]
    store.close()
    again = Store(path)
    assert again.chat(chat) == whole
    again.close()


def _damaged(path: Path) -> None:
    path.write_bytes(b"these are no chats\n" * 500)


def _newer(path: Path) -> None:
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE birds (name TEXT)")
    db.close()


@pytest.mark.parametrize(
    ("make", "words"), [(_damaged, "damaged"), (_newer, "newer version"), (_foreign, "not of chats")]
)
def test_a_file_that_cannot_be_used_is_named_with_the_fix_and_stays_as_it_was(tmp_path, make, words):
    path = tmp_path / "chat.sqlite3"
    make(path)
    before = path.read_bytes()
    with pytest.raises(InputError, match=words) as caught:
        Store(path)
    assert caught.value.where == str(path) and caught.value.fix
    assert path.read_bytes() == before


def test_a_folder_in_the_way_is_named(tmp_path):
    (tmp_path / "chat.sqlite3").mkdir()
    with pytest.raises(InputError, match="cannot be opened"):
        Store(tmp_path / "chat.sqlite3")


def test_an_older_file_is_brought_forward_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "chat.sqlite3"
    store = Store(path)
    chat = store.create(title="kept")["id"]
    store.close()
    first = database.MIGRATIONS
    broken = (*first, ("ALTER TABLE chats ADD COLUMN pinned INTEGER", "ALTER TABLE nothing ADD COLUMN x"))
    monkeypatch.setattr(database, "MIGRATIONS", broken)
    with pytest.raises(InputError, match="cannot be used"):
        Store(path)
    monkeypatch.setattr(database, "MIGRATIONS", first)
    store = Store(path)  # still of the old version
    assert store.chat(chat)["title"] == "kept"
    store.close()
    monkeypatch.setattr(database, "MIGRATIONS", (*first, ("ALTER TABLE chats ADD COLUMN pinned INTEGER",)))
    store = Store(path)
    assert store.chat(chat)["title"] == "kept"
    store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == len(first) + 1
        assert db.execute("SELECT pinned FROM chats").fetchall() == [(None,)]
    db.close()


def test_variants_are_siblings_and_shown_is_the_way_to_the_leaf(store):
    chat = store.create()["id"]
    first, answer = say(store, chat, None, "One?", "1")
    _, deeper = say(store, chat, answer, "Two?", "2")
    asked, other = store.answer(chat, first, "uno", model="n", stats=STATS)
    assert asked["id"] == first and store.chat(chat)["leaf"] == other["id"]
    assert [m["content"] for m in store.way(chat, other["id"])] == ["One?", "uno"]
    assert [m["content"] for m in store.way(chat, deeper)] == ["One?", "1", "Two?", "2"]
    assert store.update(chat, leaf=deeper)["leaf"] == deeper
    assert store.update(chat, leaf=first)["leaf"] == other["id"]  # a question stands for its newest answer
    store.answer(chat, first, "eins", model="n", stats=STATS, shown=False)
    assert store.chat(chat)["leaf"] == other["id"]


def test_a_turn_in_the_wrong_place_is_refused_and_stores_nothing(store):
    chat, elsewhere = store.create()["id"], store.create()["id"]
    question, answer = say(store, chat, None, "One?")
    before = store.chat(chat)
    for wrong, words in [((question, "x"), "is a question"), (answer, "is an answer"), ((99, "x"), "not in this chat")]:
        with pytest.raises(InputError, match=words):
            store.answer(chat, wrong, "text", model="m", stats=STATS)
        with pytest.raises(InputError, match=words):
            store.check_turn(chat, wrong)
    with pytest.raises(InputError, match="not in this chat"):
        store.answer(elsewhere, (answer, "x"), "text", model="m", stats=STATS)
    with pytest.raises(InputError, match="not in this chat"):
        store.update(elsewhere, leaf=answer)
    assert store.chat(chat) == before and not store.chat(elsewhere)["messages"]
    for call in (store.chat, store.delete, lambda chat: store.answer(chat, (None, "x"), "y", model="m", stats=STATS)):
        with pytest.raises(Unknown):
            call("0123")


def test_the_file_itself_refuses_turns_that_do_not_alternate(store):
    chat = store.create()["id"]
    question, answer = say(store, chat, None, "One?")
    insert = "INSERT INTO messages (chat, parent, role, content, folded, created_at) VALUES (?, ?, ?, '', '', '')"
    with sqlite3.connect(store.path) as db:
        for role, parent in (("user", question), ("assistant", answer), ("assistant", None), ("system", None)):
            with pytest.raises(sqlite3.IntegrityError):
                db.execute(insert, (chat, parent, role))
    db.close()


def test_the_title_is_the_first_question_until_it_is_renamed(store):
    chat = store.create()["id"]
    text = "How do I  sort\na list of numbers from the largest to the smallest one?"
    _, answer = say(store, chat, None, text)
    title = store.chat(chat)["title"]
    assert title == "How do I sort a list of numbers from the largest…" and len(title) <= TITLE_CHARS
    say(store, chat, answer, "And now?")
    assert store.chat(chat)["title"] == title
    assert store.update(chat, title="  Sorting ")["title"] == "Sorting"
    say(store, chat, None, "Something else?")
    assert store.chat(chat)["title"] == "Sorting"
    assert store.update(chat, title="")["title"] == title
    assert len(title_of("x" * 200)) == TITLE_CHARS and title_of(" \n ") == ""


def test_a_greeting_gives_way_to_the_first_question_that_says_more(store):
    """Four chats were called "hi"."""
    chat, titles, answer = store.create()["id"], [], None
    for text in ("hi", "How are you?", "What does 404 mean?", "And what does HTTP status 500 mean?"):
        answer = say(store, chat, answer, text)[1]
        titles.append(store.chat(chat)["title"])
    assert titles == ["hi", "How are you?", "What does 404 mean?", "What does 404 mean?"]
    assert title_of("hi", "What is 3 + 4?", "What does 404 mean?") == "What is 3 + 4?"  # a sum says enough
    named = store.create(title="hi")["id"]
    say(store, named, None, "hello")
    say(store, named, None, "What does 404 mean?")
    assert store.chat(named)["title"] == "hi"


def test_a_search_needs_every_word_in_any_case_and_any_accent(store):
    chats = {}
    for name, question in {
        "greek": "Τι κάνει η ΟΔΟΣ;",
        "german": "Was heißt Straße in der Schweiz?",
        "french": "Un café, s'il vous plaît",
        "turkish": "İstanbul nerede?",
        "chinese": "请问图书馆在哪里",
        "percent": "What is 100% of_it?",
    }.items():
        chats[name] = store.create()["id"]
        say(store, chats[name], None, question, "An answer about LIBRARIES.")
    store.update(chats["percent"], title="Shares and parts")
    names = {chat: name for name, chat in chats.items()}

    def found(query: str) -> set[str]:
        return {names[chat["id"]] for chat in store.chats(query)}

    for query, expected in {
        "οδός": {"greek"},
        "STRASSE schweiz": {"german"},
        "schweiz STRAßE": {"german"},
        "CAFE": {"french"},
        "Café PLAÎT": {"french"},
        "istanbul": {"turkish"},
        "图书馆": {"chinese"},
        "100%": {"percent"},
        "of_it": {"percent"},
        "PARTS libraries": {"percent"},
        "%": {"percent"},
        "strasse istanbul": set(),
        "ofxit": set(),
        "": set(chats),
        "  ": set(chats),
        "libraries": set(chats),
    }.items():
        assert found(query) == expected, query
    (hit,) = store.chats("parts")
    assert hit["snippet"] is None  # only the title has it
    (hit,) = store.chats("strasse")
    assert hit["snippet"] == "Was heißt Straße in der Schweiz?" and hit["messages"] == 2
    assert all(chat["snippet"] is None for chat in store.chats())


def test_the_list_shows_the_newest_update_first_and_looking_is_no_update(store):
    first, second = store.create(title="a")["id"], store.create(title="b")["id"]
    _, answer = say(store, first, None, "x")
    say(store, first, None, "y")
    say(store, second, None, "z")
    assert [chat["id"] for chat in store.chats()] == [second, first]
    store.update(first, leaf=answer)
    store.update(first)
    assert [chat["id"] for chat in store.chats()] == [second, first]
    store.update(first, title="c")
    assert [chat["id"] for chat in store.chats()] == [first, second]


def test_two_updates_in_the_same_millisecond_keep_their_order(store):
    first, second = store.create(title="a")["id"], store.create(title="b")["id"]
    for number in range(40):
        store.update(second, title=f"b{number}")
        store.update(first, title=f"a{number}")
        assert [chat["id"] for chat in store.chats()] == [first, second]


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="aßİéﬁ e\u0301Kx…\n", max_size=400),
    st.text(alphabet="aßéﬁxk", min_size=1, max_size=5),
    st.text(alphabet="aßİéﬁ e\u0301Kx…\n", max_size=400),
)
def test_a_snippet_shows_the_hit_on_one_short_line(before, word, after):
    text = f"{before} {word} {after}"
    shown = snippet(text, words_of(word))
    assert fold(word) in fold(shown)
    assert len(shown) <= SNIPPET_CHARS + 2 and "\n" not in shown


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_done_in_whatever_order_every_way_alternates(data):
    """Random calls with random ids, right and wrong, some of them while the disk is full."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.sqlite3"
        store = Store(path)
        chats = [store.create()["id"] for _ in range(2)]
        ids = st.none() | st.integers(1, 12)
        for _ in range(data.draw(st.integers(1, 14))):
            chat, number = data.draw(st.sampled_from([*chats, "gone"])), data.draw(ids)
            call = data.draw(st.sampled_from(["new", "again", "leaf", "delete", "feedback", "full"]))
            try:
                if call == "new":
                    store.answer(chat, (number, "q"), data.draw(st.sampled_from(["", "a"])), model="m", stats=STATS)
                elif call == "again":
                    store.answer(chat, number or 1, "b", model="m", stats=STATS, shown=data.draw(st.booleans()))
                elif call == "leaf":
                    store.update(chat, leaf=number)
                elif call == "delete" and data.draw(st.integers(0, 3)) == 0:
                    store.delete(chat)
                elif call == "feedback":
                    store.feedback(number or 1, "down", "better")
                elif call == "full":
                    pages = store._file._db.execute("PRAGMA page_count").fetchone()[0]
                    store._file._db.execute(f"PRAGMA max_page_count = {pages}")
                    try:
                        store.answer(chat, (number, "q" * 9000), "a" * 9000, model="m", stats=STATS)
                    finally:
                        store._file._db.execute("PRAGMA max_page_count = 1000000")
            except InputError:
                pass
        store.close()
        assert_whole(path)


WRITER = """
import sys
from athanor.serving.store import Store
store = Store(sys.argv[1])
chat, parent = store.create()["id"], None
while True:
    asked, answer = store.answer(chat, (parent, "q" * 5000), "a" * 5000, model="m", stats={})
    store.answer(chat, asked["id"], "b", model="m", stats={}, shown=False)
    parent = answer["id"]
    print(parent, flush=True)
"""


def test_a_process_killed_while_it_stores_leaves_whole_turns_and_all_that_it_told(tmp_path):
    path, told = tmp_path / "chat.sqlite3", 0
    for lines in (1, 7, 20):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        told += len([child.stdout.readline() for _ in range(lines)])
        child.kill()
        child.wait()
        child.stdout.close()
        assert assert_whole(path) >= 3 * told
    store = Store(path)
    assert len(store.chats()) == 3
    store.close()


def test_two_processes_and_many_threads_lose_nothing(tmp_path):
    path = tmp_path / "chat.sqlite3"
    stores = [Store(path), Store(path)]
    chat = stores[0].create()["id"]
    faults = []

    def write(store: Store) -> None:
        try:
            for _ in range(10):
                say(store, chat, None, "x")
                store.chats("x")
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(stores[number % 2],)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and len(stores[1].chat(chat)["messages"]) == 120
    for store in stores:
        store.close()
    assert_whole(path)


def test_a_chat_of_thousands_of_turns_is_read_and_deleted(store):
    chat, parent = store.create()["id"], None
    for _ in range(1300):  # deeper than SQLite follows cascades
        _, parent = say(store, chat, parent, "x")
    assert len(store.way(chat, parent)) == 2600
    store.delete(chat)
    assert store.chats() == [] and assert_whole(store.path) == 0


def test_a_correction_is_a_candidate_until_it_is_settled_and_again_when_it_changes(store):
    chat = store.create(system="Be brief.")["id"]
    first, answer = say(store, chat, None, "One?", "2")
    _, other = store.answer(chat, first, "3", model="n", stats=STATS)
    assert store.feedback(answer, "up")["feedback"] == {"verdict": "up", "correction": None, "status": None}
    assert store.corrections() == []
    said = store.feedback(answer, "down", "1")
    assert said["feedback"] == {"verdict": "down", "correction": "1", "status": "candidate"}
    (found,) = store.corrections()
    assert found["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
    assert (found["id"], found["answer"], found["correction"], found["model"]) == (answer, "2", "1", "m")
    assert store.correction(answer)["variants"] == [other]
    assert store.settle(answer, "accepted")["status"] == "accepted"
    assert store.feedback(answer, "down", "1")["feedback"]["status"] == "accepted"
    assert [row["id"] for row in store.corrections("accepted")] == [answer] and not store.corrections("rejected")
    assert store.feedback(answer, "down", "one")["feedback"]["status"] == "candidate"
    assert store.feedback(answer, "down", "  ")["feedback"] == {"verdict": "down", "correction": None, "status": None}
    assert store.feedback(answer, None)["feedback"] is None
    for call, words in [
        (lambda: store.feedback(answer, "up", "1"), "thumb down"),
        (lambda: store.feedback(answer, "down", " 2 "), "the answer itself"),
        (lambda: store.feedback(first, "up"), "is a question"),
        (lambda: store.settle(answer, "accepted"), "no correction"),
        (lambda: store.settle(answer, "good"), "no status"),
        (lambda: store.feedback(999, "up"), "no message"),
    ]:
        with pytest.raises(InputError, match=words):
            call()

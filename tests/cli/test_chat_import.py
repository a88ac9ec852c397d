"""Chats of an earlier version, from its SQLite file to feedback and to a file that the page imports."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.cli.test_chat_data import athanor, feedback  # noqa: F401  fixtures

OLD = """
CREATE TABLE chats (id TEXT, title TEXT, folded TEXT, system TEXT, models TEXT, sampling TEXT, leaf INTEGER,
    created_at TEXT, updated_at TEXT);
CREATE TABLE messages (id INTEGER, chat TEXT, parent INTEGER, role TEXT, content TEXT, folded TEXT, model TEXT,
    stats TEXT, created_at TEXT, verdict TEXT, correction TEXT, status TEXT);
INSERT INTO chats VALUES ('ab', 'Sums', 'sums', 'Be brief.', '["m"]', '{"seed": 1}', 4, 'T', 'U');
INSERT INTO chats VALUES ('cd', '', '', '', '[]', '{}', NULL, 'T', 'U');
"""
NOW = "2026-11-01T10:00:00.000009Z"
MESSAGES = (
    (1, None, "user", "What is 3 + 4?", None, None, None, None),
    (2, 1, "assistant", "8", "m", "down", "7", "accepted"),
    (3, 1, "assistant", "Seven", "m", "up", None, None),
    (4, 3, "user", "And?", None, None, None, None),
    (5, 4, "assistant", "", "m", None, None, None),
)


def test_old_chats_become_feedback_and_a_file_for_the_page(feedback, athanor):
    Path(".athanor").mkdir()
    with closing(sqlite3.connect(".athanor/chat.sqlite3")) as db, db:
        db.executescript(OLD)
        for number, parent, role, content, model, verdict, correction, status in MESSAGES:
            row = (number, "ab", parent, role, content, "", model, '{"tokens": 1}' if model else None, NOW)
            values = (*row, verdict, correction, status)
            db.execute(f"INSERT INTO messages VALUES ({', '.join('?' * len(values))})", values)
    before = Path(".athanor/chat.sqlite3").read_bytes()
    for words in ("2 judged answers added, 0 in it already", "0 judged answers added, 2 in it already"):
        status, told = athanor("import-old")
        assert status == 0 and words in told and "1 chat." in told
    assert Path(".athanor/chat.sqlite3").read_bytes() == before
    accepted, liked = feedback.rows()
    assert (accepted["answer"], accepted["correction"], accepted["status"]) == ("8", "7", "accepted")
    assert accepted["prompt"][0] == {"role": "system", "content": "Be brief."} and liked["verdict"] == "up"
    assert athanor("pairs", "corpus/pairs.jsonl")[0] == 0 and athanor("export", "corpus/rows.jsonl")[0] == 0
    (chat,) = json.loads(Path(".athanor/chats.json").read_text())
    assert (chat["id"], chat["title"], chat["sampling"]) == ("ab", "Sums", {"seed": 1})
    assert [message["content"] for message in chat["messages"]] == [row[3] for row in MESSAGES]
    assert chat["leaf"] == chat["messages"][3]["id"] == chat["messages"][4]["parent"]
    assert chat["messages"][1]["id"] == accepted["message"] and chat["messages"][1]["feedback"]["verdict"] == "down"
    times = [message["created_at"] for message in chat["messages"]]
    assert times == sorted(set(times)) and times[0] == NOW


def test_what_is_no_such_file_is_refused(feedback, athanor, tmp_path):
    assert "name the chat.sqlite3" in athanor("import-old")[1]
    (tmp_path / "text").write_text("no database at all " * 100)
    status, told = athanor("import-old", tmp_path / "text")
    assert status == 1 and "no chats of an earlier version" in told

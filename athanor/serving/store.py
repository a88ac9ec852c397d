"""What the chat page keeps: chats, their trees of messages, and what people said about answers. One SQLite file.

A chat's messages are a tree, because a question can be edited and an answer be
made again: siblings are variants. Shown is the way from the root to the chat's
`leaf`. A question is only ever stored with its first answer, in one
transaction, and a trigger refuses a message whose parent has the wrong role;
so every way down alternates user and assistant and ends with an answer,
whatever fails or is killed in between.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.runtime.machine import anchor
from athanor.serving.database import Database, forget_empty, timestamp
from athanor.serving.words import fold, snippet, title_of, words_of

STATUSES = ("candidate", "accepted", "rejected")
_PATH_TO = """WITH RECURSIVE way(id, up, depth) AS (
    SELECT id, parent, 0 FROM messages WHERE id = ? AND chat = ?
    UNION ALL SELECT m.id, m.parent, depth + 1 FROM messages m JOIN way ON m.id = up)
SELECT messages.* FROM way JOIN messages ON messages.id = way.id ORDER BY depth DESC"""


class Unknown(InputError):
    """There is no chat, message or correction of that id."""

    status = 404


def default_path() -> Path:
    """The file of this checkout."""
    return anchor() / ".athanor" / "chat.sqlite3"


class Store:
    """One file, open. Its methods may be called from any thread.

    Every call is a transaction of its own, whole or not at all. From asyncio
    call them with `asyncio.to_thread`: they wait for the disk. `Unknown` for
    ids that do not exist, InputError for what does not fit.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file, or make it; Unusable (an InputError) as of Database."""
        self._file = Database(path)
        self.path = self._file.path

    def close(self) -> None:
        self._file.close()

    # Chats

    def chats(self, query: str = "") -> list[dict[str, Any]]:
        """All chats, newest update first; with a query those where every word stands in the title or a message."""
        words = words_of(query)
        condition = "(instr(folded, ?) OR id IN (SELECT chat FROM messages WHERE instr(folded, ?)))"
        where = " AND ".join([condition] * len(words)) or "1"
        with self._file.read() as db:
            rows = db.execute(
                f"""SELECT id, title, created_at, updated_at, (SELECT count(*) FROM messages WHERE chat = chats.id) AS n
                    FROM chats WHERE {where} ORDER BY updated_at DESC, rowid DESC""",
                [word for word in words for _ in range(2)],
            ).fetchall()
            shown = {row["id"]: self._snippet(db, row["id"], words) for row in rows} if words else {}
        return [
            {**_pick(row, "id title created_at updated_at"), "messages": row["n"], "snippet": shown.get(row["id"])}
            for row in rows
        ]

    def _snippet(self, db: sqlite3.Connection, chat: str, words: list[str]) -> str | None:
        """A snippet of the first message with the most of the words; None where only the title has them."""
        hits = " + ".join(["(instr(folded, ?) > 0)"] * len(words))
        query = f"SELECT content, {hits} AS hits FROM messages WHERE chat = ? ORDER BY hits DESC, id LIMIT 1"
        row = db.execute(query, [*words, chat]).fetchone()
        return snippet(row["content"], words) if row is not None and row["hits"] else None

    def create(
        self,
        *,
        title: str = "",
        system: str = "",
        models: Sequence[str] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A new chat without messages. Without a title it takes one from its first questions."""
        chat, now, title = secrets.token_hex(8), timestamp(), title.strip()
        row = (chat, title, fold(title), system, json.dumps(list(models)), json.dumps(dict(sampling or {})), now, now)
        with self._file.write() as db:
            forget_empty(db)
            db.execute(
                """INSERT INTO chats (id, title, folded, system, models, sampling, created_at, updated_at)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?)""",
                row,
            )
            return self._chat(db, chat)

    def chat(self, chat: str) -> dict[str, Any]:
        """A chat with all its messages, in the order in which they were stored."""
        with self._file.read() as db:
            return self._chat(db, chat)

    def update(self, chat: str, **changes: Any) -> dict[str, Any]:
        """Change title, system, models, sampling or leaf. An empty title is the one of the first questions again.

        A leaf that is a question stands for its newest answer: what is shown ends with an answer.
        """
        with self._file.write() as db:
            row = self._chat_row(db, chat)
            if "title" in changes:
                changes["title"] = changes["title"].strip() or self._first_title(db, chat)
                changes["folded"] = fold(changes["title"])
            for name in ("models", "sampling"):
                if name in changes:
                    changes[name] = json.dumps(changes[name])
            if changes.get("leaf") is not None:
                changes["leaf"] = self._leaf(db, chat, changes["leaf"])
            elif "leaf" in changes and row["leaf"] is not None:
                raise InputError("a chat with messages shows one of them", where="leaf", fix="name a message's id")
            if set(changes) - {"leaf"}:  # looking at another variant is no update
                changes["updated_at"] = timestamp()
            if changes:
                names = ", ".join(f"{name} = ?" for name in changes)
                db.execute(f"UPDATE chats SET {names} WHERE id = ?", [*changes.values(), chat])
            return self._chat(db, chat)

    def delete(self, chat: str) -> None:
        """A chat, its messages and what was said about them."""
        with self._file.write() as db:
            self._chat_row(db, chat)
            db.execute("DELETE FROM chats WHERE id = ?", (chat,))
        self._file.truncate_log()

    # Messages

    def way(self, chat: str, message: int | None) -> list[dict[str, Any]]:
        """The messages from the root to `message`; empty for None."""
        with self._file.read() as db:
            self._chat_row(db, chat)
            return [_message(row) for row in self._path_to(db, chat, message)]

    def answer(
        self,
        chat: str,
        question: int | tuple[int | None, str],
        content: str,
        *,
        model: str,
        stats: Mapping[str, Any],
        shown: bool = True,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Store an answer; returns the question and the answer.

        `question` is the id of a stored one, or (parent, text) of a new one,
        which is stored with it or not at all. `shown` makes the answer the chat's leaf.
        """
        now = timestamp()
        with self._file.write() as db:
            title = self._chat_row(db, chat)["title"]
            if isinstance(question, tuple):
                parent, text = question
                self._check(db, chat, parent, "assistant", "parent")
                own = title and title != self._first_title(db, chat)  # given by hand
                question = self._insert(db, chat, parent, "user", text, None, None, now)
                title = title if own else self._first_title(db, chat)
            else:
                self._check(db, chat, question, "user", "user")
            answer = self._insert(db, chat, question, "assistant", content, model, json.dumps(dict(stats)), now)
            db.execute(
                "UPDATE chats SET title = ?, folded = ?, updated_at = ?, leaf = iif(?, ?, leaf) WHERE id = ?",
                (title, fold(title), now, shown, answer, chat),
            )
            return self._message(db, question), self._message(db, answer)

    def extend(self, message: int, content: str, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Give an answer that was gone on with its whole text; what was said about it stays."""
        values = (content, fold(content), json.dumps(dict(stats)), message)
        with self._file.write() as db:
            db.execute("UPDATE messages SET content = ?, folded = ?, stats = ? WHERE id = ?", values)
            return self._message(db, message)

    def check_turn(self, chat: str, question: int | tuple[int | None, str]) -> list[dict[str, Any]]:
        """The stored messages that a turn goes on from (a stored question is the last); raises what `answer` would."""
        with self._file.read() as db:
            self._chat_row(db, chat)
            last = question[0] if isinstance(question, tuple) else question
            self._check(db, chat, last, *(("assistant", "parent") if isinstance(question, tuple) else ("user", "user")))
            return [_message(row) for row in self._path_to(db, chat, last)]

    # What people say about answers

    def feedback(self, message: int, verdict: str | None, correction: str | None = None) -> dict[str, Any]:
        """Judge an answer; a correction makes it a candidate for training, the same one again changes nothing."""
        correction = correction if correction and correction.strip() else None
        if correction is not None and verdict != "down":
            fix = 'send "verdict": "down" with it'
            raise InputError("a correction goes with a thumb down", where="verdict", fix=fix)
        with self._file.write() as db:
            old = self._message_row(db, message)
            if old["role"] != "assistant":
                raise InputError(f"message {message} is a question", where="feedback", fix="judge an answer")
            if correction is not None and correction.strip() == old["content"].strip():
                raise InputError(
                    "the correction is the answer itself", where="correction", fix="write what it should have said"
                )
            same = correction is not None and correction == old["correction"]
            status = old["status"] if same else correction and "candidate"
            db.execute(
                "UPDATE messages SET verdict = ?, correction = ?, status = ? WHERE id = ?",
                (verdict, correction, status, message),
            )
            return self._message(db, message)

    def corrections(self, status: str | None = None) -> list[dict[str, Any]]:
        """Answers with a correction, oldest message first, each with the prompt it answers (and the system message)."""
        with self._file.read() as db:
            rows = db.execute(
                "SELECT id FROM messages WHERE correction IS NOT NULL AND (?1 IS NULL OR status = ?1) ORDER BY id",
                (status,),
            ).fetchall()
            return [self._correction(db, row["id"]) for row in rows]

    def correction(self, message: int) -> dict[str, Any]:
        """One of `corrections`, with "variants": the other answers to its question as messages."""
        with self._file.read() as db:
            correction_row = self._correction(db, message)
            rows = db.execute(
                """SELECT other.* FROM messages AS one JOIN messages AS other ON other.parent = one.parent
                   WHERE one.id = ?1 AND other.id <> ?1 ORDER BY other.id""",
                (message,),
            ).fetchall()
            return {**correction_row, "variants": [_message(row) for row in rows]}

    def settle(self, message: int, status: str) -> dict[str, Any]:
        """Accept or reject a correction, or make it a candidate again."""
        if status not in STATUSES:
            raise InputError(f"no status '{status}'", where="status", fix=f"one of {', '.join(STATUSES)}")
        with self._file.write() as db:
            correction = self._correction(db, message)
            db.execute("UPDATE messages SET status = ? WHERE id = ?", (status, message))
            return {**correction, "status": status}

    # Inside a transaction

    def _chat_row(self, db: sqlite3.Connection, chat: str) -> sqlite3.Row:
        row = db.execute("SELECT * FROM chats WHERE id = ?", (chat,)).fetchone()
        if row is None:
            raise Unknown(f"there is no chat '{chat}'", fix="it may have been deleted; look at the list of chats")
        return row

    def _chat(self, db: sqlite3.Connection, chat: str) -> dict[str, Any]:
        row = self._chat_row(db, chat)
        messages = db.execute("SELECT * FROM messages WHERE chat = ? ORDER BY id", (chat,)).fetchall()
        return {
            **_pick(row, "id title created_at updated_at system leaf"),
            "models": json.loads(row["models"]),
            "sampling": json.loads(row["sampling"]),
            "messages": [_message(message) for message in messages],
        }

    def _first_title(self, db: sqlite3.Connection, chat: str) -> str:
        query = "SELECT content FROM messages WHERE chat = ? AND role = 'user' ORDER BY id LIMIT 8"
        return title_of(*(row["content"] for row in db.execute(query, (chat,))))

    def _role(self, db: sqlite3.Connection, chat: str, message: int, where: str) -> str:
        row = db.execute("SELECT role FROM messages WHERE id = ? AND chat = ?", (message, chat)).fetchone()
        if row is None:
            raise InputError(f"message {message} is not in this chat", where=where, fix="name a message of the chat")
        return str(row["role"])

    def _leaf(self, db: sqlite3.Connection, chat: str, message: int) -> int:
        if self._role(db, chat, message, "leaf") == "assistant":
            return message
        return int(db.execute("SELECT max(id) FROM messages WHERE parent = ?", (message,)).fetchone()[0])

    def _path_to(self, db: sqlite3.Connection, chat: str, message: int | None) -> list[sqlite3.Row]:
        return db.execute(_PATH_TO, (message, chat)).fetchall()

    def _check(self, db: sqlite3.Connection, chat: str, message: int | None, role: str, where: str) -> None:
        """InputError unless `message` is in the chat and has the role; None stands for the root of the tree."""
        if message is None:
            return
        if (actual_role := self._role(db, chat, message, where)) != role:
            kinds = {"user": "a question", "assistant": "an answer"}
            what = f"message {message} is {kinds[actual_role]}, {kinds[role]} is needed"
            raise InputError(what, where=where, fix="a question goes below an answer, an answer below a question")

    def _insert(
        self,
        db: sqlite3.Connection,
        chat: str,
        parent: int | None,
        role: str,
        content: str,
        model: str | None,
        stats: str | None,
        now: str,
    ) -> int:
        cursor = db.execute(
            """INSERT INTO messages (chat, parent, role, content, folded, model, stats, created_at)
               VALUES (?, ?, ?, ?, ?, ?, ?, ?)""",
            (chat, parent, role, content, fold(content), model, stats, now),
        )
        return int(cursor.lastrowid or 0)

    def _message_row(self, db: sqlite3.Connection, message: int) -> sqlite3.Row:
        row = db.execute("SELECT * FROM messages WHERE id = ?", (message,)).fetchone()
        if row is None:
            raise Unknown(f"there is no message {message}", fix="its chat may have been deleted")
        return row

    def _message(self, db: sqlite3.Connection, message: int) -> dict[str, Any]:
        return _message(self._message_row(db, message))

    def _correction(self, db: sqlite3.Connection, message: int) -> dict[str, Any]:
        row = db.execute("SELECT * FROM messages WHERE id = ? AND correction IS NOT NULL", (message,)).fetchone()
        if row is None:
            raise Unknown(f"there is no correction {message}", fix="athanor chat list --all shows those there are")
        chat = self._chat_row(db, row["chat"])
        path = self._path_to(db, chat["id"], row["parent"])
        system = [{"role": "system", "content": chat["system"]}] if chat["system"].strip() else []
        return {
            "id": row["id"],
            "chat": chat["id"],
            "chat_title": chat["title"],
            "prompt": [*system, *(_pick(message, "role content") for message in path)],
            "answer": row["content"],
            **_pick(row, "correction status model created_at"),
        }


def _pick(row: sqlite3.Row, names: str) -> dict[str, Any]:
    return {name: row[name] for name in names.split()}


def _message(row: sqlite3.Row) -> dict[str, Any]:
    """A message as the page sees it."""
    return {
        **_pick(row, "id parent role content model created_at"),
        "stats": json.loads(row["stats"]) if row["stats"] else None,
        "feedback": _pick(row, "verdict correction status") if row["verdict"] else None,
    }

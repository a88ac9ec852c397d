"""Chats of earlier versions, which the server kept in SQLite: their feedback, and a file that the page imports."""

from __future__ import annotations

import argparse
import json
import sqlite3
import uuid
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.cli.render import plural
from athanor.runtime.machine import anchor
from athanor.serving.feedback import Feedback, write_private

OLD, OUT = ".athanor/chat.sqlite3", "chats.json"


def import_option(commands: Any) -> None:
    command = commands.add_parser("import-old", help="take over chats and feedback of an earlier version")
    command.add_argument("old", nargs="?", type=Path, metavar="OLD", help=f"default {OLD}; it stays as it is")
    command.set_defaults(run=import_old)


def import_old(feedback: Feedback, args: argparse.Namespace) -> int:
    """Record what was said about answers, and write the chats as the page exports them. Doing it again adds nothing new."""
    old: Path = args.old or anchor() / OLD
    if not old.is_file():
        raise InputError("file not found", where=old, fix="name the chat.sqlite3 of an earlier version")
    try:
        with closing(sqlite3.connect(f"{old.resolve().as_uri()}?mode=ro", uri=True)) as db:
            db.row_factory = sqlite3.Row
            rows = db.execute("SELECT * FROM chats ORDER BY created_at").fetchall()
            chats = [chat for chat in (_chat(db, row) for row in rows) if chat["messages"]]
    except sqlite3.Error as error:
        raise InputError(f"no chats of an earlier version ({error})", where=old) from None
    known = {row["message"] for row in feedback.rows()}
    judged = [(chat, message) for chat in chats for message in chat["messages"] if message["feedback"]]
    added = [(chat, message) for chat, message in judged if message["id"] not in known]
    for chat, message in added:
        row = feedback.record(_said(chat, message))
        if message["feedback"]["status"] in ("accepted", "rejected"):
            feedback.settle(row["id"], message["feedback"]["status"])
    out = feedback.path.with_name(OUT)
    write_private(out, json.dumps(chats, ensure_ascii=False, indent=1).encode())
    print(f"{feedback.path}: {plural(len(added), 'judged answer')} added, {len(judged) - len(added)} in it already")
    print(f"{out}: {plural(len(chats), 'chat')}. Open the page in your browser and import this file there")
    return 0


def _chat(db: sqlite3.Connection, chat: Mapping[str, Any]) -> dict[str, Any]:
    """A chat as the page exports one."""
    rows = db.execute("SELECT * FROM messages WHERE chat = ? ORDER BY id", (chat["id"],)).fetchall()
    messages = [_message(row, number) for number, row in enumerate(rows)]
    kept = {name: chat[name] for name in ("id", "title", "system", "created_at", "updated_at")}
    lists = {name: json.loads(chat[name]) for name in ("models", "sampling")}
    return {**kept, **lists, "leaf": _id(chat["id"], chat["leaf"]), "messages": messages}


def _message(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    # The page sorts by time, and a question had that of its first answer.
    created = datetime.fromisoformat(row["created_at"]) + timedelta(microseconds=number)
    return {
        "id": _id(row["chat"], row["id"]),
        "parent": _id(row["chat"], row["parent"]),
        "created_at": created.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "stats": json.loads(row["stats"]) if row["stats"] else None,
        "feedback": {name: row[name] for name in ("verdict", "correction", "status")} if row["verdict"] else None,
        **{name: row[name] for name in ("role", "content", "model")},
    }


def _id(chat: str, number: int | None) -> str | None:
    return None if number is None else uuid.uuid5(uuid.NAMESPACE_URL, f"{chat}/{number}").hex


def _said(chat: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """What was said about an answer, as the page sends it."""
    known = {message["id"]: message for message in chat["messages"]}
    path, parent = [], answer["parent"]
    while parent is not None:
        path.insert(0, known[parent])
        parent = known[parent]["parent"]
    system = [{"role": "system", "content": chat["system"]}] if chat["system"].strip() else []
    return {
        "chat": chat["id"],
        "title": chat["title"],
        "message": answer["id"],
        "parent": answer["parent"],
        "path": [message["id"] for message in path],
        "model": answer["model"] or "",
        "prompt": [*system, *({"role": message["role"], "content": message["content"]} for message in path)],
        "answer": answer["content"],
        "verdict": answer["feedback"]["verdict"],
        "correction": answer["feedback"]["correction"],
    }

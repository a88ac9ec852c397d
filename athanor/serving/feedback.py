"""What people say about answers, thumbs and corrections: a file of JSON lines, one for each change.

Of the rows of one message the last counts. Several processes may use the file: each call holds its lock. A line is
written with fsync; one that a crash tore was never acknowledged, and is passed over. Numbers of rows are not used again: of a chat that
is deleted they stay.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from athanor.base.artifacts import fsync_dir
from athanor.base.errors import AthanorError, InputError
from athanor.base.strict import build
from athanor.chat_data.rows import OWN_HABITS, drop_habits, encode
from athanor.runtime import journal
from athanor.runtime.locks import lock
from athanor.runtime.schema import check_file
from athanor.text.conversations import Conversation, Message, check_messages
from athanor.tokenizer.tokenizer import Tokenizer

FILE = ".athanor/feedback.jsonl"
STATUSES = ("candidate", "accepted", "rejected")
OWNER_ONLY = 0o600
LONG = "with all that is before it, it is longer than sft_data.context_tokens. Fix: shorten it, or ask in a new chat"
LOST = {  # by what sft-data calls it; the rest is LONG
    "identity_leak": "an answer claims to be another assistant. Fix: see 'A name of your own' in docs/training.md",
    "hedge_opening": "an answer opens with a disclaimer, doubt or apology. Fix: begin with the answer itself",
}
Row = dict[str, Any]  # the fields of `Said`, "id", "at" and "status"; of a deleted chat the id alone


def rows_to_train(said: Sequence[Row], root: Path) -> tuple[list[Row], dict[int, str]]:
    """The accepted corrections as conversations, each once, in the order of their messages; and by number why one is none.

    The latter also of corrections that are not accepted. Of several of one question that of the later answer is a row.
    `root`: the checkout that trains.
    """
    rows: dict[str, Row] = {}
    left_out: dict[int, str] = {}
    check_taught = training_of(root)
    for row in (row for row in said if row["correction"]):
        made = as_row(row)
        try:
            check_row([made["messages"]], row, said)
            check_taught(made["messages"])
        except InputError as error:
            left_out[row["id"]] = str(error)
            continue
        if row["status"] != "accepted":
            continue
        first = rows.get(key := json.dumps(row["prompt"]))
        if first and first["messages"] == made["messages"]:
            left_out[row["id"]] = f"correction {first['correction']} says the same"
            continue
        if first:
            left_out[first["correction"]] = f"correction {row['id']} answers the same question otherwise"
        rows[key] = made
    return list(rows.values()), left_out


def as_row(row: Row) -> Row:
    """A correction as a conversation with its number; training reads the messages alone."""
    return {"messages": [*row["prompt"], answer_of(row["correction"])], "correction": row["id"]}


def answer_of(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def check_row(conversations: Sequence[list[dict[str, str]]], row: Row, said: Sequence[Row], where: str = "") -> None:
    """InputError if a conversation has an empty message, or an answer before that of `row` a thumb down."""
    for messages in conversations:
        check_messages([Message(**message) for message in messages], where)
    if any(one["verdict"] == "down" for one in said if one["message"] in row["path"] and one is not row):
        fix = "ask again in a new chat, or below the right answer"
        raise InputError("an earlier answer of its chat has a thumb down", where=where, fix=fix)


def training_of(root: Path) -> Callable[[list[Row]], None]:
    """InputError for messages that the sft-data of a checkout would leave out, by its own functions.

    None before there are parameters and a tokenizer.
    """
    try:
        params, tokenizer = check_file(root / "params.yaml")["sft_data"], Tokenizer.load(root / "models/tokenizer")
    except AthanorError:
        return lambda _: None
    exceptions = vars(params.filter_exceptions) | dict.fromkeys(OWN_HABITS, ("corrections",))

    def check(messages: list[Row]) -> None:
        row = Conversation(tuple(Message(**message) for message in messages), "corrections", "", "train", "")
        dropped = {row.source: Counter()}
        encode(tokenizer, drop_habits([row], exceptions, dropped), params.context_tokens + 1, dropped)
        for reason in dropped[row.source]:
            raise InputError(LOST.get(reason, LONG))

    return check


@dataclass(frozen=True)
class Said:
    """A judgement. `message`: the answer, a variant among those of `parent`; `path`: the messages before it."""

    chat: str
    title: str
    message: str
    parent: str
    path: tuple[str, ...]
    model: str
    prompt: tuple[Message, ...]  # what the model was asked, with the system message
    answer: str
    verdict: Literal["up", "down"] | None
    correction: str | None = None


class Unknown(InputError):
    """There is no correction of that number."""

    status = 404


class Unusable(InputError):
    """The file cannot be read or written; the request is not at fault."""

    status = 503


class Feedback:
    """One file, made when it is first used. Its methods may be called from any thread; they wait for the disk.

    `Unusable` where the file cannot be used, `Unknown` for numbers that there are none of, InputError or ParamsError for what does not fit.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def rows(self) -> list[Row]:
        """The last row of each message, in the order of their numbers (`id`)."""
        with self._open() as (_, rows):
            return _last(rows)

    def corrections(self, status: str | None = None) -> list[Row]:
        """The rows with a correction, all or those of one status."""
        return [row for row in self.rows() if row["correction"] and status in (None, row["status"])]

    def correction(self, number: int) -> Row:
        """One of `corrections`, with "variants": the rows of other answers to its question."""
        rows = self.rows()
        found = _correction(rows, number)
        return found | {"variants": [row for row in rows if row["parent"] == found["parent"] and row["id"] != number]}

    def settle(self, number: int, status: str) -> Row:
        """Accept or reject a correction, or make it a candidate again."""
        if status not in STATUSES:
            raise InputError(f"no status '{status}'", where="status", fix=f"one of {', '.join(STATUSES)}")
        with self._open() as (file, rows):
            return self._append(file, _correction(_last(rows), number) | {"status": status})

    def record(self, said: Mapping[str, Any]) -> Row:
        """Judge an answer (the fields of `Said`). A correction makes it a candidate, the same one again changes nothing."""
        row = asdict(build(Said, said, "feedback"))
        correction = row["correction"] = row["correction"] if (row["correction"] or "").strip() else None
        if correction and row["verdict"] != "down":
            fix = 'send "verdict": "down" with it'
            raise InputError("a correction goes with a thumb down", where="verdict", fix=fix)
        if correction and correction.strip() == row["answer"].strip():
            fix = "write what it should have said"
            raise InputError("the correction is the answer itself", where="correction", fix=fix)
        if [one["role"] for one in row["prompt"]][-1:] != ["user"]:
            fix = "send the messages up to the question that was answered"
            raise InputError("ends with no message of the user", where="prompt", fix=fix)
        with self._open() as (file, rows):
            new = {"id": 1 + max((old["id"] for old in rows), default=0), "correction": None, "status": None}
            old = next((old for old in _last(rows) if old["message"] == row["message"]), new)
            status = old["status"] if correction == old["correction"] else "candidate" if correction else None
            return self._append(file, {"id": old["id"], **row, "status": status})

    def forget(self, chat: str) -> None:
        """Take out what was said in a chat. The file has its old content or the new one, never a part."""
        with self._open() as (_, rows):
            if any(row.get("chat") == chat for row in rows):
                # Without damaged lines: one may be of that chat.
                kept = [_line({"id": row["id"]} if row.get("chat") == chat else row) for row in rows]
                write_private(self.path, b"".join(kept))

    @contextmanager
    def _open(self) -> Iterator[tuple[BinaryIO, list[Row]]]:
        """The file, locked, and all its rows. What is written comes behind them."""
        try:
            with os.fdopen(lock(self.path, lambda _: None, OWNER_ONLY), "r+b") as file:
                yield file, [row for row in journal.rows(file.read()) if isinstance(row.get("id"), int)]
        except OSError as error:
            fix = "look for a full disk or missing rights"
            raise Unusable(f"cannot be used ({error.strerror or error})", where=self.path, fix=fix) from None

    def _append(self, file: BinaryIO, row: Row) -> Row:
        row |= {"at": datetime.now(UTC).isoformat(timespec="seconds")}
        file.write(_line(row))
        file.flush()
        os.fsync(file.fileno())
        fsync_dir(self.path.parent)
        return row


def write_private(path: Path, data: bytes) -> None:
    """Replace a file as a whole; nobody else may read it at any moment."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:  # mode 0600
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    fsync_dir(path.parent)


def _last(rows: Iterable[Row]) -> list[Row]:
    """The last row of each message."""
    return list({row["message"]: row for row in rows if "message" in row}.values())


def _correction(rows: Iterable[Row], number: int) -> Row:
    for row in rows:
        if row["id"] == number and row["correction"]:
            return row
    raise Unknown(f"there is no correction {number}", fix="athanor chat list --all shows those there are")


def _line(row: Row) -> bytes:
    # The newline comes first: it closes a line that was torn.
    return b"\n" + json.dumps(row, ensure_ascii=False).encode(errors="replace")

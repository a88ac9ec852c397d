"""Conversations: `messages` rows with provenance, and the held-out battery items, as JSON lines.

Structured all the way: a conversation is never flattened to "User: ..." text
and parsed back, because answers may contain such lines themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from athanor.base.artifacts import digest, write_text
from athanor.base.errors import InputError
from athanor.base.work import Facts

BENCHMARKS = "benchmarks.jsonl"
ROLES = ("system", "user", "assistant")
ITEM_KINDS = ("exact", "numeric", "list", "code", "format", "likelihood")
DIFFICULTIES = ("easy", "medium", "hard")
SPLITS = ("development", "test")  # tune on the one, report the other


@dataclass(frozen=True)
class Message:
    role: str  # system, user or assistant
    content: str


Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Conversation:
    """One training conversation: an optional system message, then user and assistant in turn.

    `key` names what must stay on one side of the train/val line (a module, an
    exercise, the text itself); `split` was decided from it.
    """

    messages: Messages
    source: str
    license: str
    split: str
    key: str

    @property
    def id(self) -> str:
        return digest([[m.role, m.content] for m in self.messages])[:32]


@dataclass(frozen=True)
class Item:
    """One held-out question of the battery, with the answers its scorer must take and refuse.

    kind: exact (text equal after strip), numeric (last number equals
    `answer`), list (items equal in the asked format), code (`tests` run
    against the function the answer defines), format (all of `checks` hold),
    likelihood (of `choices` the one with the highest log-likelihood is taken;
    the choice continues the prompt's text as a document, not as a chat).
    `accepted` holds at least one and `rejected` at least two whole assistant
    answers; for likelihood they are the choices, right and wrong.
    """

    category: str
    prompt: Messages  # ends with a user message
    kind: str
    answer: str
    accepted: tuple[str, ...]
    rejected: tuple[str, ...]
    tests: tuple[str, ...] = field(default=())  # python assert statements, for kind "code"
    checks: tuple[str, ...] = field(default=())  # "name argument", for kind "format"
    choices: tuple[str, ...] = field(default=())  # in a drawn order, for kind "likelihood"
    difficulty: str = "medium"
    split: str = "test"
    origin: str = "generated"

    @property
    def id(self) -> str:
        identifying = [self.category, [[m.role, m.content] for m in self.prompt]]
        return digest([*identifying, sorted(self.choices)] if self.choices else identifying)[:16]

    @property
    def question(self) -> tuple[object, ...]:
        """Prompt and choices together identify a question: two items may share a prompt if their choices differ."""
        return (self.prompt, tuple(sorted(self.choices)))


def check_messages(messages: Sequence[Message], where: str) -> None:
    """InputError unless the roles are `[system] (user assistant)+` and no content is empty."""
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or len(turns) % 2 or turns != ["user", "assistant"] * (len(turns) // 2):
        raise InputError(
            f"roles are {roles}", where=where, fix="use an optional system message, then user and assistant in turn"
        )
    if not all(message.content.strip() for message in messages):
        raise InputError("a message is empty", where=where, fix="drop the row or fill the message")


def write_rows(path: str | Path, rows: Iterable[Conversation | Item]) -> int:
    """Write rows as JSON lines in the given order; returns their number."""
    lines = [json.dumps(asdict(row), sort_keys=True, ensure_ascii=False) for row in rows]
    write_text(path, "".join(line + "\n" for line in lines))
    return len(lines)


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    for row in _read(path):
        row["messages"] = _messages(row["messages"])
        yield Conversation(**row)


def read_items(path: str | Path) -> Iterator[Item]:
    for row in _read(path):
        row["prompt"] = _messages(row["prompt"])
        yield Item(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})


def searched_items(path: str | Path) -> Iterator[Item]:
    """The items of a file, and those of public benchmarks beside it: all that is searched for in what is trained on."""
    yield from read_items(path)
    if (beside := Path(path).with_name(BENCHMARKS)).is_file():
        yield from read_items(beside)


def _messages(rows: list[dict[str, str]]) -> Messages:
    return tuple(Message(**row) for row in rows)


def _read(path: str | Path) -> Iterator[Facts]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise InputError(f"not valid JSON ({error})", where=f"{path}:{number}") from None
    except FileNotFoundError:
        raise InputError("file not found", where=path, fix="run dvc repro download") from None

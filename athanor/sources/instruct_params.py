"""Parameters of the instruction sources: what conversations the download stage makes or reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from athanor.base.errors import ParamsError
from athanor.base.strict import check_file_names, param, share
from athanor.sources.addresses import check_revision
from athanor.sources.params import Filter
from athanor.text.encodings import check_encoding

DOCSTRING_KINDS = ("summary", "module", "signature", "code", "docstring", "doctest", "parameter", "topic")


@dataclass(frozen=True)
class ExercisesSource:
    """Embedded exercises with checkable answers; `categories` maps a generator to its number of conversations."""

    type: Literal["exercises"]
    name: str
    categories: dict[str, int]
    multi_turn_rows: int = param(min=0, max=10_000_000)  # conversations of two or three exercises each
    system_fraction: float = share()  # share of conversations that open with a system message


@dataclass(frozen=True)
class DocstringsSource:
    """Question and answer pairs from the docstrings of the running interpreter's standard library."""

    type: Literal["docstrings"]
    name: str
    max_rows: dict[str, int]  # conversations at most, per kind of question; 0 leaves a kind out
    max_rows_per_module: int = param(min=1, max=100_000)
    max_chars: int = param(min=100, max=100_000)  # prompt and answer together
    min_rows: int = param(min=1, max=10_000_000)  # gate

    def __post_init__(self) -> None:
        for kind, rows in self.max_rows.items():
            if kind not in DOCSTRING_KINDS:
                raise ParamsError("unknown kind", where=f"max_rows.{kind}", fix=f"one of {', '.join(DOCSTRING_KINDS)}")
            if rows < 0:
                raise ParamsError(f"{rows} is out of range", where=f"max_rows.{kind}", fix="use a value ≥ 0")


@dataclass(frozen=True)
class IdentitySource:
    """First words, what the model is, and that it does not know what it did not learn.

    Every topic is asked `repeats` times, in wordings that vary, and those that people ask first more often. `text_rows`
    questions about names in one's own text, and about the world, get the answer that they were not taught; some are sentences of it.
    """

    type: Literal["identity"]
    name: str
    repeats: int = param(min=1, max=1000)
    min_rows: int = param(min=1, max=1_000_000)  # gate
    from_scratch: bool = True  # false where sft.base names another model: its answers do not claim its training then
    text_rows: int = param(min=0, max=1_000_000, default=0)  # none where no text is one's own


@dataclass(frozen=True, kw_only=True)
class ChatSelection:
    """Which conversations are taken, and what of them.

    All `filters` must hold. `max_pairs` keeps the first so many questions with
    their answers; `drop_system` removes a system message. What is then longer
    than `max_chars`, or has one of `drop_phrases` in an answer (upper and
    lower case are one), is counted and left out.
    """

    filters: tuple[Filter, ...] = ()
    max_pairs: int | None = param(min=1, max=1000, default=None)
    drop_system: bool = False
    max_chars: int | None = param(min=1, max=10_000_000, default=None)
    drop_phrases: tuple[str, ...] = ()


# Columns that a shape needs, in order; those of "prompt" are one or more questions' parts and then the answer.
SHAPES = {"messages": 1, "conversations": 1, "turns": 1, "prompt": 2, "tree": 5}


@dataclass(frozen=True, kw_only=True)
class MessagesSource:
    """Conversations of other people: local JSONL, JSON, CSV, TSV or Parquet files, or a data set of the hub.

    Exactly one of `files` (a glob) and `hub_id` is set; a hub data set needs
    a pinned `revision` (`python -m athanor pin` fills in null). `shape` says
    what `columns` hold:

    - messages: one column, a list of {role, content}
    - conversations: one column, a list of {from, value}; human and gpt stand for user and assistant
    - turns: one column, a list of {input, output}
    - prompt: a column for the question, further ones that are added to it where they are not empty, the answer last
    - tree: message id, id of the message it answers, role (prompter or assistant), text and rank, a row each message;
      the conversation is the path of best rank through each tree

    A text in a column `system` of local files, beside messages or conversations, is the system message. `encoding` is
    that of files that are not UTF-8, or `detect`. Malformed rows are counted; more than `max_malformed_fraction` of all is an
    error. `select` null takes every conversation whole.
    """

    type: Literal["messages"]
    name: str
    files: str | None = None
    hub_id: str | None = None
    hub_config: str | None = None
    revision: str | None = None
    hub_split: str = "train"
    shape: str = param(choices=tuple(SHAPES), default="messages")
    columns: tuple[str, ...] = ("messages",)
    encoding: str = "utf-8"
    select: ChatSelection | None = None
    as_typed: bool = False  # every question once more in small letters, without its mark
    wordings: int = param(
        min=0, max=100, default=0
    )  # of the last question of each conversation, besides: in other words (English ones), as people type it
    hold_out: bool = True  # false: no conversation of it is held out to validate on
    max_malformed_fraction: float = share(0.001)
    max_rows: int | None = param(min=1, max=1_000_000_000, default=None)  # null: all of them
    min_rows: int = param(min=1, max=1_000_000_000, default=1)  # gate
    license: str = "unknown"

    def __post_init__(self) -> None:
        if (self.files is None) == (self.hub_id is None):
            raise ParamsError("set exactly one of 'files' and 'hub_id'", where="files", fix="set the other one to null")
        check_encoding(self.encoding)
        if self.hub_id is not None:
            check_revision(self.hub_id, self.revision)
        column_count = SHAPES[self.shape]
        if len(self.columns) < column_count or (len(self.columns) > column_count and self.shape != "prompt"):
            what = f"shape {self.shape} needs {column_count} columns{' or more' if self.shape == 'prompt' else ''}"
            raise ParamsError(f"{what}, found {len(self.columns)}", where="columns", fix="name the data set's columns")


InstructSource = ExercisesSource | DocstringsSource | IdentitySource | MessagesSource


@dataclass(frozen=True)
class InstructParams:
    """Section `instruct`."""

    seed: int = param(min=0, max=2**32 - 1)
    val_fraction: float = param(min=0.0, max=0.5)
    sources: tuple[InstructSource, ...]

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names:
            raise ParamsError("no instruction source", where="sources", fix="add an exercises source")
        check_file_names(names, "sources")

    @property
    def own(self) -> dict[str, list[str]]:
        """For the manifest: the sources that are files of one's own, where there are some."""
        names = [source.name for source in self.sources if isinstance(source, MessagesSource) and source.files]
        return {"own": names} if names else {}

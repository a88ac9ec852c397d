"""Parameters of the instruction sources: what conversations the download stage makes or reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from athanor.errors import ParamsError
from athanor.params.download import check_revision
from athanor.params.strict import param

DOCSTRING_KINDS = ("summary", "module", "signature", "code", "docstring", "doctest", "parameter", "topic")


@dataclass(frozen=True)
class ExercisesSource:
    """Embedded exercises with checkable answers; `categories` maps a generator to its number of conversations."""

    type: Literal["exercises"]
    name: str
    categories: dict[str, int]
    multi_turn_rows: int = param(min=0, max=10_000_000)  # conversations of two or three exercises each
    system_fraction: float = param(min=0.0, max=1.0)  # share of conversations that open with a system message


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
    """Conversations about what the model is; each is written `repeats` times in different wordings."""

    type: Literal["identity"]
    name: str
    repeats: int = param(min=1, max=1000)
    min_rows: int = param(min=1, max=1_000_000)  # gate


@dataclass(frozen=True)
class MessagesSource:
    """Conversations in the usual `messages` form: local JSONL or Parquet files, or a data set of the hub.

    Exactly one of `files` (a glob) and `hub_id` is set; a hub data set needs
    a pinned `revision`.
    """

    type: Literal["messages"]
    name: str
    files: str | None
    hub_id: str | None
    hub_config: str | None
    revision: str | None
    hub_split: str
    column: str
    max_rows: int = param(min=1, max=1_000_000_000)
    min_rows: int = param(min=1, max=1_000_000_000)  # gate
    license: str

    def __post_init__(self) -> None:
        if (self.files is None) == (self.hub_id is None):
            raise ParamsError("set exactly one of 'files' and 'hub_id'", where="files", fix="set the other one to null")
        if self.hub_id is not None:
            check_revision(self.hub_id, self.revision)


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
        for name in names:
            if not name.replace("-", "").replace("_", "").isalnum():
                fix = "use letters, digits, - and _"
                raise ParamsError(f"'{name}' is not a usable file name", where="sources", fix=fix)
            if names.count(name) > 1:
                raise ParamsError(f"two sources are named '{name}'", where="sources", fix="rename one")

"""Parameters of the document sources: which texts the download stage fetches, and what it must get."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from athanor.errors import ParamsError
from athanor.params.strict import param

MAX = 2**62


@dataclass(frozen=True)
class PythonSource:
    """The running interpreter's own standard library: its documentation as prose, its source as code.

    One scan feeds two sources of documents, because they share the parse of
    every file. `min_chars` leaves out scraps; `min_documents` and `min_bytes`
    are gates on each of the two.
    """

    type: Literal["python"]
    prose_name: str
    code_name: str
    max_prose_chars: int = param(min=500, max=1_000_000)
    max_code_chars: int = param(min=500, max=1_000_000)
    min_chars: int = param(min=1, max=100_000)
    min_documents: int = param(min=1, max=MAX)
    min_bytes: int = param(min=1, max=MAX)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.prose_name, self.code_name)


@dataclass(frozen=True)
class FilesSource:
    """Local .txt, .md, .jsonl and .parquet files, the text kinds also as .gz or .zst, found by `globs`.

    A text file is one document; a JSONL or Parquet row is one, in
    `text_column`. A document larger than `max_document_bytes` is an error, so
    that nothing is cut silently. One shorter than `min_chars` is counted and
    left out.
    """

    type: Literal["files"]
    name: str
    kind: str = param(choices=("web", "prose", "code", "math", "qa", "dialogue"))
    license: str
    globs: tuple[str, ...]
    text_column: str
    max_document_bytes: int = param(min=1, max=2**31 - 1)
    min_chars: int = param(min=1, max=100_000)
    min_documents: int = param(min=1, max=MAX)
    min_bytes: int = param(min=1, max=MAX)

    def __post_init__(self) -> None:
        if not self.globs:
            raise ParamsError("no glob is given", where="globs", fix="name the files, for example corpus/**/*.md")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class HuggingFaceSource:
    """A data set of the Hugging Face hub (or a local directory of data files), streamed in its own order.

    The budget ends the source at the first document that reaches
    `max_documents` or `max_bytes` of text; null means all of it. Progress is
    saved every `checkpoint_documents`.
    """

    type: Literal["huggingface"]
    name: str
    kind: str = param(choices=("web", "prose", "code", "math", "qa", "dialogue"))
    license: str
    dataset: str
    config: str | None
    split: str
    revision: str | None
    text_column: str
    max_document_bytes: int = param(min=1, max=2**31 - 1)
    skip_documents: int = param(min=0, max=MAX)
    max_documents: int | None = param(min=1, max=MAX)
    max_bytes: int | None = param(min=1, max=MAX)
    checkpoint_documents: int = param(min=1, max=10_000_000)
    min_chars: int = param(min=1, max=100_000)
    min_documents: int = param(min=1, max=MAX)
    min_bytes: int = param(min=1, max=MAX)

    def __post_init__(self) -> None:
        if not is_local(self.dataset):
            check_revision(self.dataset, self.revision)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


DocumentSource = PythonSource | FilesSource | HuggingFaceSource


@dataclass(frozen=True)
class DownloadParams:
    """Section `download`. `val_fraction` of all modules or documents is kept for validation, chosen by hash."""

    val_fraction: float = param(min=0.0, max=0.5)
    sources: tuple[DocumentSource, ...]

    def __post_init__(self) -> None:
        names = [name for source in self.sources for name in source.names]
        if not names:
            raise ParamsError("no document source", where="sources", fix="add a source, for example of type python")
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                fix = "use letters, digits, - and _"
                raise ParamsError(f"'{name}' is no usable file name", where="sources", fix=fix)
            if names.count(name) > 1:
                raise ParamsError(f"two sources are named '{name}'", where="sources", fix="rename one")


def is_local(dataset: str) -> bool:
    """True for a path (it starts with `/`, `./`, `../` or `~`), False for a hub id such as `owner/name`.

    Told from the spelling alone: whether a directory of that name happens to
    exist must not change what a params file means.
    """
    return dataset.startswith(("/", "./", "../", "~"))


def check_revision(dataset: str, revision: str | None) -> None:
    """ParamsError unless `revision` is a full commit hash: a branch or tag moves, and with it the corpus."""
    if revision is None or not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise ParamsError(
            f"'{revision}' does not pin the hub data set {dataset}",
            where="revision",
            fix="use the 40 hex digits of a commit (on the hub: Files and versions, History)",
        )

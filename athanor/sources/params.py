"""Parameters of the document sources: which texts the download stage fetches, and what it must get."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from athanor.base.errors import ParamsError
from athanor.base.strict import check_file_names, param, share
from athanor.sources.addresses import check_address, check_revision, is_local, without_query
from athanor.text.checks import COLUMN_NAME
from athanor.text.encodings import check_encoding

MAX = 2**62
KINDS = ("web", "prose", "code", "math", "qa", "dialogue", "tokens")


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A row is kept when the value of `column` is in a range, or one of the words of `one_of`.

    A row without a value is left out. Words are compared with the value as
    JSON writes it: `true`, `3`, but text without quotes.
    """

    column: str
    min: float | None = None
    max: float | None = None
    one_of: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if (self.one_of is None) == (self.min is None and self.max is None):
            raise ParamsError("set min, max or both, or one_of alone", where="column", fix="set the others to null")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows of a data set become documents, and which columns besides the text are kept.

    All `filters` must hold. `meta_columns` are stored in the document's meta
    (labels and scores that classifiers learn from, addresses).
    `license_column` holds the licence of each row, an SPDX expression or a
    list of ids of which all apply; with `licenses`, a row under any other
    licence, or none, is counted and left out; null takes all.
    """

    filters: tuple[Filter, ...] = ()
    meta_columns: tuple[str, ...] = ()
    license_column: str | None = None
    licenses: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.licenses is not None and self.license_column is None:
            raise ParamsError("needs a license_column", where="licenses", fix="name the column, or set it to null")
        check_licenses(self.licenses)


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


@dataclass(frozen=True)
class PackagesSource:
    """The Python packages installed beside the interpreter: documentation and readmes as prose, source as code.

    Only packages under one of `licenses` (SPDX ids; `LicenseRef-BSD` is a BSD
    licence of unnamed version) are read; unknown licences never pass. `exclude`
    names packages to leave out besides. Packages come in order of their names
    until prose and code together reach `max_bytes`; null reads all. Limits and
    gates are those of type python.
    """

    type: Literal["packages"]
    prose_name: str
    code_name: str
    licenses: tuple[str, ...]
    exclude: tuple[str, ...]
    max_bytes: int | None = param(min=1, max=MAX)
    max_prose_chars: int = param(min=500, max=1_000_000)
    max_code_chars: int = param(min=500, max=1_000_000)
    min_chars: int = param(min=1, max=100_000)
    min_documents: int = param(min=1, max=MAX)
    min_bytes: int = param(min=1, max=MAX)

    def __post_init__(self) -> None:
        if not self.licenses:
            raise ParamsError("no licence is allowed", where="licenses", fix="name SPDX ids, for example MIT")
        check_licenses(self.licenses)


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Keys of type files and of type remote."""

    type: str
    name: str
    kind: str = param(choices=KINDS, default="prose")
    license: str = "unknown"
    text_column: str = "text"  # does not count beside a template
    text_template: str | None = None
    encoding: str = "utf-8"
    select: Selection | None = None
    max_document_bytes: int = param(min=1, max=2**31 - 1, default=64_000_000)
    max_chars: int | None = param(min=200, max=2**31 - 1, default=6_000)
    min_chars: int = param(min=1, max=100_000, default=1)
    min_documents: int = param(min=1, max=MAX, default=1)
    min_bytes: int = param(min=1, max=MAX, default=1)
    on_unreadable: str = param(choices=("refuse", "skip"), default="refuse")

    def __post_init__(self) -> None:
        check_template(self.text_template)
        check_encoding(self.encoding)


@dataclass(frozen=True, kw_only=True)
class FilesSource(FileOptions):
    """Local files found by `globs`: text, Markdown, source code, .html, .epub, .docx, .ipynb, .pdf, .jsonl, .json, .csv, .tsv
    (these also as .gz or .zst), .parquet.

    A file is one document; of JSONL, JSON, CSV, TSV and Parquet each row is one, in
    `text_column`, or in `text_template` filled in: `{question}` stands for the
    column of that name, and a row where one is empty is left out. A text longer
    than `max_chars` is cut at its chapters, headings and paragraphs into
    documents up to that length, neighbours on one side of the split; null cuts
    nothing. One larger than `max_document_bytes` is an error, and one shorter
    than `min_chars` is counted and left out. `select` null takes every row;
    other files have no columns to select by.
    `encoding` is that of files that are not UTF-8 and have no byte order mark: a name such as cp1251 or gb18030, or
    `detect`, which finds it for each file and refuses those where it is not sure.
    `on_unreadable`: files that cannot be read are told together and end the
    stage (refuse), or are counted and left out, and so are single rows (skip).
    """

    type: Literal["files"]
    globs: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.globs:
            raise ParamsError("no glob is given", where="globs", fix="name the files, for example corpus/notes/**/*.md")


@dataclass(frozen=True, kw_only=True)
class RemoteSource(FileOptions):
    """Files of object stores and of hub data sets, fetched by the workers, then read as those of type files are.

    `urls` begin with `s3://`, `gs://`, `az://` or `hf://` and may hold the
    wildcards `*`, `**` and `[abc]`: `s3://BUCKET/FOLDER/**/*.parquet`. One of the
    hub names a commit: `hf://datasets/OWNER/NAME@COMMIT/**/*.parquet`. Keys and
    endpoints come from the environment only (docs/data.md).
    """

    type: Literal["remote"]
    urls: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.urls:
            raise ParamsError("no address is given", where="urls", fix="for example s3://BUCKET/FOLDER/**/*.parquet")
        for url in self.urls:
            check_address(url)


@dataclass(frozen=True, kw_only=True)
class CorpusSource:
    """A ready corpus, as datatrove, Dask and Spark write it: a folder of .parquet or .jsonl (also part-*.json, .gz, .zst).

    It stays where it lies: `data/raw` gets an index, without the texts, and
    every row is one document. Files and folders whose names begin with `_` or
    `.` are left out, and a folder `lang=en` is a column. A nested column is
    named with dots: `metadata.language_score`. `folder` is needed, unchanged and
    under this path, as long as stages read `data/raw`, on every machine that works.
    """

    type: Literal["corpus"]
    name: str
    kind: str = param(choices=KINDS)
    license: str
    folder: str
    text_column: str = "text"
    select: Selection | None = None
    max_document_bytes: int = param(min=1, max=2**31 - 1, default=64_000_000)
    min_chars: int = param(min=1, max=100_000, default=1)
    min_documents: int = param(min=1, max=MAX, default=1)
    min_bytes: int = param(min=1, max=MAX, default=1)


@dataclass(frozen=True)
class RemoteFile:
    """One file on a web server.

    `sha256` null takes what the server sends and keeps it, whatever it sends
    later; the manifest records what came, and the address without its query.
    An address that holds a login, signature or key is refused, because
    params.yaml, dvc.lock and Git would keep it.
    """

    url: str
    sha256: str | None

    def __post_init__(self) -> None:
        if re.match(r"\w+://[^/]*@", self.url):
            raise ParamsError("holds a login", where="url", fix="fetch the file by hand and use a source of type files")
        if not re.match(r"https?://[^/\s]+/\S+$", self.url):
            raise ParamsError(
                f"'{without_query(self.url)}' is no address of a file", where="url", fix="begin it with https://"
            )
        if self.sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ParamsError("not a SHA-256", where="sha256", fix="use 64 lower-case hex digits, or null")


@dataclass(frozen=True, kw_only=True)
class HttpSource:
    """Files of web servers, fetched with resuming and retries, then read as those of type files are.

    The end of the address says the format.
    """

    type: Literal["http"]
    name: str
    kind: str = param(choices=KINDS)
    license: str
    urls: tuple[RemoteFile, ...]
    text_column: str = "text"
    select: Selection | None = None
    max_document_bytes: int = param(min=1, max=2**31 - 1, default=64_000_000)
    min_chars: int = param(min=1, max=100_000)
    min_documents: int = param(min=1, max=MAX)
    min_bytes: int = param(min=1, max=MAX)

    def __post_init__(self) -> None:
        if not self.urls:
            raise ParamsError("no file is given", where="urls", fix="add an entry with url and sha256")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSource:
    """A data set of the Hugging Face hub (or a local directory of data files), streamed.

    The text is `text_column`, or `text_template` filled in: `{question}`
    stands for the column of that name, and a row where one is empty is left
    out. `json_lines` (a glob of files within the data set, for example
    `**/*.jsonl.gz`; `split` and `config` then do not count) reads JSON lines
    one by one, for sets whose other columns change type between files. The
    budget ends the source at the first document that reaches `max_documents`
    or `max_bytes` of text; null means all of it. With a budget, row groups and
    files are drawn from the whole data set (docs/data.md); without one, or
    after `skip_documents` rows, they come in its own order. Rows without readable text are counted; more than
    `max_malformed_fraction` of all rows is an error. `revision` null is filled
    in by `python -m athanor pin`.
    """

    type: Literal["huggingface"]
    name: str
    kind: str = param(choices=KINDS)
    license: str
    dataset: str
    config: str | None = None
    split: str = "train"
    revision: str | None
    json_lines: str | None = None
    text_column: str | None = None
    text_template: str | None = None
    select: Selection | None = None
    max_document_bytes: int = param(min=1, max=2**31 - 1, default=200_000_000)
    max_malformed_fraction: float = share(0.001)
    skip_documents: int = param(min=0, max=MAX, default=0)
    max_documents: int | None = param(min=1, max=MAX, default=None)
    max_bytes: int | None = param(min=1, max=MAX, default=None)
    min_chars: int = param(min=1, max=100_000)
    min_documents: int = param(min=1, max=MAX)
    min_bytes: int = param(min=1, max=MAX)

    def __post_init__(self) -> None:
        if not is_local(self.dataset):
            check_revision(self.dataset, self.revision)
        if (self.text_column is None) == (self.text_template is None):
            where = "text_column"
            raise ParamsError("set exactly one of text_column and text_template", where=where, fix="null the other")
        check_template(self.text_template)


RowSource = FilesSource | CorpusSource | RemoteSource | HttpSource | HuggingFaceSource
DocumentSource = PythonSource | PackagesSource | RowSource


@dataclass(frozen=True)
class DownloadParams:
    """Section `download`. `val_fraction` of all modules or documents is kept for validation, chosen by hash.

    `labels` are texts with labels for `classifiers`, and no part of the corpus.
    """

    val_fraction: float = param(min=0.0, max=0.5)
    sources: tuple[DocumentSource, ...]
    labels: tuple[HuggingFaceSource, ...] = ()

    def __post_init__(self) -> None:
        if not self.sources:
            raise ParamsError("no document source", where="sources", fix="add a source, for example of type python")
        check_file_names(self.names, "sources")
        check_file_names([source.name for source in self.labels], "labels")
        if "all" in self.names:
            raise ParamsError("'all' means every source together", where="sources", fix="use another name")

    @property
    def names(self) -> list[str]:
        """The names of all sources."""
        return [name for source in self.sources for name in names_of(source)]


def names_of(source: DocumentSource) -> tuple[str, ...]:
    """The names that a source's documents have."""
    return (source.prose_name, source.code_name) if hasattr(source, "prose_name") else (source.name,)


def check_template(template: str | None) -> None:
    if template is not None and not template_columns(template):
        raise ParamsError("names no column", where="text_template", fix="write a column in braces: {question}")


def template_columns(template: str) -> tuple[str, ...]:
    """Columns that a `text_template` names, in order; ParamsError for anything but plain names in braces."""
    columns = re.findall(r"\{([^{}]*)\}", template)
    if not all(re.fullmatch(COLUMN_NAME, column) for column in columns) or "{" in re.sub(r"\{[^{}]*\}", "", template):
        raise ParamsError("not a usable template", where="text_template", fix="only column names in braces: {question}")
    return tuple(dict.fromkeys(columns))


def check_licenses(licenses: tuple[str, ...] | None) -> None:
    for license_ in licenses or ():
        if not re.fullmatch(r"[A-Za-z0-9.+-]+( WITH [A-Za-z0-9.+-]+)?", license_):
            raise ParamsError(f"'{license_}' is no SPDX id", where="licenses", fix="for example MIT or Apache-2.0")

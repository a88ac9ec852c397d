"""Data sets of the Hugging Face hub, or local folders laid out as one: what is in them, their rows, and errors in words.

`datasets` finds the files and reads all but Parquet, of which pyarrow reads the row groups that are wanted.
`huggingface_hub` waits and tries again where the hub is busy.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from athanor.base.artifacts import digest, sha256_file
from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.sources import select
from athanor.sources.addresses import is_local
from athanor.sources.params import HuggingFaceSource
from athanor.text.documents import Document, hash64
from athanor.text.rows import MalformedRow, json_object

UNREACHABLE = "the hub cannot be reached"
FIRST_ROWS = 8
REMOTE = "hf://"


class DataSet(NamedTuple):
    """An opened data set. `files` are paths or hf:// addresses, one for each of the stream's shards."""

    stream: Any
    files: tuple[str, ...]
    parquet: bool


def pieces(stream: Any, dataset: str, name: str) -> Iterator[Facts]:
    """The rows of a stream by files, and of Parquet files by row groups, in the order of a hash of their numbers.

    The first of them, as many as fill a budget, lie all over the data set and not at its head.
    """
    try:
        stream = stream.reshard()
    except Exception as error:  # the ends of Parquet files are read
        raise explain(error, dataset, "") from error
    count = stream.num_shards
    for number in piece_order(name, count):
        yield from stream.shard(count, number, contiguous=True)


def piece_order(name: str, count: int) -> list[int]:
    return sorted(range(count), key=lambda number: hash64(f"{name}/{number}"))


class Probe(NamedTuple):
    """Bytes of text that a source will have, and its files with their bytes on the disk or at the hub."""

    text: int
    files: int
    bytes: int


def probe(source: HuggingFaceSource) -> Probe:
    """Open a data set and read its first rows; InputError where none of them can be used.

    Where nothing says how much text there will be, the source's minimum is taken.
    """
    opened = open_set(source)
    unusable, number, first = 0, 0, ""
    rows = rows_of(opened.stream, source.dataset, lambda: number)
    for number, row in enumerate(itertools.islice(rows, FIRST_ROWS), 1):
        try:
            document(source, row, f"{source.dataset} row {number}", {}, 0.0)
        except MalformedRow as error:
            unusable, first = unusable + 1, first or str(error)
    check_any(source, number)
    if unusable == number:
        what = f"none of the first {unusable} rows can be read, the first: {first}"
        raise InputError(what, where=source.dataset, fix="correct the columns in params.yaml")
    limits = [size for size in (source.max_bytes, _announced(source, opened.stream)) if size is not None]
    return Probe(min(limits, default=source.min_bytes), len(opened.files), sum(sizes(source.dataset, opened.files)))


def _announced(source: HuggingFaceSource, stream: Any) -> int | None:
    """The size of the data set in bytes, if all of it is taken and its card states the size."""
    if source.select is not None or source.max_documents is not None or source.json_lines is not None:
        return None
    splits = getattr(getattr(stream, "info", None), "splits", None) or {}
    return getattr(splits.get(source.split), "num_bytes", None) or None


def check_any(source: HuggingFaceSource, rows: int) -> None:
    if not rows:  # the client library says nothing of a pattern that matches no file
        fix = "correct json_lines or skip_documents in params.yaml"
        raise InputError("no row was found", where=source.json_lines or source.dataset, fix=fix)


def open_set(source: HuggingFaceSource) -> DataSet:
    if source.json_lines is not None:
        # Lines, each under "text": the client library's own reader casts every column to the type it has in the first
        # file, and fails on the first file where an unread column differs.
        name, local = source.dataset, is_local(source.dataset)
        base = Path(name).expanduser().resolve() if local else _address(name, source.revision)
        return _load(name, "train", "text", data_files={"train": f"{base}/{source.json_lines}"})
    place = (source.dataset, source.config, source.split, source.revision)
    return _open(*place, select.columns(source))


def document(source: HuggingFaceSource, row: Facts, where: str, meta: Facts, val_fraction: float) -> Document | str:
    """The document of a row, or the reason for leaving it out."""
    if source.json_lines is not None:
        row = json_object(row["text"], where) if row["text"].strip() else {}
    return select.document(source, row, where, meta, val_fraction)


def _address(dataset: str, revision: str | None) -> str:
    return f"{REMOTE}datasets/{dataset}@{revision}"


def name_of(source: HuggingFaceSource, file: str) -> str:
    """A file's name within its data set."""
    if file.startswith(REMOTE):
        return file.removeprefix(f"{_address(source.dataset, source.revision)}/")
    if is_local(source.dataset):
        return os.path.relpath(file, Path(source.dataset).expanduser().resolve())
    return file


def _hub() -> Any:
    from huggingface_hub import HfFileSystem

    return HfFileSystem(token=_token())


def _token() -> str | bool:
    return os.environ.get("HF_TOKEN") or False


def open_file(file: str) -> IO[bytes]:
    """A file to read parts of; each read is one request."""
    return _hub().open(file, cache_type="none") if file.startswith(REMOTE) else open(file, "rb")


def sizes(dataset: str, files: Sequence[str]) -> list[int]:
    """Bytes of each file, 0 for one that lies elsewhere. A folder of the hub is listed once."""
    try:
        return [
            _hub().info(file)["size"] if file.startswith(REMOTE) else os.path.getsize(file) if file[:1] == "/" else 0
            for file in files
        ]
    except Exception as error:
        raise explain(error, dataset, "") from error


def local_digest(dataset: str) -> str | None:
    """Digest of the files of a local data set, None for one of the hub (whose revision says it all)."""
    if not is_local(dataset):
        return None
    base = _folder(dataset)
    files = sorted(path for path in base.rglob("*") if path.is_file())
    return digest([[path.relative_to(base).as_posix(), sha256_file(path)] for path in files])


def _folder(dataset: str) -> Path:
    base = Path(dataset).expanduser()
    if not base.is_dir():
        raise InputError("no such directory", where=dataset, fix="correct the dataset in params.yaml, or use a hub id")
    return base


def open_stream(dataset: str, config: str | None, split: str, revision: str | None, columns: Sequence[str]) -> Any:
    """The `datasets.IterableDataset` of some columns, unshuffled; InputError with advice when it cannot be had.

    The access token, where one is needed, comes from HF_TOKEN in the
    environment and from nowhere else.
    """
    return _open(dataset, config, split, revision, columns).stream


def _open(dataset: str, config: str | None, split: str, revision: str | None, columns: Sequence[str]) -> DataSet:
    name = str(Path(dataset).expanduser().resolve()) if is_local(dataset) else dataset
    opened = _load(dataset, split, name, config, revision=revision)
    names = opened.stream.column_names
    if names is not None:
        for column in columns:
            if column not in names:
                available = ", ".join(sorted(names))
                raise InputError(f"column '{column}' is missing", where=dataset, fix=f"name one of: {available}")
        opened = opened._replace(stream=opened.stream.select_columns(list(columns)))
    return opened


def _load(dataset: str, split: str, *arguments: Any, **options: Any) -> DataSet:
    import datasets
    from datasets.packaged_modules.parquet.parquet import Parquet

    if is_local(dataset):
        _folder(dataset)
    datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(*arguments, token=_token(), **options)
        stream = builder.as_streaming_dataset(split=split)
        found = builder.config.data_files or {}
        files = [str(file) for part in split.split("+") for file in found.get(part.strip(), ())]
    except Exception as error:
        raise explain(error, dataset, split) from error
    if len(files) != stream.num_shards:
        return DataSet(stream, tuple(f"shard {number}" for number in range(stream.num_shards)), False)
    return DataSet(stream, tuple(files), bool(files) and isinstance(builder, Parquet))


def rows_of(stream: Any, dataset: str, rows_read: Callable[[], int]) -> Iterator[Facts]:
    """The rows of a stream. An error while reading is raised with the number of rows before it, never taken for the end."""
    iterator = iter(stream)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except InputError:
            raise
        except Exception as error:
            raise explain(error, dataset, "", after=rows_read()) from error
        yield row


def explain(error: Exception, dataset: str, split: str, after: int | None = None) -> InputError:
    """What went wrong with a data set, and what to do, from the exceptions that the client library raises."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = " ".join(str(error).split())[:300] or type(error).__name__
    where = dataset if after is None else f"{dataset} after {after:,} rows"
    resume = "" if after is None else "; what was downloaded is kept, run dvc repro again to continue"
    # Offline before missing: the client reports an unreachable hub as a missing data set or a plain ConnectionError.
    if names & {"OfflineModeIsEnabled", "ConnectionError", "ConnectError", "ConnectTimeout", "LocalEntryNotFoundError"}:
        return InputError(f"{UNREACHABLE} ({text})", where=where, fix=f"check the network{resume}")
    # The client's words for a missing repository speak of gated ones too.
    missing = "RepositoryNotFoundError" in names
    if "GatedRepoError" in names or ("gated" in text.lower() and not missing):
        fix = "accept its terms on its page, then set HF_TOKEN to a token of that account"
        return InputError(f"the data set is gated ({text})", where=where, fix=fix)
    if names & {"RepositoryNotFoundError", "DatasetNotFoundError", "RevisionNotFoundError", "EmptyDatasetError"}:
        fix = "check the id and the revision; for a private data set set HF_TOKEN"
        return InputError(f"the data set or revision cannot be found ({text})", where=where, fix=fix)
    if isinstance(error, ValueError) and "split" in text.lower():
        return InputError(f"cannot open split '{split}' ({text})", where=where, fix="correct the split")
    what = f"cannot be read ({type(error).__name__}: {text})"
    return InputError(what, where=where, fix=f"check the data set{resume}")

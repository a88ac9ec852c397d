"""Documents streamed from a Hugging Face data set, with progress that survives anything.

Without a shuffle buffer on purpose: it is lost on resume, and then an
interrupted download is not the same corpus. A source with a budget draws whole
pieces of the data set from all over it instead (`Pieces`). Progress is a folder of numbered
parts and one state file; a part counts once the state file names it with its
hash, so a crash between the two repeats that part and nothing else, and a
damaged one is fetched again.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from athanor.base.artifacts import digest, read_json, sha256_file, write_json
from athanor.base.errors import InputError, Interrupted
from athanor.base.work import Facts, Tick, ignore, never
from athanor.sources import select
from athanor.sources.params import HuggingFaceSource, is_local
from athanor.text.documents import Document, hash64, read_documents, write_documents
from athanor.text.rows import MalformedRow, json_object

STATE = "state.json"
UNREACHABLE = "the hub cannot be reached"
FIRST_ROWS = 8
SMALL_PIECE = 64_000_000  # bytes of text: a piece up to this is read whole
POSITION = ("documents", "bytes", "rows", "left_out", "first_malformed", "stream")


def fetch(
    source: HuggingFaceSource,
    folder: Path,
    val_fraction: float,
    *,
    tick: Tick = ignore,
    stop: Callable[[], bool] = never,
) -> Facts:
    """Bring the source's documents into parts under `folder`, continuing where an earlier call ended.

    Returns {documents, bytes, rows, left_out}: documents kept, UTF-8 bytes of
    their text, rows read, and rows not kept by reason. `tick` gets the bytes
    of every kept document, those of earlier calls first in one sum. Raises
    Interrupted, with everything so far saved, once `stop()` is true.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = _verified_prefix(folder, _load_state(folder))
    tick(state["bytes"])

    def check(ended: bool) -> None:
        count, first = state["left_out"].get("malformed", 0), state["first_malformed"] or ""
        select.check_malformed(source.name, count, state["rows"], source.max_malformed_fraction, first, ended=ended)

    if state["done"]:
        check(ended=True)  # the tolerance may be another than when it was fetched
        return _counts(state)
    stream = _stream_of(source)
    if in_pieces(source):
        stream = pieces(stream, source.dataset, source.name, source.max_bytes)
    elif source.skip_documents:
        stream = stream.skip(source.skip_documents)
    if state["stream"] is not None:
        stream.load_state_dict(state["stream"])
    unsaved: list[Document] = []
    unsaved_rows = 0  # rows since the last save
    budget = {"documents": source.max_documents, "bytes": source.max_bytes}
    limits = {unit: limit for unit, limit in budget.items() if limit is not None}

    def save(done: bool) -> None:
        nonlocal unsaved, unsaved_rows
        state["stream"], state["done"] = (None if done else stream.state_dict()), done
        if unsaved:
            checksum = _write_part(folder, len(state["parts"]), unsaved)
            # Where the stream stood after it, so that what follows can be fetched again from here.
            state["parts"].append({"sha256": checksum, **copy.deepcopy({key: state[key] for key in POSITION})})
        write_json(folder / STATE, state)
        unsaved, unsaved_rows = [], 0

    for row in rows_of(stream, source.dataset, lambda: state["rows"]):
        state["rows"] += 1
        unsaved_rows += 1
        outcome = _document(source, row, source.skip_documents + state["rows"], state, val_fraction)
        if isinstance(outcome, Document):
            unsaved.append(outcome)
            state["documents"] += 1
            state["bytes"] += (size := len(outcome.text.encode()))
            tick(size)
            if isinstance(stream, Pieces):
                stream.taken += size
        else:
            state["left_out"][outcome] = state["left_out"].get(outcome, 0) + 1
            check(ended=False)
        if any(state[unit] >= limit for unit, limit in limits.items()):
            break
        if stop():
            save(done=False)
            raise Interrupted(f"stopped after {state['documents']:,} documents of {source.name}; run again to continue")
        if unsaved_rows >= source.checkpoint_documents:
            save(done=False)
    _check_any(source, state["rows"])
    check(ended=True)
    save(done=True)
    return _counts(state)


def in_pieces(source: HuggingFaceSource) -> bool:
    """Whether only a part is wanted; rows can only be skipped in the data set's own order."""
    return (source.max_documents or source.max_bytes) is not None and not source.skip_documents


class Pieces:
    """The files of a stream, and of Parquet files the row groups, in the order of a hash of their numbers.

    The first of them, as many as fill a budget, lie all over the data set and
    not at its head. A large piece, as a compressed file, which can only be
    read from its beginning, is left once it has given twice its even share of
    `max_bytes`: at least half of the files are then in it. Who iterates adds
    to `taken` the bytes that were kept of the piece.
    """

    def __init__(self, stream: Any, name: str, max_bytes: int | None) -> None:
        self._stream = stream.reshard()
        count = self._stream.num_shards
        self._order = sorted(range(count), key=lambda number: hash64(f"{name}/{number}"))
        self._enough = float("inf") if max_bytes is None else max(2 * max_bytes // max(count, 1), SMALL_PIECE)
        self._open(0)

    def _open(self, position: int) -> None:
        self._position, self.taken = position, 0
        if position < len(self._order):
            self._piece = self._stream.shard(len(self._order), self._order[position], contiguous=True)

    def __iter__(self) -> Iterator[Facts]:
        while self._position < len(self._order):
            rows = iter(self._piece)
            while self.taken < self._enough and (row := next(rows, None)) is not None:
                yield row
            self._open(self._position + 1)

    def state_dict(self) -> Facts:
        return {"position": self._position, "taken": self.taken, "piece": self._piece.state_dict()}

    def load_state_dict(self, state: Facts) -> None:
        self._open(state["position"])
        self.taken = state["taken"]
        self._piece.load_state_dict(state["piece"])


def pieces(stream: Any, dataset: str, name: str, max_bytes: int | None = None) -> Pieces:
    try:
        return Pieces(stream, name, max_bytes)
    except Exception as error:  # the ends of Parquet files are read
        raise explain(error, dataset, "") from error


def probe(source: HuggingFaceSource, folder: Path) -> tuple[int, int]:
    """Bytes of text that the source will have, and those of them in `folder` already.

    Unless all are there, the data set is opened and its first rows are read;
    InputError where none of them can be used. Where nothing says how much
    there will be, the source's minimum is taken.
    """
    state = _load_state(folder)
    if state["done"]:
        return state["bytes"], state["bytes"]
    stream, probe_state = _stream_of(source), _initial_state()
    unusable = 0
    for row in itertools.islice(rows_of(stream, source.dataset, lambda: probe_state["rows"]), FIRST_ROWS):
        probe_state["rows"] += 1
        unusable += _document(source, row, probe_state["rows"], probe_state, 0.0) == "malformed"
    _check_any(source, probe_state["rows"])
    if unusable == probe_state["rows"]:
        what = f"none of the first {unusable} rows can be read, the first: {probe_state['first_malformed']}"
        raise InputError(what, where=source.dataset, fix="correct the columns in params.yaml")
    sizes = [size for size in (source.max_bytes, _announced(source, stream)) if size is not None]
    return max(min(sizes, default=source.min_bytes), state["bytes"]), state["bytes"]


def _announced(source: HuggingFaceSource, stream: Any) -> int | None:
    """The size of the data set in bytes, if all of it is taken and its card states the size."""
    if source.select is not None or source.max_documents is not None or source.json_lines is not None:
        return None
    splits = getattr(getattr(stream, "info", None), "splits", None) or {}
    return getattr(splits.get(source.split), "num_bytes", None) or None


def _check_any(source: HuggingFaceSource, rows: int) -> None:
    if not rows:  # the client library says nothing of a pattern that matches no file
        fix = "correct json_lines or skip_documents in params.yaml"
        raise InputError("no row was found", where=source.json_lines or source.dataset, fix=fix)


def _stream_of(source: HuggingFaceSource) -> Any:
    if source.json_lines is not None:
        # Lines, each under "text": the client library's own reader casts every column to the type it has in the first
        # file, and fails on the first file where an unread column differs.
        name, local = source.dataset, is_local(source.dataset)
        base = Path(name).expanduser().resolve() if local else f"hf://datasets/{name}@{source.revision}"
        return _load(name, "", "text", data_files={"train": f"{base}/{source.json_lines}"}, split="train")
    return open_stream(source.dataset, source.config, source.split, source.revision, select.columns(source))


def _document(source: HuggingFaceSource, row: Facts, number: int, state: Facts, val_fraction: float) -> Document | str:
    """The document of row `number` (from 1), or the reason for leaving it out."""
    where = f"{source.dataset} row {number}"
    try:
        if source.json_lines is not None:
            row = json_object(row["text"], where) if row["text"].strip() else {}
        return select.document(source, row, where, {"row": number - 1}, val_fraction)
    except MalformedRow as error:
        state["first_malformed"] = state["first_malformed"] or str(error)
        return "malformed"


def documents(folder: Path) -> Iterator[Document]:
    """The documents of a finished fetch, in the data set's order."""
    state = _load_state(folder)
    if not state["done"]:
        raise InputError("the download is not finished", where=folder, fix="run dvc repro again")
    for number in range(len(state["parts"])):
        yield from read_documents(_part_path(folder, number))


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
    name = str(Path(dataset).expanduser().resolve()) if is_local(dataset) else dataset
    stream = _load(dataset, split, name, config, split=split, revision=revision)
    names = stream.column_names
    if names is not None:
        for column in columns:
            if column not in names:
                available = ", ".join(sorted(names))
                raise InputError(f"column '{column}' is missing", where=dataset, fix=f"name one of: {available}")
        stream = stream.select_columns(list(columns))
    return stream


def _load(dataset: str, split_: str, *arguments: Any, **options: Any) -> Any:
    import datasets

    if is_local(dataset):
        _folder(dataset)
    datasets.disable_progress_bars()
    try:
        token = os.environ.get("HF_TOKEN") or False
        return datasets.load_dataset(*arguments, streaming=True, token=token, **options)
    except Exception as error:
        raise explain(error, dataset, split_) from error


def rows_of(stream: Any, dataset: str, rows_read: Callable[[], int]) -> Iterator[Facts]:
    """The rows of a stream. An error while reading is raised with the number of rows before it, never taken for the end."""
    iterator = iter(stream)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
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


def _load_state(folder: Path) -> Facts:
    if (folder / STATE).is_file():
        return read_json(folder / STATE)
    return {**_initial_state(), "parts": [], "done": False}


def _initial_state() -> Facts:
    return {"documents": 0, "bytes": 0, "rows": 0, "left_out": {}, "first_malformed": None, "stream": None}


def _verified_prefix(folder: Path, state: Facts) -> Facts:
    """The state before the first missing or changed part; the state itself if all parts are as they were written."""
    for number, part in enumerate(state["parts"]):
        path = _part_path(folder, number)
        if not path.is_file() or sha256_file(path) != part["sha256"]:
            before = state["parts"][number - 1] if number else _initial_state()
            position = copy.deepcopy({key: before[key] for key in POSITION})
            return {**position, "parts": state["parts"][:number], "done": False}
    return state


def _counts(state: Facts) -> Facts:
    return {key: state[key] for key in ("documents", "bytes", "rows", "left_out")}


def _part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.parquet"


def _write_part(folder: Path, number: int, batch: list[Document]) -> str:
    """Write a part file atomically; returns its SHA-256."""
    path = _part_path(folder, number)
    temporary = path.with_suffix(".tmp")
    write_documents(temporary, batch)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    checksum = sha256_file(temporary)
    os.replace(temporary, path)
    return checksum

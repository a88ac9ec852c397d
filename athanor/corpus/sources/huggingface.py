"""Documents streamed from a Hugging Face data set, with progress that survives anything.

Unshuffled on purpose: a shuffle buffer is lost on resume, and then an
interrupted download is not the same corpus. Progress is a folder of numbered
parts and one state file; a part counts once the state file names it with its
hash, so a crash between the two repeats that part and nothing else, and a
damaged one is fetched again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from athanor.artifacts import digest, read_json, sha256_file, write_json
from athanor.corpus.documents import Document, content_id, read_documents, split_of, write_documents
from athanor.corpus.sources.rows import check_text
from athanor.errors import InputError, Interrupted
from athanor.params.download import HuggingFaceSource, is_local

STATE = "state.json"
POSITION = ("documents", "bytes", "rows", "stream")


def fetch(
    source: HuggingFaceSource,
    folder: Path,
    val_fraction: float,
    *,
    tick: Callable[[int], None] = lambda text_bytes: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, int]:
    """Bring the source's documents into parts under `folder`, continuing where an earlier call ended.

    Returns {documents, bytes, rows}: documents kept, UTF-8 bytes of their text,
    rows read (documents below `min_chars` are read and left out). `tick`
    gets the bytes of every kept document, those of earlier calls first in one
    sum. Raises Interrupted, with everything so far saved, once `stop()` is true.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = _whole(folder, _load_state(folder))
    tick(state["bytes"])
    if state["done"]:
        return _counts(state)
    stream = open_stream(source.dataset, source.config, source.split, source.revision, source.text_column)
    if source.skip_documents:
        stream = stream.skip(source.skip_documents)
    if state["stream"] is not None:
        stream.load_state_dict(state["stream"])
    part: list[Document] = []
    pending = 0  # rows since the last save

    def save(done: bool) -> None:
        nonlocal part, pending
        state["stream"], state["done"] = (None if done else stream.state_dict()), done
        if part:
            checksum = _write_part(folder, len(state["parts"]), part)
            # Where the stream stood after it, so that what follows can be fetched again from here.
            state["parts"].append({"sha256": checksum, **{key: state[key] for key in POSITION}})
        write_json(folder / STATE, state)
        part, pending = [], 0

    for row in rows_of(stream, source.dataset, lambda: state["rows"]):
        state["rows"] += 1
        pending += 1
        where = f"{source.dataset} row {source.skip_documents + state['rows']}"
        if source.text_column not in row:
            raise InputError(f"column '{source.text_column}' is missing", where=where, fix=f"found: {sorted(row)}")
        text = check_text(row[source.text_column], where, source.text_column, source.max_document_bytes)
        if len(text) >= source.min_chars and text.strip():
            meta = {"row": source.skip_documents + state["rows"] - 1}
            split = split_of(content_id(text), val_fraction)
            part.append(Document(text, source.name, source.kind, source.license, split, meta))
            state["documents"] += 1
            state["bytes"] += (size := len(text.encode()))
            tick(size)
        if _spent(source, state):
            break
        if stop():
            save(done=False)
            raise Interrupted(f"stopped after {state['documents']:,} documents of {source.name}; run again to continue")
        if pending >= source.checkpoint_documents:
            save(done=False)
    save(done=True)
    return _counts(state)


def documents(folder: Path) -> Iterator[Document]:
    """The documents of a finished fetch, in the data set's order."""
    state = _load_state(folder)
    if not state["done"]:
        raise InputError("the download is not finished", where=str(folder), fix="run dvc repro again")
    for number in range(len(state["parts"])):
        yield from read_documents(_part_path(folder, number))


def local_digest(dataset: str) -> str | None:
    """Digest of the files of a local data set, None for one of the hub (whose revision says it all)."""
    if not is_local(dataset):
        return None
    base = Path(dataset).expanduser()
    if not base.is_dir():
        raise InputError("no such directory", where=dataset, fix="correct the dataset in params.yaml, or use a hub id")
    files = sorted(path for path in base.rglob("*") if path.is_file())
    return digest([[path.relative_to(base).as_posix(), sha256_file(path)] for path in files])


def open_stream(dataset: str, config: str | None, split: str, revision: str | None, column: str) -> Any:
    """The `datasets.IterableDataset` of one column, unshuffled; InputError with advice when it cannot be had.

    The access token, where one is needed, comes from HF_TOKEN in the
    environment and from nowhere else.
    """
    import datasets

    name = str(Path(dataset).expanduser().resolve()) if is_local(dataset) else dataset
    local_digest(dataset)  # a clear error for a directory that does not exist
    datasets.disable_progress_bars()
    try:
        token = os.environ.get("HF_TOKEN") or False
        stream = datasets.load_dataset(name, config, split=split, revision=revision, streaming=True, token=token)
        names = stream.column_names
    except Exception as error:
        raise explain(error, dataset, split) from error
    if names is not None:
        if column not in names:
            raise InputError(f"column '{column}' is missing", where=dataset, fix=f"found: {', '.join(sorted(names))}")
        stream = stream.select_columns([column])
    return stream


def rows_of(stream: Any, dataset: str, done: Callable[[], int]) -> Iterator[dict[str, Any]]:
    """Rows of a stream; an error while reading is told with the row it came at, and never ends the data early."""
    iterator = iter(stream)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise explain(error, dataset, "", after=done()) from error
        yield row


def explain(error: Exception, dataset: str, split: str, after: int | None = None) -> InputError:
    """What went wrong with a data set, and what to do, from the exceptions that the client library raises."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = " ".join(str(error).split())[:300] or type(error).__name__
    where = dataset if after is None else f"{dataset} after {after:,} rows"
    resume = "" if after is None else "; what was downloaded is kept, run dvc repro again to continue"
    # Offline before missing: the client reports an unreachable hub as a missing data set or a plain ConnectionError.
    if names & {"OfflineModeIsEnabled", "ConnectionError", "ConnectError", "ConnectTimeout", "LocalEntryNotFoundError"}:
        return InputError(f"the hub cannot be reached ({text})", where=where, fix=f"check the network{resume}")
    if names & {"GatedRepoError"} or "gated" in text.lower():
        fix = "accept its terms on its page, then set HF_TOKEN to a token of that account"
        return InputError(f"the data set is gated ({text})", where=where, fix=fix)
    if names & {"RepositoryNotFoundError", "DatasetNotFoundError", "RevisionNotFoundError", "EmptyDatasetError"}:
        fix = "check the id and the revision; for a private data set set HF_TOKEN"
        return InputError(f"the data set or revision cannot be found ({text})", where=where, fix=fix)
    if isinstance(error, ValueError) and "split" in text.lower():
        return InputError(f"cannot open split '{split}' ({text})", where=where, fix="correct the split")
    what = f"cannot be read ({type(error).__name__}: {text})"
    return InputError(what, where=where, fix=f"check the data set{resume}")


def _spent(source: HuggingFaceSource, state: dict[str, Any]) -> bool:
    documents_full = source.max_documents is not None and state["documents"] >= source.max_documents
    return documents_full or (source.max_bytes is not None and state["bytes"] >= source.max_bytes)


def _load_state(folder: Path) -> dict[str, Any]:
    if (folder / STATE).is_file():
        return read_json(folder / STATE)
    return {"documents": 0, "bytes": 0, "rows": 0, "parts": [], "stream": None, "done": False}


def _whole(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The state before the first part that is missing or not what was written; all of it if there is none."""
    for number, part in enumerate(state["parts"]):
        path = _part_path(folder, number)
        if not path.is_file() or sha256_file(path) != part["sha256"]:
            before = state["parts"][number - 1] if number else {"documents": 0, "bytes": 0, "rows": 0, "stream": None}
            kept = {key: before[key] for key in POSITION}
            return {**kept, "parts": state["parts"][:number], "done": False}
    return state


def _counts(state: dict[str, Any]) -> dict[str, int]:
    return {key: state[key] for key in ("documents", "bytes", "rows")}


def _part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.parquet"


def _write_part(folder: Path, number: int, part: list[Document]) -> str:
    """Write a part whole or not at all; returns its SHA-256."""
    path = _part_path(folder, number)
    temporary = path.with_suffix(".tmp")
    write_documents(temporary, part)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    checksum = sha256_file(temporary)
    os.replace(temporary, path)
    return checksum

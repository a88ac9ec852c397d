"""Documents of a hub data set, read on the executor: its files, and of Parquet files the row groups, are the pieces.

A task reads some pieces and writes finished raw shards. Without a budget the pieces come in the data set's order; with
one, in the order of a hash of their numbers (`huggingface.piece_order`), and are read in waves, each as large as what
was read so far says that the rest of the budget needs. A wave follows from the results of those before it, and from
nothing else: so the corpus depends neither on the workers nor on interruptions, and is the one that reading piece
after piece would give. No shuffle buffer: it is lost on resume.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from athanor.base.artifacts import digest, read_json, write_json
from athanor.base.work import Facts, MapShards, check_stop
from athanor.sources import huggingface, select
from athanor.sources.file_tasks import PACKED
from athanor.sources.huggingface import DataSet
from athanor.sources.params import HuggingFaceSource
from athanor.sources.raw_shards import FACTS, RawWriter, Tally, publish, remove_damaged
from athanor.text import rows
from athanor.text.documents import SHARD_BYTES, Document

PLAN, TASKS = "plan.json", "tasks"
FOOTERS = 16  # files of a task that reads the ends of Parquet files
SMALL_PIECE = 64_000_000  # bytes of text: a piece up to this is read whole
FIRST_WAVE = 16 * SHARD_BYTES
FILE, GROUP, FIRST, ROWS, SIZE = range(5)  # columns of the pieces: 40 bytes a piece; FIRST: number of its first row


def fetch(
    source: HuggingFaceSource, folder: Path, val_fraction: float, target: Path, map_shards: MapShards
) -> tuple[Tally, int]:
    """Bring the source's documents into raw shards below `target`; returns their tally and the rows that were read.

    `folder` keeps finished tasks, so an interrupted call is continued by the next. A piece that gives much, as a
    compressed file, which can only be read from its beginning, is left once it has given twice its even share of
    `max_bytes`: at least half of the files are then in the corpus.
    """
    tasks, plan = folder / TASKS, folder / PLAN
    remove_damaged(tasks)
    names = read_json(plan)["tasks"] if plan.is_file() else [""]
    if all((tasks / name / FACTS).is_file() for name in names):
        results = {name: read_json(tasks / name / FACTS) for name in names}
    else:
        plan.unlink(missing_ok=True)
        results = _read(source, folder, val_fraction, map_shards)
    _check_malformed(source, results, ended=True)  # the tolerance may be another than when they were read
    row_count = sum(facts["rows"] for facts in results.values())
    huggingface.check_any(source, row_count)
    tally = publish(((tasks / name, facts) for name, facts in results.items()), target, limits_of(source))
    write_json(plan, {"tasks": list(results), "bytes": tally.bytes})
    for task in tasks.iterdir():
        if task.name not in results:  # read, and not needed
            shutil.rmtree(task)
    return tally, row_count


def fetched(folder: Path) -> tuple[int, bool]:
    """Bytes of text that `folder` holds, and whether they are all."""
    if (folder / PLAN).is_file():
        return read_json(folder / PLAN)["bytes"], True
    facts = (read_json(path) for path in (folder / TASKS).glob(f"*/{FACTS}"))
    return sum(shard["bytes"] for task in facts for shard in task["shards"]), False


def limits_of(source: HuggingFaceSource) -> dict[str, int]:
    limits = {"documents": source.max_documents, "bytes": source.max_bytes}
    return {unit: limit for unit, limit in limits.items() if limit is not None}


def drawn(source: HuggingFaceSource) -> bool:
    """True where only a part is wanted; rows can only be skipped in the data set's own order."""
    return bool(limits_of(source)) and not source.skip_documents


def _read(source: HuggingFaceSource, folder: Path, val_fraction: float, map_shards: MapShards) -> dict[str, Facts]:
    """The facts of the tasks that the corpus is made of, in its order."""
    opened = huggingface.open_set(source)
    pieces, skip, enough = pieces_of(source, opened, folder, map_shards), source.skip_documents, math.inf
    if drawn(source):
        if source.max_bytes is not None:
            enough = max(2 * source.max_bytes // max(len(pieces), 1), SMALL_PIECE)
        pieces = pieces[huggingface.piece_order(source.name, len(pieces))]
    common = {"source": source, "val_fraction": val_fraction, "parquet": opened.parquet, "enough": enough}
    results: dict[str, Facts] = {}
    done, position, seen, limits = Tally(), 0, 0.0, limits_of(source)
    estimates = np.minimum(pieces[:, SIZE], enough)
    while position < len(pieces) and not done.reaches(limits):
        amounts = _amounts(done, seen, pieces, limits)
        # The task that skips ends with the piece where it began to take rows.
        groups = [len(pieces)] if skip else list(_groups(estimates[position:], *amounts))
        budget = {unit: limit - getattr(done, unit) for unit, limit in limits.items()}
        tasks, sizes, end = {}, {}, position
        for count in groups:
            chosen = pieces[end : end + count, : FIRST + 1].tolist()
            task = {"pieces": chosen, "limits": budget, "skip": skip}
            name = f"{len(results) + len(tasks):06d}-{digest([task, str(enough)])[:8]}"  # of other code: another task
            named = [(opened.files[place[FILE]], *place) for place in chosen]
            tasks[name] = common | task | {"pieces": named}
            sizes[name] = int(estimates[end : end + count].sum())
            end += count
        for name, facts in map_shards(read_pieces, tasks, folder / TASKS, desc=source.name, sizes=sizes).items():
            results[name] = facts
            seen += float(estimates[position : position + facts["pieces"]].sum())
            position += facts["pieces"]
            for shard in facts["shards"]:
                done.merge(shard)
            if done.reaches(limits):
                break
        skip = 0
        _check_malformed(source, results, ended=False)
    return results


def _amounts(done: Tally, seen: float, pieces: np.ndarray, limits: Mapping[str, int]) -> tuple[float, float]:
    """Bytes by the pieces' sizes to read in the next wave, and in one task of it.

    What was read says how much text a byte of the sizes gives, after filters. Until it does, the sizes are taken for
    text, and documents for rows; where these are unknown, too, a task goes first.
    """
    amount = max(FIRST_WAVE, seen)  # at most as much again: the share that is kept may change
    if done.bytes:
        kept = {"documents": done.documents / seen, "bytes": done.bytes / seen}
    elif seen:
        kept = {}
    else:
        kept = {"documents": pieces[:, ROWS].sum() / max(pieces[:, SIZE].sum(), 1) or math.inf, "bytes": 1.0}
    for unit, limit in limits.items():
        if unit in kept:
            amount = min(amount, (limit - getattr(done, unit)) / kept[unit])
    amount = max(amount, seen / 8)  # or a source that gives less and less would take waves without number
    return amount, SHARD_BYTES / min(max(kept.get("bytes", 1 / 64), 1 / 64), 64)


def _groups(sizes: np.ndarray, amount: float, task_size: float) -> Iterator[int]:
    """Numbers of pieces that make tasks up to `task_size`, or of one larger piece, until `amount` is in them."""
    count, size, total = 0, 0.0, 0.0
    for piece in sizes.tolist():
        if total and total >= amount:
            break
        if count and size + piece > task_size:
            yield count
            count, size = 0, 0.0
        count, size, total = count + 1, size + piece, total + piece
    if count:
        yield count


def pieces_of(source: HuggingFaceSource, opened: DataSet, folder: Path, map_shards: MapShards) -> np.ndarray:
    """The pieces in the data set's own order, a row for each; sizes are estimates of the bytes of text."""
    if not opened.parquet:
        sizes = huggingface.sizes(source.dataset, opened.files)
        factors = [PACKED if file.endswith((".gz", ".zst", ".bz2", ".xz")) else 1 for file in opened.files]
        estimates = [size * factor or SHARD_BYTES for size, factor in zip(sizes, factors, strict=True)]
        return np.array([(n, 0, 0, 0, size) for n, size in enumerate(estimates)], np.int64).reshape(-1, SIZE + 1)
    columns = select.text_columns(source)
    tasks = {
        f"{first:06d}": {"files": opened.files[first : first + FOOTERS], "columns": columns, "dataset": source.dataset}
        for first in range(0, len(opened.files), FOOTERS)
    }
    found = map_shards(read_footers, tasks, folder / "footers", desc=f"{source.name}, row groups")
    footers = [np.array(groups, np.int64).reshape(-1, 2) for facts in found.values() for groups in facts["files"]]
    return np.concatenate([_groups_of(*pair) for pair in zip(range(len(opened.files)), footers, strict=True)])


def _groups_of(number: int, groups: np.ndarray) -> np.ndarray:
    table = np.zeros((len(groups), SIZE + 1), np.int64)
    table[:, FILE], table[:, GROUP], table[:, ROWS:] = number, np.arange(len(groups)), groups
    table[:, FIRST] = np.cumsum(groups[:, 0]) - groups[:, 0]
    return table


def _check_malformed(source: HuggingFaceSource, results: Mapping[str, Facts], *, ended: bool) -> None:
    count = sum(facts["left_out"].get("malformed", 0) for facts in results.values())
    first = next((facts["first_malformed"] for facts in results.values() if facts["first_malformed"]), "")
    row_count = sum(facts["rows"] for facts in results.values())
    select.check_malformed(source.name, count, row_count, source.max_malformed_fraction, first, ended=ended)


def read_footers(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: rows, and bytes of the text's columns, of each row group of some Parquet files."""
    files = []
    for path in task["files"]:
        check_stop()
        try:
            metadata = _footer(path, out.parent.parent)
        except Exception as error:
            raise huggingface.explain(error, f"{task['dataset']} ({path})", "", after=0) from error
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        files.append([[group.num_rows, _text_bytes(group, task["columns"])] for group in groups])
    return {"files": files}


@functools.lru_cache(maxsize=FOOTERS)
def _footer(path: str, slot: Path) -> pq.FileMetaData:
    """What the end of a Parquet file says, read once in a process, and again for another slot: files may have changed."""
    with huggingface.open_file(path) as file:
        return pq.ParquetFile(file).metadata


def _text_bytes(group: Any, columns: tuple[str, ...]) -> int:
    chunks = (group.column(number) for number in range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns)


def read_pieces(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: the documents of some pieces as raw shards, up to a budget or, after rows to skip, to the piece's end."""
    source: HuggingFaceSource = task["source"]
    skip, row_count, count, first_malformed = task["skip"], 0, 0, ""
    with RawWriter(out, source.min_chars) as writer:
        for path, number, group, first in task["pieces"]:
            count += 1
            name, before, skipping = huggingface.name_of(source, path), writer.tally.bytes, skip > 0
            slot = out.parent.parent
            read = _parquet_rows(source, slot, path, group, first) if task["parquet"] else _stream(source, slot, number)
            where = f"{source.dataset} {name}"
            for row_number, row in enumerate(huggingface.rows_of(read, where, lambda: row_count), first):
                check_stop()
                if skip:
                    skip -= 1
                    continue
                row_count += 1
                try:
                    meta = {"file": name, "row": row_number}
                    outcome = huggingface.document(
                        source, row, f"{where} row {row_number + 1}", meta, task["val_fraction"]
                    )
                except select.MalformedRow as error:
                    outcome, first_malformed = "malformed", first_malformed or str(error)
                    if not source.max_malformed_fraction:
                        select.check_malformed(source.name, 1, row_count, 0.0, first_malformed, ended=True)
                if isinstance(outcome, Document):
                    writer.add(outcome)
                else:
                    writer.tally.leave_out(outcome)
                if writer.tally.reaches(task["limits"]) or writer.tally.bytes - before >= task["enough"]:
                    break
            if writer.tally.reaches(task["limits"]) or (skipping and not skip):
                break
    return {"rows": row_count, "pieces": count, "first_malformed": first_malformed} | writer.facts


def _parquet_rows(source: HuggingFaceSource, slot: Path, path: str, group: int, first: int) -> Iterator[Facts]:
    name = f"{source.dataset} {huggingface.name_of(source, path)}"
    with huggingface.open_file(path) as file:
        parquet = pq.ParquetFile(file, metadata=_footer(path, slot))
        wanted = (select.columns(source), source.max_document_bytes, [group])
        for _, row in rows.parquet_rows(parquet, name, *wanted, first):
            yield row


def _stream(source: HuggingFaceSource, slot: Path, number: int) -> Any:
    stream = _opened(source, slot).stream
    return stream.shard(stream.num_shards, number, contiguous=True)


@functools.lru_cache(maxsize=1)
def _opened(source: HuggingFaceSource, slot: Path) -> DataSet:
    """A data set, opened once in a process."""
    return huggingface.open_set(source)

"""Documents of files on this machine, read on the executor: a task reads one large file, or some small ones."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.base.work import Facts, MapShards, check_stop
from athanor.sources import select
from athanor.sources.params import FilesSource, HttpSource, RemoteSource
from athanor.sources.raw_shards import RawWriter, Tally, publish
from athanor.text import rows
from athanor.text.documents import SHARD_BYTES, in_batches
from athanor.text.globs import Files

PACKED = 4  # bytes of text of a byte of a compressed file, about


def write(
    source: FilesSource | RemoteSource | HttpSource,
    files: Files,
    val_fraction: float,
    target: Path,
    map_shards: MapShards,
) -> tuple[Tally, select.Unreadable]:
    """Write the documents of the files, in their order, as raw shards below `target`; returns what was counted."""
    batches = list(in_batches(files, lambda file: _text_bytes(file[1]), SHARD_BYTES))
    tasks = {f"{n:06d}": {"source": source, "files": b, "val_fraction": val_fraction} for n, b in enumerate(batches)}
    sizes = {f"{n:06d}": sum(_text_bytes(path) for _, path in batch) for n, batch in enumerate(batches)}
    folder = target.with_name(f".{target.name}.tasks")  # reading once more costs little: nothing is kept for a next run
    found = map_shards(read_files, tasks, folder, desc=source.name, sizes=sizes)
    unreadable = select.Unreadable()
    for facts in found.values():
        for error in facts["unreadable"]:
            unreadable.add(InputError(error["what"], where=error["where"], fix=error["fix"]))
    unreadable.check(source, len(files))
    tally = publish(((folder / name, facts) for name, facts in found.items()), target, {})
    shutil.rmtree(folder)
    return tally, unreadable


def _text_bytes(path: Path) -> int:
    return path.stat().st_size * (PACKED if path.suffix.lower() in (*rows.COMPRESSED, rows.PARQUET) else 1)


def read_files(task: Mapping[str, Any], out: Path) -> Facts:
    """Work: the documents of some files as raw shards, and the errors of files that cannot be read."""
    source, unreadable = task["source"], select.Unreadable()
    with RawWriter(out, source.min_chars) as writer:
        leave_out, fraction = writer.tally.leave_out, task["val_fraction"]
        with contextlib.suppress(InputError):  # it is in `unreadable`, and is raised with those of the other tasks
            for document in select.documents(source, task["files"], fraction, leave_out, unreadable):
                check_stop()
                writer.add(document)
    errors = [{"what": e.what, "where": e.where, "fix": e.fix} for e in unreadable.all]
    return {"unreadable": errors} | writer.facts

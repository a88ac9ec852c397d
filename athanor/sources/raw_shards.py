"""Raw shards of a source: written and counted by whoever reads it, in one process or in many, then linked under their numbers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from athanor.base.artifacts import link, read_json, sha256_file
from athanor.base.errors import GateError, InputError
from athanor.base.work import Facts
from athanor.sources.params import DocumentSource
from athanor.text.documents import Document, DocumentWriter, ShardWriter, read_documents

FACTS = "facts.json"  # the executor's name for what a task returned
AFTER_BUDGET = "after_budget"  # the reason of documents that were read and not needed


def _zero() -> dict[str, int]:
    return {"documents": 0, "bytes": 0}


@dataclass
class Tally:
    """Counts of one source. `left_out` counts rows and documents that were read and not taken, by reason."""

    documents: int = 0
    bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    train: dict[str, int] = field(default_factory=_zero)
    val: dict[str, int] = field(default_factory=_zero)

    def add(self, document: Document) -> None:
        self.documents += 1
        self.bytes += self.count(document, self.val if document.split == "val" else self.train, 1)

    @staticmethod
    def count(document: Document, side: dict[str, int], sign: int) -> int:
        size = len(document.text.encode())
        side["documents"] += sign
        side["bytes"] += sign * size
        return size

    def leave_out(self, reason: str, count: int = 1) -> None:
        if count:
            self.left_out[reason] = self.left_out.get(reason, 0) + count

    def merge(self, shard: Mapping[str, Any]) -> None:
        self.documents += shard["documents"]
        self.bytes += shard["bytes"]
        for side in ("train", "val"):
            for unit, count in shard[side].items():
                getattr(self, side)[unit] += count

    def reaches(self, limits: Mapping[str, int], shard: Mapping[str, int] = _zero()) -> bool:
        """True once a budget is spent, here or after a further shard."""
        return any(getattr(self, unit) + shard[unit] >= limit for unit, limit in limits.items())


class RawWriter:
    """Writes documents as numbered shards below `folder`, and counts them; `shards` are the facts of each file."""

    def __init__(self, folder: Path, min_chars: int) -> None:
        self.folder, self.min_chars, self.tally = folder, min_chars, Tally()
        self.shards: list[Facts] = []
        self._open, self._files = Tally(), ShardWriter(folder)

    def add(self, document: Document) -> None:
        if len(document.text) < self.min_chars or not document.text.strip():
            self.tally.leave_out("short")
            return
        self._files.add(document)
        self._open.add(document)
        self.tally.add(document)
        if self._open.bytes >= self._files.shard_bytes:  # at which the file was closed
            self._end_shard()

    def _end_shard(self) -> None:
        shard = asdict(self._open)
        del shard["left_out"]
        self.shards.append(shard | {"sha256": sha256_file(shard_path(self.folder, len(self.shards)))})
        self._open = Tally()

    @property
    def facts(self) -> Facts:
        return {"shards": self.shards, "left_out": self.tally.left_out}

    def __enter__(self) -> RawWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._files.close()
        if kind is None and self._open.documents:
            self._end_shard()


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.parquet"


def publish(tasks: Iterable[tuple[Path, Facts]], target: Path, limits: Mapping[str, int]) -> Tally:
    """Link the shards of finished tasks, in order, into `target` under their numbers, and count what is in them.

    The document that reaches a limit is the last: its shard is cut, and what was read after it is left out.
    """
    target.mkdir(parents=True)  # and empty: what stands there may be a link to what must not change
    tally, count = Tally(), 0
    for folder, facts in tasks:
        if tally.reaches(limits):
            break
        for reason, number in facts["left_out"].items():
            tally.leave_out(reason, number)
        for number, shard in enumerate(facts["shards"]):
            path = shard_path(folder, number)
            if tally.reaches(limits):
                tally.leave_out(AFTER_BUDGET, shard["documents"])
            elif tally.reaches(limits, shard):
                before = tally.documents
                with DocumentWriter(shard_path(target, count)) as writer:
                    for document in read_documents(path):
                        writer.add(document)
                        tally.add(document)
                        if tally.reaches(limits):
                            break
                tally.leave_out(AFTER_BUDGET, before + shard["documents"] - tally.documents)
            else:
                link(path, shard_path(target, count))
                tally.merge(shard)
                count += 1
    return tally


def remove_damaged(folder: Path) -> None:
    """Remove finished tasks whose files are not as they were written, so that they are done again."""
    for facts_path in sorted(folder.glob(f"*/{FACTS}")):
        task = facts_path.parent
        with contextlib.suppress(InputError, OSError):
            shards = read_json(facts_path)["shards"]
            if all(sha256_file(shard_path(task, n)) == shard["sha256"] for n, shard in enumerate(shards)):
                continue
        shutil.rmtree(task)


def check_size(source: DocumentSource, name: str, tally: Tally) -> None:
    """GateError where a source gave less than its minimum."""
    for unit in ("documents", "bytes"):
        actual, minimum = getattr(tally, unit), getattr(source, f"min_{unit}")
        if actual < minimum:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(tally.left_out.items()))
            raise GateError(
                "source size",
                f"source '{name}' gave {actual:,} {unit}, its minimum is {minimum:,}"
                + (f" (left out: {reasons})" if reasons else ""),
                where=f"download.sources ({name})",
                fix=f"find out why the source shrank, or lower its min_{unit} in params.yaml",
            )

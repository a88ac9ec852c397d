"""The corpus on disk, for commands that look at it: files, columns, single documents.

Nothing here holds the corpus: columns are read in batches, and text only of the
documents that were chosen, one Parquet row group (4,096 documents of one
shard) at a time.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from athanor.base.artifacts import read_json, read_manifest
from athanor.base.errors import AthanorError, InputError
from athanor.base.strict import build
from athanor.cleaning.measuring import SCORES
from athanor.cleaning.params import CleanParams
from athanor.runtime.dvc_lock import built_params
from athanor.text.documents import index_of, read_rows, shard_files

RAW, CLEAN, SHARDS = Path("data/raw"), Path("data/clean"), Path("data/shards")
TOKENIZER, CLASSIFIERS, ITEMS = Path("models/tokenizer"), Path("models/classifiers"), Path("data/battery/items.jsonl")
KEPT, DROPPED = "kept", "dropped"
BATCH = 4096  # rows
TEXT_BATCH = 256  # rows, where the text is read


class RowRef(NamedTuple):
    """The file and the row of a document; that of a dropped one is in dropped.parquet, which has no text."""

    file: Path
    row: int


@dataclass(frozen=True)
class Entry:
    """One document. `id` is that of data/raw, `clean_id` that of the text as it left, `bytes` of the text shown."""

    id: str
    fate: str  # KEPT or DROPPED
    source: str
    kind: str
    license: str
    split: str
    meta: dict[str, Any]
    scores: dict[str, float]
    file: str
    row: int
    bytes: int
    text: str
    clean_id: str | None = None
    rule: str | None = None
    detail: str | None = None
    twin: str | None = None
    raw: RowRef | None = field(default=None, compare=False)

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        row["raw"] = None if self.raw is None else {"file": self.raw.file.as_posix(), "row": self.raw.row}
        return row


class Corpus:
    """data/clean below `root`, and the files around it that it was made from."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / CLEAN / "manifest.json").is_file():
            fix = "run dvc repro clean, or dvc checkout (dvc pull) where it was made before"
            raise InputError("there is no cleaned corpus to look at", where=str(CLEAN), fix=fix)
        self.manifest = read_manifest(root / CLEAN, "clean", 1)
        counted = {name for split in self.manifest["counts"].values() for name in split}
        self.sources = sorted(counted | {row["source"] for row in self.manifest.get("funnel", ())})

    @property
    def dropped(self) -> Path:
        return CLEAN / "dropped.parquet"

    def kept_files(self) -> list[Path]:
        """The training files by source and shard, then the validation file."""
        training_files = [path for paths in shard_files(self.root / CLEAN / "train").values() for path in paths]
        return [*(path.relative_to(self.root) for path in training_files), CLEAN / "val.parquet"]

    def raw_files(self, source: str) -> list[Path]:
        return [path.relative_to(self.root) for path in sorted((self.root / RAW / source).glob("*.parquet"))]

    # -- columns ------------------------------------------------------------

    def open(self, file: Path) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.root / file)
        except FileNotFoundError:
            raise InputError("file not found", where=str(file), fix="dvc checkout, or dvc repro") from None
        except (OSError, pa.ArrowException) as error:
            what = f"not a readable Parquet file ({error})"
            raise InputError(what, where=str(file), fix="dvc checkout --force") from None

    def batches(self, file: Path, names: Sequence[str], rows: int = BATCH) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Columns of a file in batches, each with the number of its first row. Columns that are missing stay out."""
        parquet = self.open(file)
        if "text" in names and index_of(parquet):
            texts = read_rows(self.root / file)
            for first in itertools.count(0, rows):
                if not (found := list(itertools.islice(texts, rows))):
                    return
                yield first, pa.RecordBatch.from_pylist([{name: row[name] for name in names} for row in found])
        present = [name for name in names if name in parquet.schema_arrow.names]
        first = 0
        for batch in parquet.iter_batches(batch_size=rows, columns=present):
            yield first, batch
            first += len(batch)

    def rows(self, file: Path, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Chosen rows of a file, by number; only row groups that hold one are read."""
        parquet, requested = self.open(file), sorted(set(numbers))
        rows, first = {}, 0
        for group in range(parquet.num_row_groups):
            count = parquet.metadata.row_group(group).num_rows
            in_group = [number for number in requested if first <= number < first + count]
            if in_group:
                picked = (
                    parquet.read_row_group(group).take(pa.array([number - first for number in in_group])).to_pylist()
                )
                rows.update(zip(in_group, picked, strict=True))
            first += count
        missing = [number for number in requested if number not in rows]
        if missing:
            what = f"row {missing[0]} is wanted, there are {first}"
            raise InputError(what, where=str(file), fix="dvc checkout, so that data/raw is what data/clean was made of")
        if rows and index_of(parquet):
            with_texts = itertools.islice(read_rows(self.root / file), requested[-1] + 1)
            rows |= {number: row for number, row in enumerate(with_texts) if number in rows}
        return rows

    # -- documents ----------------------------------------------------------

    def rows_at(self, refs: Iterable[RowRef]) -> dict[RowRef, dict[str, Any]]:
        """The rows that the references name, with all columns."""
        by_file: dict[Path, list[int]] = {}
        for file, row in refs:
            by_file.setdefault(file, []).append(row)
        rows_by_file = {file: self.rows(file, numbers) for file, numbers in by_file.items()}
        return {RowRef(file, number): row for file, rows in rows_by_file.items() for number, row in rows.items()}

    def entries(self, refs: Sequence[RowRef]) -> list[Entry]:
        """The documents at these rows, in this order; dropped ones with their text from data/raw."""
        rows = self.rows_at(refs)
        raw = self.rows_at(raw_row_ref(row) for ref, row in rows.items() if ref.file == self.dropped)
        return [self._entry(ref, rows[ref], raw) for ref in refs]

    def _entry(self, ref: RowRef, row: Mapping[str, Any], raw: Mapping[RowRef, dict[str, Any]]) -> Entry:
        raw_ref = raw_row_ref(row) if ref.file == self.dropped else None
        document = raw[raw_ref] if raw_ref else row
        if document["id"] != row["id"]:
            what = f"row {raw_ref.row} is document {document['id'][:12]}, dropped.parquet says {row['id'][:12]}"
            fix = "dvc checkout, so that data/raw is what data/clean was made of"
            raise InputError(what, where=raw_ref.file.as_posix(), fix=fix)
        meta = json.loads(document["meta"])
        return Entry(
            id=meta.pop("raw_id", row["id"]),
            fate=DROPPED if raw_ref else KEPT,
            **{name: document[name] for name in ("source", "kind", "license", "split", "text")},
            **{name: row.get(name) for name in ("rule", "detail", "twin")},
            meta=meta,
            scores={name: round(float(row[name]), 6) for name in SCORES if row.get(name) is not None},
            file=ref.file.as_posix(),
            row=ref.row,
            bytes=len(document["text"].encode()),
            clean_id=None if raw_ref else row["id"],
            raw=raw_ref,
        )

    # -- search -------------------------------------------------------------

    def ids(self) -> Iterator[tuple[RowRef, str, str]]:
        """(row, id in data/raw, id of the text that stays) of every document, kept ones first.

        The ids differ where the text was changed; of a dropped document both are that of data/raw.
        """
        for file in [*self.kept_files(), self.dropped]:
            for first, batch in self.batches(file, ("id", "meta")):
                changed = _raw_ids(batch) if "meta" in batch.schema.names else {}
                for row, document_id in enumerate(batch["id"].to_pylist()):
                    yield RowRef(file, first + row), changed.get(row, document_id), document_id

    def find(self, raw_ids: Iterable[str]) -> dict[str, list[RowRef]]:
        """Where documents of data/raw are now, the kept one first: one text may have come more than once."""
        wanted_ids = set(raw_ids)
        refs_by_id: dict[str, list[RowRef]] = {}
        for ref, raw, _ in self.ids() if wanted_ids else ():
            if raw in wanted_ids:
                refs_by_id.setdefault(raw, []).append(ref)
        return refs_by_id


def raw_row_ref(row: Mapping[str, Any]) -> RowRef:
    """The row of data/raw that a row of dropped.parquet came from."""
    return RowRef(RAW / row["source"] / f"{row['shard']:05d}.parquet", row["row"])


def _raw_ids(batch: pa.RecordBatch) -> dict[int, str]:
    """The id in data/raw of each row whose text was changed; that of the others is their id."""
    changed_rows = pc.match_substring(batch["meta"], '"raw_id"').to_numpy(zero_copy_only=False).nonzero()[0].tolist()
    raw_ids = {number: json.loads(batch["meta"][number].as_py()).get("raw_id") for number in changed_rows}
    return {number: raw for number, raw in raw_ids.items() if raw}


# -- what was configured -----------------------------------------------------------------------------------------------


def clean_params(root: Path) -> CleanParams | None:
    """The parameters of the clean stage as built; None where they are not known to this version of the code."""
    try:
        return build(CleanParams, built_params(root, "clean")["clean"], "clean")
    except (KeyError, AthanorError):
        return None


def weak_labels(root: Path) -> list[str]:
    """Classifiers whose card says that they were trained on weak labels."""
    path = root / CLASSIFIERS / "card.json"
    return (
        [name for name, card in sorted(read_json(path).items()) if "weak" in card["labels"]] if path.is_file() else []
    )

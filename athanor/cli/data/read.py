"""The corpus on disk, for commands that look at it: files, columns, single documents.

Nothing here holds the corpus: columns are read in batches, and text only of the
documents that were chosen, one Parquet row group (4,096 documents of one
shard) at a time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from athanor.base.artifacts import read_json, read_manifest
from athanor.base.errors import AthanorError, InputError
from athanor.base.strict import build, read_yaml
from athanor.cleaning.measuring import SCORES
from athanor.cleaning.params import CleanParams
from athanor.runtime import dvc_lock
from athanor.text.documents import shard_files

RAW, CLEAN, SHARDS = Path("data/raw"), Path("data/clean"), Path("data/shards")
TOKENIZER, CLASSIFIERS, ITEMS = Path("models/tokenizer"), Path("models/classifiers"), Path("data/battery/items.jsonl")
KEPT, DROPPED = "kept", "dropped"
BATCH = 4096  # rows
TEXT_BATCH = 256  # rows, where the text is read
BASE = ("id", "source", "kind", "license", "split", "meta")


class Place(NamedTuple):
    """Where a document is: row of a file of data/clean, for a dropped one of dropped.parquet, which has no text."""

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
    raw: Place | None = field(default=None, compare=False)

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        row["raw"] = None if self.raw is None else {"file": self.raw.file.as_posix(), "row": self.raw.row}
        return row


class Corpus:
    """data/clean below `root`, with what lies around it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / CLEAN / "manifest.json").is_file():
            fix = "run dvc repro clean, or dvc checkout (dvc pull) where it was made before"
            raise InputError("there is no cleaned corpus to look at", where=str(CLEAN), fix=fix)
        self.manifest = read_manifest(root / CLEAN, "clean", 1)
        self.sources = sorted({name for split in self.manifest["counts"].values() for name in split})
        self.sources = sorted({*self.sources, *(row["source"] for row in self.manifest.get("funnel", ()))})

    @property
    def dropped(self) -> Path:
        return CLEAN / "dropped.parquet"

    def kept_files(self) -> list[Path]:
        """Training by source and shard, then validation."""
        found = [path for paths in shard_files(self.root / CLEAN / "train").values() for path in paths]
        return [*(path.relative_to(self.root) for path in found), CLEAN / "val.parquet"]

    def raw_files(self, source: str) -> list[Path]:
        return [path.relative_to(self.root) for path in sorted((self.root / RAW / source).glob("*.parquet"))]

    # -- columns ------------------------------------------------------------

    def open(self, file: Path) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.root / file)
        except FileNotFoundError:
            raise InputError("file not found", where=str(file), fix="dvc checkout, or dvc repro clean") from None
        except (OSError, pa.ArrowException) as error:
            what = f"not a readable Parquet file ({error})"
            raise InputError(what, where=str(file), fix="dvc checkout --force") from None

    def batches(self, file: Path, names: Sequence[str], rows: int = BATCH) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Columns of a file in batches, each with the number of its first row. Columns that are missing stay out."""
        opened = self.open(file)
        there = [name for name in names if name in opened.schema_arrow.names]
        first = 0
        for batch in opened.iter_batches(batch_size=rows, columns=there):
            yield first, batch
            first += len(batch)

    def rows(
        self, file: Path, numbers: Collection[int], names: Sequence[str] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Chosen rows of a file, by number; only row groups that hold one are read."""
        opened = self.open(file)
        found, first = {}, 0
        wanted = sorted(set(numbers))
        for group in range(opened.num_row_groups):
            count = opened.metadata.row_group(group).num_rows
            here = [number for number in wanted if first <= number < first + count]
            if here:
                table = opened.read_row_group(group, columns=None if names is None else list(names))
                picked = table.take(pa.array([number - first for number in here])).to_pylist()
                found.update(zip(here, picked, strict=True))
            first += count
        missing = [number for number in wanted if number not in found]
        if missing:
            what = f"row {missing[0]} is wanted, there are {first}"
            raise InputError(what, where=str(file), fix="dvc checkout, so that data/raw is what data/clean was made of")
        return found

    # -- documents ----------------------------------------------------------

    def entries(self, places: Sequence[Place]) -> list[Entry]:
        """The documents at these places, in this order."""
        by_file: dict[Path, list[int]] = {}
        for place in places:
            by_file.setdefault(place.file, []).append(place.row)
        made: dict[Place, Entry] = {}
        for file, numbers in by_file.items():
            found = self.rows(file, numbers)
            made |= self._dropped(found) if file == self.dropped else self._kept(file, found)
        return [made[place] for place in places]

    def _kept(self, file: Path, found: Mapping[int, dict[str, Any]]) -> dict[Place, Entry]:
        made = {}
        for number, row in found.items():
            meta = json.loads(row["meta"])
            raw_id = meta.pop("raw_id", row["id"])
            made[Place(file, number)] = Entry(
                id=raw_id,
                fate=KEPT,
                **{name: row[name] for name in ("source", "kind", "license", "split", "text")},
                meta=meta,
                scores=_scores(row),
                file=file.as_posix(),
                row=number,
                bytes=len(row["text"].encode()),
                clean_id=row["id"],
            )
        return made

    def _dropped(self, found: Mapping[int, dict[str, Any]]) -> dict[Place, Entry]:
        """Dropped documents with their text from data/raw."""
        by_raw: dict[Path, list[int]] = {}
        for row in found.values():
            by_raw.setdefault(raw_place(row).file, []).append(row["row"])
        texts: dict[Place, dict[str, Any]] = {}
        for file, numbers in by_raw.items():
            if not (self.root / file).is_file():
                fix = "dvc checkout, or dvc repro download: the text of dropped documents is only there"
                raise InputError("file not found", where=str(file), fix=fix)
            texts |= {Place(file, number): row for number, row in self.rows(file, numbers).items()}
        made = {}
        for number, row in found.items():
            raw = texts[raw_place(row)]
            if raw["id"] != row["id"]:
                what = f"row {row['row']} is document {raw['id'][:12]}, dropped.parquet says {row['id'][:12]}"
                fix = "dvc checkout, so that data/raw is what data/clean was made of"
                raise InputError(what, where=raw_place(row).file.as_posix(), fix=fix)
            made[Place(self.dropped, number)] = Entry(
                id=row["id"],
                fate=DROPPED,
                source=row["source"],
                kind=row["kind"],
                license=raw["license"],
                split=raw["split"],
                meta=json.loads(raw["meta"]),
                scores=_scores(row),
                file=self.dropped.as_posix(),
                row=number,
                bytes=len(raw["text"].encode()),
                text=raw["text"],
                rule=row["rule"],
                detail=row["detail"],
                twin=row["twin"],
                raw=raw_place(row),
            )
        return made

    # -- search -------------------------------------------------------------

    def ids(self) -> Iterator[tuple[Place, str, str]]:
        """(place, id in data/raw, id of the text that stays) of every document, kept ones first.

        The ids differ where the text was changed; of a dropped document both are that of data/raw.
        """
        for file in self.kept_files():
            for first, batch in self.batches(file, ("id", "meta")):
                changed = _raw_ids(batch)
                for number, found in enumerate(batch["id"].to_pylist()):
                    yield Place(file, first + number), changed.get(number, found), found
        for first, batch in self.batches(self.dropped, ("id",)):
            for number, found in enumerate(batch["id"].to_pylist()):
                yield Place(self.dropped, first + number), found, found

    def find(self, raw_ids: Iterable[str]) -> dict[str, list[Place]]:
        """Where documents of data/raw are now, the kept one first: one text may have come more than once."""
        wanted = set(raw_ids)
        found: dict[str, list[Place]] = {}
        if not wanted:
            return found
        values = pa.array(sorted(wanted))
        for file in [*self.kept_files(), self.dropped]:
            for first, batch in self.batches(file, ("id", "meta")):
                changed = _raw_ids(batch) if "meta" in batch.schema.names else {}
                hits = {number: raw for number, raw in changed.items() if raw in wanted}
                same = pc.is_in(batch["id"], value_set=values).to_numpy(zero_copy_only=False).nonzero()[0].tolist()
                hits |= {number: batch["id"][number].as_py() for number in same if number not in changed}
                for number, raw in sorted(hits.items()):
                    found.setdefault(raw, []).append(Place(file, first + number))
        return found


def raw_place(row: Mapping[str, Any]) -> Place:
    """Where a row of dropped.parquet came from."""
    return Place(RAW / row["source"] / f"{row['shard']:05d}.parquet", row["row"])


def _raw_ids(batch: pa.RecordBatch) -> dict[int, str]:
    """Row to id in data/raw, of documents whose text was changed; of the others it is their id."""
    marked = pc.match_substring(batch["meta"], '"raw_id"').to_numpy(zero_copy_only=False).nonzero()[0].tolist()
    found = {number: json.loads(batch["meta"][number].as_py()).get("raw_id") for number in marked}
    return {number: raw for number, raw in found.items() if raw}


def _scores(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: round(float(row[name]), 6) for name in SCORES if row.get(name) is not None}


# -- what was configured -----------------------------------------------------------------------------------------------


def built_params(root: Path, stage: str) -> dict[str, Any]:
    """The sections of params.yaml that a stage was last run with (dvc.lock), else those of params.yaml now."""
    found = dvc_lock.stages(root / dvc_lock.LOCK).get(stage, {}).get("params", {}).get("params.yaml")
    if found:
        return dict(found)
    return dict(read_yaml(root / "params.yaml")) if (root / "params.yaml").is_file() else {}


def clean_params(root: Path) -> CleanParams | None:
    """The parameters of the clean stage as built; None where they are not known to this version of the code."""
    try:
        return build(CleanParams, built_params(root, "clean")["clean"], "clean")
    except (KeyError, AthanorError):
        return None


def weak_labels(root: Path) -> list[str]:
    """Classifiers whose card says that they were trained on weak labels."""
    path = root / CLASSIFIERS / "card.json"
    return [name for name, card in read_json(path).items() if "weak" in card["labels"]] if path.is_file() else []

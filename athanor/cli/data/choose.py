"""Choosing documents: by source, fate, rule, score or cluster, at random and yet the same for one seed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from athanor.base.errors import InputError, suggest
from athanor.cleaning.measuring import SCORES
from athanor.cleaning.table import EXACT, EXACT_VAL, NEAR, NEAR_VAL, REASONS
from athanor.cli.data.read import CLEAN, DROPPED, KEPT, Corpus, Entry, Place

COMPARE = {"<=": le, ">=": ge, "<": lt, ">": gt}
DUPLICATES = (EXACT, NEAR, EXACT_VAL, NEAR_VAL)


@dataclass(frozen=True)
class Wanted:
    """Conditions, all of which must hold; empty ones hold always. `ids` are those of data/raw, among dropped ones."""

    sources: tuple[str, ...] = ()
    fates: tuple[str, ...] = (KEPT, DROPPED)
    rules: tuple[str, ...] = ()
    scores: tuple[tuple[str, str, float], ...] = field(default=())
    ids: frozenset[str] | None = None


def score_condition(text: str) -> tuple[str, str, float]:
    """`quality<0.4` as its three parts; InputError with the names that there are."""
    match = re.fullmatch(r"\s*([a-z_]+)\s*(<=|>=|<|>)\s*([0-9.]+)\s*", text)
    where = f"--score {text}"
    try:
        name, sign, number = match[1], match[2], float(match[3])  # type: ignore[index]
    except (TypeError, ValueError):
        raise InputError("not a condition", where=where, fix="write it as 'quality<0.4' or 'toxicity>=0.9'") from None
    if name not in SCORES:
        raise InputError(f"no score is named '{name}'", where=where, fix=f"use one of: {', '.join(SCORES)}")
    return name, sign, number


def known(value: str, names: Sequence[str], option: str) -> str:
    """`value` if it is one of the names, else an InputError that says which it probably meant."""
    if value in names:
        return value
    fix = suggest(value, names, f"use one of: {', '.join(names)}", cutoff=0.5)
    raise InputError(f"there is no '{value}'", where=option, fix=fix)


def rule_name(value: str) -> str:
    return known(value, REASONS, "--rule")


def matching(corpus: Corpus, wanted: Wanted) -> Iterator[tuple[Path, int, pa.RecordBatch, np.ndarray]]:
    """(file, number of the first row, batch, bool mask of the rows that are wanted) of each batch of each file."""
    names = ("id", "source", "rule", *SCORES)
    files = [*(corpus.kept_files() if KEPT in wanted.fates and not wanted.rules and wanted.ids is None else ())]
    files += [corpus.dropped] if DROPPED in wanted.fates else []
    for file in files:
        # The folder of a training file names its source: others need not be opened.
        if wanted.sources and file.parent.parent == CLEAN / "train" and file.parent.name not in wanted.sources:
            continue
        for first, batch in corpus.batches(file, names):
            yield file, first, batch, _mask(batch, wanted, file)


def _mask(batch: pa.RecordBatch, wanted: Wanted, file: Path) -> np.ndarray:
    mask = np.ones(len(batch), bool)
    for name, values in (("source", wanted.sources), ("rule", wanted.rules), ("id", wanted.ids)):
        if values:
            mask &= pc.is_in(batch[name], value_set=pa.array(sorted(values))).to_numpy(zero_copy_only=False)
        elif values is not None and name == "id":
            mask[:] = False
    for name, sign, number in wanted.scores:
        if name not in batch.schema.names:
            fix = "run dvc repro clean with this version of the code"
            raise InputError("no scores in this file", where=str(file), fix=fix)
        values = batch[name].to_numpy(zero_copy_only=False).astype(np.float64)  # null, of what was never scored, is NaN
        mask &= COMPARE[sign](values, number)
    return mask


class Draw:
    """A random draw of `count` from what it is shown, batch by batch: the smallest random keys stay.

    Keys depend on the seed and the file, so a draw is the same each time, and
    memory is that of the draw.
    """

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, 0
        self._keys, self._places = np.zeros(0), []

    def show(self, keys: np.ndarray, places: Sequence[Any]) -> None:
        self.seen += len(keys)
        keys = np.concatenate([self._keys, keys])
        places = [*self._places, *places]
        order = np.argsort(keys, kind="stable")[: self.count]
        self._keys, self._places = keys[order], [places[number] for number in order.tolist()]

    @property
    def places(self) -> list[Any]:
        return list(self._places)


def keys_of(seed: int, file: Path) -> np.random.Generator:
    """Gives each row of a file, in order, its random key."""
    seed_bytes = hashlib.blake2b(f"{seed}/{file.as_posix()}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(seed_bytes, "big")))


def draw(corpus: Corpus, wanted: Wanted, count: int, seed: int) -> tuple[int, list[Place]]:
    """How many documents match, and `count` of them at random."""
    drawn, generators = Draw(count), {}
    for file, first, batch, mask in matching(corpus, wanted):
        keys = generators.setdefault(file, keys_of(seed, file)).random(len(batch))
        rows = np.flatnonzero(mask)
        drawn.show(keys[rows], [Place(file, first + row) for row in rows.tolist()])
    return drawn.seen, drawn.places


def twins_of(corpus: Corpus, entries: Sequence[Entry]) -> dict[str, Entry]:
    """The documents that dropped duplicates among `entries` repeat, by id; kept ones where there are several."""
    places = corpus.find(entry.twin for entry in entries if entry.twin)
    chosen = {found: where[0] for found, where in places.items()}
    return dict(zip(chosen, corpus.entries(list(chosen.values())), strict=True))


class Clusters:
    """Which dropped duplicates belong together: each to the document that its twin, and that one's twin, end in.

    Memory: some 300 bytes for each duplicate that was dropped.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._twins: dict[str, str] = {}
        self._rows: list[tuple[int, str, str]] = []  # row of dropped.parquet, id, twin
        for first, batch in corpus.batches(corpus.dropped, ("id", "twin")):
            for row in pc.is_valid(batch["twin"]).to_numpy(zero_copy_only=False).nonzero()[0].tolist():
                own, twin = batch["id"][row].as_py(), batch["twin"][row].as_py()
                self._rows.append((first + row, own, twin))
                if own != twin:  # an exact copy has the same id; the one that stayed may be a near copy of a third
                    self._twins[own] = twin

    def root(self, found: str) -> str:
        seen = {found}
        while (after := self._twins.get(found)) is not None and after not in seen:
            seen.add(found := after)
        return found

    def members(self) -> dict[str, list[int]]:
        """Root to the rows of dropped.parquet that belong to it; the largest cluster first, then by id."""
        found: dict[str, list[int]] = {}
        for row, own, twin in self._rows:
            found.setdefault(self.root(own if own in self._twins else twin), []).append(row)
        return dict(sorted(found.items(), key=lambda pair: (-len(pair[1]), pair[0])))

    def ids(self) -> set[str]:
        return {own for _, own, _ in self._rows} | {twin for _, _, twin in self._rows}

    def choose(self, start: str) -> str:
        """The root of the one cluster that a document whose id begins with `start` is in."""
        hits = sorted({self.root(found) for found in self.ids() if found.startswith(start.lower())})
        if len(hits) == 1:
            return hits[0]
        largest = ", ".join(found[:12] for found in (hits or list(self.members()))[:5])
        what = f"{len(hits)} clusters of duplicates have a document whose id begins with '{start}'"
        raise InputError(
            what, where="--cluster", fix=f"try one of: {largest}" if largest else "no duplicate was dropped"
        )

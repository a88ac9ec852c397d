"""What must be equal after any number of kills: files to the byte, the samples read, and the journal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.runtime.journal import rows as rows_of

CHECKPOINTS = ".athanor/slots/{stage}/*/step_*"
TIMINGS = {"tokens_per_second"}  # numbers of the journal that differ between equal runs
PER_PROCESS = (
    "time.",
    "memory.",
    "disk.",
    "cpu.",
    "system/",
    "model_gflops",
    "hardware_gflops",
    "mfu",
    "hfu",
    "of_ceiling",
)  # and those that come at other steps in a run that was killed
Value = int | float | str


def files(folder: Path, names: list[str]) -> dict[str, Path]:
    """The files among results, relative to the run's folder; a directory stands for what is in it."""
    found = {}
    for name in names:
        path = folder / name
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        found |= {file.relative_to(folder).as_posix(): file for file in inside if file.is_file()}
    return found


def differing_files(expected: dict[str, Path], found: dict[str, Path]) -> list[str]:
    """Differences in words, the first differing byte of each file named."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is superfluous" for name in found if name not in expected]
    for name in [name for name in expected if name in found]:
        one, two = expected[name].read_bytes(), found[name].read_bytes()
        if one != two:
            at = first_difference(one, two)
            problems.append(f"{name} differs from byte {at} on ({len(two)} bytes, {len(one)} in the quiet run)")
    return problems


def first_difference(one: Sequence[Any], two: Sequence[Any]) -> int:
    """The first place where two sequences differ."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(two)))


def checkpoints(folder: Path, stage: str, *, anchors: bool = False) -> list[Path]:
    """Checkpoint folders of a stage, newest first, wherever in its slots they lie; with those kept to roll back to."""
    pattern = CHECKPOINTS.format(stage=stage)
    patterns = [pattern, pattern.replace("step_", "anchors/step_")] if anchors else [pattern]
    found = [path for glob in patterns for path in folder.glob(glob) if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


# -- the journal --------------------------------------------------------------


def journals(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / ".athanor" / "runs").glob("*") if path.is_dir())


def status(journal: Path) -> str:
    end = journal / "end.json"
    return read_json(end)["status"] if end.is_file() else "open"


def journal_rows(journal: Path) -> list[tuple[str, int, Value]]:
    """(name, step, value) in the order of writing, without the values of timings and what a process says of itself."""
    path = journal / "journal.jsonl"
    written = rows_of(path.read_bytes()) if path.is_file() else ()
    return [
        (name, row["s"], "" if name in TIMINGS else value)
        for row in written
        for name, value in row.get("m", {}).items()
        if not name.startswith(PER_PROCESS)
    ]


def differing_journals(expected: Path, found: Path, stage: str) -> list[str]:
    """One finished run with the same rows; for a stage whose slot keeps no journal, one that is finished."""
    theirs, ours = journals(expected), journals(found)
    if stage == "download":  # attempts that failed leave a run of their own; a killed one leaves none
        ours = [journal for journal in ours if status(journal) == "FINISHED"]
    if len(ours) != 1:
        return [f"{len(ours)} runs in the journal instead of one: {', '.join(journal.name for journal in ours)}"]
    if status(ours[0]) != "FINISHED":
        return [f"the journal's status is {status(ours[0])}"]
    wanted, rows = journal_rows(theirs[0]), journal_rows(ours[0])
    problems = []
    for name in dict.fromkeys(row[0] for row in [*wanted, *rows]):
        one = [row[1:] for row in wanted if row[0] == name]
        two = [row[1:] for row in rows if row[0] == name]
        if one != two:
            at = first_difference(one, two)
            row = f"step {two[at][0]} {two[at][1]}".rstrip() if at < len(two) else "none"
            problems.append(f"journal: {name} has {len(two)} rows instead of {len(one)}, first other row {at}: {row}")
    return problems


# -- the samples --------------------------------------------------------------


@dataclass
class Samples:
    """Digests of what a run reads: by position in tokens (training), or by row number (download)."""

    unit: int  # tokens of a batch, or 1 for rows
    digests: dict[int, str] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return len(self.digests) * self.unit


def events(record: Path) -> list[dict[str, Any]]:
    """What an attempt noted; a line torn by the kill is left out."""
    text = record.read_text() if record.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def read_samples(noted: list[dict[str, Any]], start: int) -> list[tuple[int, str]]:
    """(position, digest) of every sample that an attempt trained on."""
    rows = [note["row"] for note in noted if "row" in note]
    if rows:
        return [(start + number, digest) for number, digest in enumerate(rows)]
    return [(note["at"], note["digest"]) for note in noted if "at" in note]


def reference_samples(noted: list[dict[str, Any]], unit: int) -> Samples:
    return Samples(unit, dict(read_samples(noted, 0)))


def differing_samples(
    reference: Samples, noted: list[dict[str, Any]], start: int, finished: bool, overlap: bool = False
) -> list[str]:
    """Whether an attempt began exactly where its checkpoint ends, and read on without a gap to where it saved or ended.

    Together for all attempts that makes the chain of checkpoints behind the
    final weights whole: each checkpoint stands where the attempt that wrote it
    had read every sample up to it; with `overlap` it may have read on until the checkpoint stands.
    """
    position = start
    for at, digest in read_samples(noted, start):
        if at != position:
            return [f"the attempt reads at {at} where {position} is next (it began from a checkpoint at {start})"]
        if reference.digests.get(at) != digest:
            return [f"other samples at position {at}: {digest} instead of {reference.digests.get(at)}"]
        position += reference.unit
    if finished and position != reference.end:
        return [f"the attempt ended at {position} of {reference.end}"]
    last = start
    for note in noted:
        last = note["at"] + reference.unit if "at" in note else last
        name = Path(note.get("path", "")).name
        if note.get("point") == "renamed" and name.startswith("step_"):
            written = int(name[5:]) * reference.unit
            if written > last or written < last and not overlap:
                return [f"checkpoint {name} was written after {last} tokens"]
    return []

"""eval_history.jsonl: one row for every score, and which rows may be compared."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.base.artifacts import digest, write_text
from athanor.base.errors import InputError

FILE = "eval_history.jsonl"
# What has to be equal in two rows before their difference says something about two models.
KEYS = (
    "set_sha256",
    "tokenizer_digest",
    "template_hash",
    "method",
    "mask",
    "context_tokens",
    "windows",
    "scored_tokens",
    "backend",
    "dtype",
    "exact",
)
PLOTTED = ("step", "tokens", "loss", "perplexity", "bits_per_byte", "set", "context_tokens")


def append(path: str | Path, row: Mapping[str, Any]) -> None:
    """Add a row with one flushed write at the end of the file, safe with several processes and power loss."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(dict(row), sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":  # a row that a power loss tore stays a line of its own
            line = "\n" + line
        data = line.encode()
        if os.write(handle, data) != len(data):
            raise InputError("a row was cut off while it was written", where=str(path), fix="make room on the disk")
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: str | Path) -> list[dict[str, Any]]:
    """Whole rows in order; torn lines are passed over."""
    if not Path(path).is_file():
        return []
    rows = []
    for line in Path(path).read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Keys that make two rows incomparable."""
    return [key for key in KEYS if first.get(key) != second.get(key)]


def previous(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The last row before this one of another model that it may be compared with."""
    for other in reversed(rows):
        if other.get("weights_sha256") != row["weights_sha256"] and not differing(other, row):
            return other
    return None


def write_plots(folder: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Scores of checkpoints for `dvc plots`: a file for each curve, with the last score of each step.

    A curve is one slot's, of rows that may be compared: `dvc plots` joins all points of a file with one line.
    """
    curves: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("step") is not None:
            curves.setdefault(curve_name(row), {})[row["step"]] = row
    for name, rows_by_step in curves.items():
        table = [PLOTTED, *([rows_by_step[step].get(key) for key in PLOTTED] for step in sorted(rows_by_step))]
        lines = ["\t".join("" if cell is None else f"{cell}" for cell in cells) for cells in table]
        write_text(Path(folder) / f"{name}.tsv", "\n".join(lines) + "\n")


def curve_name(row: Mapping[str, Any]) -> str:
    """A name for the curve that a row is a point of; it ends with a hash of all that must agree."""
    names = ("stage", "slot", "method", "backend")
    key_hash = digest([row.get(key) for key in (*names, *KEYS)])[:6]
    return "-".join(str(row.get(key))[:16] for key in names) + f"-{key_hash}"

"""What DVC recorded of the exports of experiments: read from Git and from DVC's cache, in milliseconds."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from athanor.pipeline.facts import git

EXPORT, HF_DIR = "models/export", "hf"
WEIGHTS_OF = {EXPORT: "models/sft", "models/lora-export": "models/lora"}  # an export and the weights it is made from
_NAMED = re.compile(r"refs/exps/[0-9a-f]{2}/[0-9a-f]{38}/(.+)")
# DVC writes dvc.lock in one form only, and parsing the YAML of one takes a good part of a second.
_STAGES = re.compile(r"^  (?! ).*\n((?:   .*\n?)*)", re.MULTILINE)
_PARTS = re.compile(r"^    (deps|outs):\n((?:    [- ] .*\n?)*)", re.MULTILINE)
_ROWS = re.compile(r"^    - path: (.*)\n((?:      .*\n?)*)", re.MULTILINE)


def recorded(root: Path) -> list[tuple[str, str, float, tuple[str, int] | None]]:
    """(name, commit, Unix time, (MD5 of its export, bytes)), newest first; None for one that came to no export."""
    form = "--format=%(objectname) %(committerdate:unix) %(refname)"
    rows = git(root, "for-each-ref", form, "refs/exps").splitlines()
    named = [(match[1], *row.split(" ", 2)[:2]) for row in rows if (match := _NAMED.fullmatch(row.split(" ", 2)[2]))]
    named.sort(key=lambda row: (-int(row[2]), row[0]))
    if not named:
        return []
    asked = "".join(f"{commit}:./dvc.lock\n" for _, commit, _ in named).encode()
    done = subprocess.run(["git", "-C", str(root), "cat-file", "--batch"], input=asked, capture_output=True)
    found, place = [], 0
    for name, commit, seconds in named:
        end = done.stdout.find(b"\n", place)
        words = done.stdout[place:end].split()
        place = end + 1
        if len(words) == 3 and words[1] == b"blob":
            size = int(words[2])
            out = export_of(done.stdout[place : place + size].decode("utf-8", "replace"))
            place += size + 1
            found.append((name, commit, float(seconds), out))
    return found


def unexported(root: Path) -> list[str]:
    """Names of the experiments that have no export of their own."""
    return [name for name, _, _, out in recorded(root) if out is None]


def export_of(lock: str) -> tuple[str, int] | None:
    """MD5 (without .dir) and bytes of the export that a dvc.lock names; None where it was made from other weights.

    An experiment that ends before the export stage keeps that stage's entry of the commit it began from.
    """
    weights, made_from = WEIGHTS_OF[EXPORT], None
    outs: dict[str, str] = {}
    for stage in _STAGES.finditer(lock):
        parts = {part[1]: {row[1]: row[2] for row in _ROWS.finditer(part[2])} for part in _PARTS.finditer(stage[1])}
        here = parts.get("outs", {})
        outs |= here
        if EXPORT in here:
            made_from = parts.get("deps", {}).get(weights)
    md5 = _md5(outs.get(EXPORT))
    if md5 is None or (made_from and weights in outs and _md5(made_from) != _md5(outs[weights])):
        return None
    size = re.search(r"\bsize: (\d+)", outs[EXPORT])
    return md5, int(size[1]) if size else 0


def _md5(facts: str | None) -> str | None:
    match = re.search(r"\bmd5: ([0-9a-f]{32})\.dir", facts or "")
    return match[1] if match else None


def cached(cache: Path, md5: str) -> dict[str, Path] | None:
    """Files of an export's `hf/` and where the cache has them, whether or not they are there; None without the list."""
    path = cache / md5[:2] / f"{md5[2:]}.dir"
    try:
        rows = json.loads(path.read_bytes())
        places = {row["relpath"]: row["md5"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    # The list may be somebody else's: an export's files lie side by side, and each has the hash of its content.
    return {
        name.removeprefix(f"{HF_DIR}/"): cache / one[:2] / one[2:]
        for name, one in places.items()
        if re.fullmatch(rf"{HF_DIR}/[\w-][\w.-]*", name) and re.fullmatch("[0-9a-f]{32}", one)
    }

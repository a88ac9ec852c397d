"""The commit behind an exported file: the one whose dvc.lock has the hashes that the file carries."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from athanor.export.lineage import STAGE

LOCK, OUT = "dvc.lock", "models/export"


class Found(NamedTuple):
    """status: as of a line in `verify`. exact: whether a lock that agrees also has the folder's own hash, if asked."""

    status: str
    detail: str
    exact: bool | None = None


def find(lock: Mapping[str, str], root: Path, folder_md5: str | None = None) -> Found:
    """Look through every commit of the repository at `root`, oldest first, then at the working tree.

    folder_md5: of a whole export folder. Where several locks agree on what it
    was made from, one that has recorded this very folder is preferred.
    """
    if not lock:
        return Found("unchecked", "the file carries no hashes of dvc.lock: an earlier version wrote it")
    here = root / LOCK
    text = here.read_text(encoding="utf-8") if here.is_file() else ""
    # By default Git leaves out a side branch of which a merge took nothing, and with it the commit looked for.
    revisions = _git(root, "log", "--all", "--full-history", "--reverse", "--format=%H %cs", "--", LOCK)
    agreeing = []
    for line in (revisions or "").splitlines():
        revision, _, day = line.partition(" ")
        content = _git(root, "show", f"{revision}:./{LOCK}") or ""
        if _agrees(content, lock):
            agreeing.append((f"{revision[:12]} of {day}", _out(content)))
    if _agrees(text, lock):
        agreeing.append(("the working tree, uncommitted", _out(text)))
    if agreeing:
        # A clean working tree says what its commit says, and comes after it.
        same = [name for name, out in agreeing if out == folder_md5]
        name = same[0] if same else agreeing[0][0]
        exact = bool(same) if folder_md5 else None
        return Found("matches", f"{name}: its dvc.lock has all {len(lock)} hashes in the file", exact)
    where = "no Git history here" if revisions is None else f"none of {len(revisions.splitlines())} commits agrees"
    if not text:
        return Found("unchecked", f"{where}, and no dvc.lock in the working tree")
    stage = _stage(text)
    if stage is None:
        return Found("unchecked", f"{where}, and the working tree's dvc.lock has no stage {STAGE}")
    entries = _entries(stage, "deps")
    odd = sorted(path for path, md5 in lock.items() if entries.get(path) != md5)
    return Found("differs", f"{where}; the working tree's dvc.lock has another hash for {', '.join(odd)}")


def _agrees(text: str, lock: Mapping[str, str]) -> bool:
    # Most locks of a history differ somewhere, and parsing one takes a good part of a second.
    if not text or not all(md5 in text for md5 in lock.values()):
        return False
    stage = _stage(text)
    entries = {} if stage is None else _entries(stage, "deps")
    return all(entries.get(path) == md5 for path, md5 in lock.items())


def _out(text: str) -> str | None:
    stage = _stage(text)
    return None if stage is None else _entries(stage, "outs").get(OUT)


def _stage(text: str) -> dict[str, Any] | None:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="safe").load(text)
        return content["stages"].get(STAGE)
    except (YAMLError, KeyError, TypeError, AttributeError):
        return None


def _entries(stage: Mapping[str, Any], part: str) -> dict[str, str]:
    return {row["path"]: row.get("md5", "") for row in stage.get(part, [])}


def _git(root: Path, *words: str) -> str | None:
    """Output of a Git command; None where there is no Git, no repository or no such object."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, env=environment, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.decode(errors="replace")

"""Exports of DVC's experiments, read from Git and from DVC's cache without opening either with DVC."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

from athanor.base.errors import InputError
from athanor.export.places import CARD, EXPORT, HF_DIR, WEIGHTS_OF
from athanor.runtime.dvc_lock import parsed
from athanor.runtime.facts import git
from athanor.serving.files import read_bounded

_NAMED = re.compile(r"(\S+) (\d+) refs/exps/[0-9a-f]{2}/[0-9a-f]{38}/(.+)")


def recorded(root: Path) -> list[tuple[str, str, float, str | None]]:
    """(name, commit, Unix time, MD5 of its export), newest first; None for one that came to no export."""
    rows = git(root, "for-each-ref", "--format=%(objectname) %(committerdate:unix) %(refname)", "refs/exps")
    found = [match.groups() for row in rows.splitlines() if (match := _NAMED.fullmatch(row))]
    experiments = [(name, commit, float(seconds), _export_of(root, commit)) for commit, seconds, name in found]
    return sorted(experiments, key=lambda experiment: (-experiment[2], experiment[0]))


def unexported(root: Path) -> list[str]:
    """Names of the experiments that have no export of their own."""
    return [name for name, _, _, out in recorded(root) if out is None]


@lru_cache(maxsize=1000)
def _export_of(root: Path, commit: str) -> str | None:
    return export_of(git(root, "show", f"{commit}:./dvc.lock"))


def export_of(lock: str) -> str | None:
    """MD5 (without .dir) of the export that a dvc.lock names; None where it was made from other weights.

    An experiment that ends before the export stage keeps that stage's entry of the commit it began from.
    """
    try:
        stages = parsed(lock.encode()) or {}
        outs = {row["path"]: row.get("md5") for stage in stages.values() for row in stage.get("outs", ())}
        made_from = {row["path"]: row.get("md5") for row in stages["export"]["deps"]}.get(WEIGHTS_OF[EXPORT])
        if made_from and (outs.get(WEIGHTS_OF[EXPORT]) or made_from) != made_from:
            return None
        return re.fullmatch(r"([0-9a-f]{32})(?:\.dir)?", outs[EXPORT])[1]
    except (KeyError, TypeError, AttributeError):
        return None


def cached(cache: Path, md5: str) -> dict[str, Path] | None:
    """Files of an export's `hf/`, and its card, and where the cache has them, whether or not they are there.

    None without the list.
    """
    try:
        rows = json.loads(read_bounded(cache / md5[:2] / f"{md5[2:]}.dir"))
        md5_of = {row["relpath"]: row["md5"] for row in rows}
        # The list may be somebody else's: an export's files lie side by side, and each has the hash of its content.
        return {
            name.removeprefix(f"{HF_DIR}/"): cache / checksum[:2] / checksum[2:]
            for name, checksum in md5_of.items()
            if re.fullmatch(rf"{CARD}|{HF_DIR}/[\w-][\w.-]*", name) and re.fullmatch("[0-9a-f]{32}", checksum)
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InputError):
        return None

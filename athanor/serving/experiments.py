"""Exports of DVC's experiments, read from Git and from DVC's cache without opening either with DVC."""

from __future__ import annotations

import json
import re
from pathlib import Path

from athanor.base.errors import InputError
from athanor.export.places import CARD, EXPORT, HF_DIR, WEIGHTS_OF
from athanor.runtime.facts import git
from athanor.serving.files import read_bounded

_NAMED = re.compile(r"refs/exps/[0-9a-f]{2}/[0-9a-f]{38}/(.+)")


def recorded(root: Path) -> list[tuple[str, str, float, str | None]]:
    """(name, commit, Unix time, MD5 of its export), newest first; None for one that came to no export."""
    rows = git(
        root, "for-each-ref", "--format=%(objectname) %(committerdate:unix) %(refname)", "refs/exps"
    ).splitlines()
    experiments = []
    for commit, seconds, ref in (row.split(" ", 2) for row in rows):
        if (match := _NAMED.fullmatch(ref)) and (lock := git(root, "show", f"{commit}:./dvc.lock")):
            experiments.append((match[1], commit, float(seconds), export_of(lock)))
    return sorted(experiments, key=lambda experiment: (-experiment[2], experiment[0]))


def unexported(root: Path) -> list[str]:
    """Names of the experiments that have no export of their own."""
    return [name for name, _, _, out in recorded(root) if out is None]


def export_of(lock: str) -> str | None:
    """MD5 (without .dir) of the export that a dvc.lock names; None where it was made from other weights.

    An experiment that ends before the export stage keeps that stage's entry of the commit it began from.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        stages = YAML(typ="safe").load(lock)["stages"].values()
        outs = {row["path"]: row for stage in stages for row in stage.get("outs", ())}
        weights = outs.get(WEIGHTS_OF[EXPORT])
        exporting = next(stage for stage in stages if EXPORT in {row["path"] for row in stage.get("outs", ())})
        made_from = {row["path"]: row["md5"] for row in exporting["deps"]}.get(WEIGHTS_OF[EXPORT])
        md5 = re.fullmatch(r"([0-9a-f]{32})(?:\.dir)?", outs[EXPORT]["md5"])[1]
    except (YAMLError, KeyError, TypeError, AttributeError, ValueError, StopIteration):
        return None
    return None if weights and made_from and weights["md5"] != made_from else md5


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

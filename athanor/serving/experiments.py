"""Where a checkout keeps its models, and what DVC recorded of the exports of experiments.

Read from Git and from DVC's cache, without opening either with DVC.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from athanor.base.artifacts import MANIFEST
from athanor.runtime.facts import git

BASE, TOKENIZER = "models/base", "models/tokenizer"
EXPORT, HF_DIR, CARD = "models/export", "hf", "MODEL_CARD.md"
# An export and the weights it is made from; the first that is there is what a page begins with.
WEIGHTS_OF = {
    EXPORT: "models/sft",
    "models/lora-export": "models/lora",
    "models/grpo-export": "models/grpo",
    "models/dpo-export": "models/dpo",
}
_NAMED = re.compile(r"refs/exps/[0-9a-f]{2}/[0-9a-f]{38}/(.+)")


def is_base(folder: Path) -> bool:
    """Whether a folder is a checkout's base model, as pretraining wrote it; its tokenizer lies beside it."""
    return os.path.realpath(folder).endswith(f"/{BASE}") and (folder / MANIFEST).is_file()


def tokenizer_folder(base: Path) -> Path:
    return base.with_name(Path(TOKENIZER).name)


def recorded(root: Path) -> list[tuple[str, str, float, tuple[str, int] | None]]:
    """(name, commit, Unix time, (MD5 of its export, bytes)), newest first; None for one that came to no export."""
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


def export_of(lock: str) -> tuple[str, int] | None:
    """MD5 (without .dir) and bytes of the export that a dvc.lock names; None where it was made from other weights.

    An experiment that ends before the export stage keeps that stage's entry of the commit it began from.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    weights, outs, made_from = WEIGHTS_OF[EXPORT], {}, None
    try:
        for stage in YAML(typ="safe").load(lock)["stages"].values():
            stage_outs = {row["path"]: row for row in stage.get("outs", ())}
            outs |= stage_outs
            if EXPORT in stage_outs:
                made_from = next((row["md5"] for row in stage["deps"] if row["path"] == weights), None)
        md5 = str(outs[EXPORT]["md5"]).removesuffix(".dir")
    except (YAMLError, KeyError, TypeError, AttributeError):
        return None
    if not re.fullmatch("[0-9a-f]{32}", md5) or (
        made_from and outs.get(weights, {}).get("md5", made_from) != made_from
    ):
        return None
    return md5, int(outs[EXPORT].get("size") or 0)


def cached(cache: Path, md5: str) -> dict[str, Path] | None:
    """Files of an export's `hf/`, and its card, and where the cache has them, whether or not they are there.

    None without the list.
    """
    path = cache / md5[:2] / f"{md5[2:]}.dir"
    try:
        rows = json.loads(path.read_bytes())
        md5_of = {row["relpath"]: row["md5"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    # The list may be somebody else's: an export's files lie side by side, and each has the hash of its content.
    return {
        name.removeprefix(f"{HF_DIR}/"): cache / checksum[:2] / checksum[2:]
        for name, checksum in md5_of.items()
        if re.fullmatch(rf"{CARD}|{HF_DIR}/[\w-][\w.-]*", name) and re.fullmatch("[0-9a-f]{32}", checksum)
    }

"""Write the current commit of every unpinned hub data set into params.yaml.

    python -m athanor pin [FILE]

A source with `revision: null` is asked for on the Hugging Face hub, and the
40 hex digits of its newest commit take the place of null; one that is pinned
stays as it is. All are asked before anything is written: without an answer to
each of them the file is not touched. HF_TOKEN in the environment opens private
and gated sets. Comments and order are kept.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from athanor.base.artifacts import write_text
from athanor.base.errors import InputError
from athanor.runtime.dvc_view import edited_yaml
from athanor.runtime.schema import check_file
from athanor.sources.fetch import hub_revisions
from athanor.sources.huggingface import explain


def pin(path: Path) -> dict[str, str]:
    """Pin what is not; returns the place in the file to the commit written there."""
    sections = check_file(path)
    known: dict[str, str] = {}  # a data set has one revision everywhere
    missing: dict[str, str] = {}
    for where, dataset, revision in hub_revisions(sections["download"], sections["instruct"]):
        if revision is None:
            missing[where] = dataset
        else:
            known.setdefault(dataset, revision)
    for dataset in missing.values():
        if dataset not in known:
            known[dataset] = newest_commit(dataset)
    if not missing:
        return {}
    values = {}
    for where, dataset in missing.items():
        section, _, number = where.partition(".sources[")
        values[section, "sources", int(number.rstrip("]")), "revision"] = known[dataset]
    write_text(path, edited_yaml(path.read_text(encoding="utf-8"), values))
    return {where: known[dataset] for where, dataset in missing.items()}


def newest_commit(dataset: str) -> str:
    """The commit that the data set's main branch is at, from the hub."""
    from huggingface_hub import HfApi

    try:
        commit = HfApi(token=os.environ.get("HF_TOKEN") or False).dataset_info(dataset, timeout=30).sha
    except Exception as error:
        raise explain(error, dataset, "") from error
    if not commit:
        raise InputError("the hub names no commit", where=dataset, fix="look it up: Files and versions, History")
    return str(commit)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", default="params.yaml", metavar="FILE", help="default: params.yaml")


def run(args: argparse.Namespace) -> int:
    path = Path(args.file)
    pinned = pin(path)
    for where, commit in pinned.items():
        print(f"{where}.revision: {commit}")
    if not pinned:
        print(f"every hub data set in {path} is pinned")
    return 0

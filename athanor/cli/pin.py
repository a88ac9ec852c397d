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
import re
from pathlib import Path

from athanor.base.artifacts import write_text
from athanor.base.errors import InputError
from athanor.runtime.dvc_view import edited_yaml
from athanor.runtime.schema import check_file
from athanor.sources.fetch import hub_revisions
from athanor.sources.huggingface import explain


def pin(path: Path) -> dict[str, str]:
    """Pin every unpinned data set; returns the commit that was written at each location of the file."""
    sections = check_file(path)
    commits: dict[str, str] = {}  # a data set has one revision everywhere
    unpinned: dict[str, str] = {}
    pairs = ((f"dpo_data.sources[{i}]", s.hub_id, s.revision) for i, s in enumerate(sections["dpo_data"].sources))
    others = hub_revisions(*(sections[name] for name in ("download", "instruct", "battery")))
    for location, dataset, revision in (*others, *pairs):
        if dataset is None:
            continue  # files
        if revision is None:
            unpinned[location] = dataset
        else:
            commits.setdefault(dataset, revision)
    for dataset in unpinned.values():
        if dataset not in commits:
            commits[dataset] = newest_commit(dataset)
    if not unpinned:
        return {}
    values = {}
    for location, dataset in unpinned.items():
        section, key, index = re.fullmatch(r"(\w+)\.(\w+)\[(\d+)\]", location).groups()  # type: ignore[union-attr]
        values[section, key, int(index), "revision"] = commits[dataset]
    write_text(path, edited_yaml(path.read_text(encoding="utf-8"), values))
    return {location: commits[dataset] for location, dataset in unpinned.items()}


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
    for location, commit in pinned.items():
        print(f"{location}.revision: {commit}")
    if not pinned:
        print(f"every hub data set in {path} is pinned")
    return 0

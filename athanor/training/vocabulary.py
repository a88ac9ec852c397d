"""The facts about a tokenizer that training needs: its size, its digest and the bytes of each id.

Read from the artifact's files, so that training runs where no tokenizer
library is installed and does not go stale when only encoding code changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.artifacts import read_manifest
from athanor.base.errors import InputError

KIND, VERSION = "tokenizer", 1


@dataclass(frozen=True)
class Vocabulary:
    """`token_bytes` is int32 [size]: UTF-8 bytes of text that an id stands for, 0 for control ids."""

    size: int
    digest: str
    template_hash: str
    token_bytes: np.ndarray


def load_vocabulary(folder: str | os.PathLike[str]) -> Vocabulary:
    """Read a models/tokenizer folder; InputError if its parts disagree."""
    manifest = read_manifest(folder, KIND, VERSION)
    path = Path(folder) / "token_bytes.npy"
    if not path.is_file():
        raise InputError("file not found", where=str(path), fix="run dvc checkout models/tokenizer")
    token_bytes = np.load(path, allow_pickle=False)
    size = manifest["counts"]["vocab_size"]
    if token_bytes.shape != (size,):
        raise InputError(f"{len(token_bytes)} entries for {size} ids", where=str(path), fix="dvc repro train-tokenizer")
    return Vocabulary(size, manifest["digest"], manifest["template_hash"], token_bytes)


def check_same(vocabulary: Vocabulary, facts: Mapping[str, Any], where: str, stage: str, *, template: bool) -> None:
    """Refuse data or weights made with another tokenizer or chat template: compared by content, not by name."""
    expected = {"tokenizer": vocabulary.digest}
    if template:
        expected["template_hash"] = vocabulary.template_hash
    for name, value in expected.items():
        actual = facts.get(name, facts.get(f"{name}_digest"))
        if actual != value:
            raise InputError(
                f"made with another {name.replace('_hash', '')} ({str(actual)[:12]}, now {value[:12]})",
                where=where,
                fix=f"dvc repro {stage}",
            )

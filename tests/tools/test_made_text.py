"""Made text is what it says: the same with any workers, kept by the rules, and with its shares of copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from athanor.base.artifacts import read_manifest
from athanor.base.strict import build
from athanor.cleaning import rules
from athanor.cleaning.params import RuleParams
from athanor.runtime import presets
from athanor.text.documents import Document, read_sources, shard_files
from athanor.words.words import tokenise
from tests.e2e.clone import ROOT
from tools.made_text import Made, make

SOURCES = [("pages", "web", 5), ("books", "prose", 3)]


def written(folder: Path, workers: int = 1, **changes: float) -> list[Document]:
    make(folder, SOURCES, Made(200_000, val_fraction=0.1, **changes), workers)
    return list(read_sources(folder))


def test_the_same_bytes_with_any_workers_and_counts_of_what_is_there(tmp_path: Path) -> None:
    documents = written(tmp_path / "one", 1)
    written(tmp_path / "two", 2)
    one, two = (read_manifest(tmp_path / name, "raw", 1) for name in ("one", "two"))
    assert one == two
    assert {name: len(files) for name, files in shard_files(tmp_path / "one").items()} == {"books": 3, "pages": 5}
    assert 200_000 <= one["counts"]["pages"]["bytes"] // 5 < 300_000
    for name, count in one["counts"].items():
        mine = [document for document in documents if document.source == name]
        assert (count["documents"], count["val"]["documents"]) == (len(mine), sum(d.split == "val" for d in mine))


def test_the_rules_of_a_preset_keep_nearly_all_and_copies_have_their_shares(tmp_path: Path) -> None:
    documents = written(tmp_path / "made", near=0.0, exact=0.1)
    preset = presets.values(ROOT / "presets/plasma-1.0.yaml")["clean"]["rules"]
    texts = [document.text for document in documents]
    scores = {"quality": np.ones(len(texts)), "toxicity": np.zeros(len(texts))}
    failed, _ = rules.verdicts(
        rules.measure(texts, tokenise(texts)) | scores,
        [document.kind for document in documents],
        build(RuleParams, preset, "clean.rules"),
    )
    assert (failed < 0).mean() > 0.9
    assert 1 - len(set(texts)) / len(texts) == pytest.approx(0.1, abs=0.05)
    assert 2_000 < np.mean([len(text) for text in texts]) < 4_000


def test_near_copies_share_most_words(tmp_path: Path) -> None:
    documents = written(tmp_path / "made", near=0.1, exact=0.0)
    assert len({document.id for document in documents}) == len(documents)
    begins: dict[str, int] = {}
    for document in documents:
        key = document.text[-40:]
        begins[key] = begins.get(key, 0) + 1
    assert sum(count > 1 for count in begins.values()) > 0.03 * len(documents)

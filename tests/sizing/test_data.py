"""What a recipe may count on, before and after the stages that count it."""

from __future__ import annotations

import pytest

from athanor.base.artifacts import write_json
from athanor.runtime import presets
from athanor.runtime.schema import check_values
from athanor.sizing.data import data_of
from tests.e2e.clone import ROOT


@pytest.fixture
def values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return presets.values(ROOT / "presets/default.yaml")


def test_before_any_stage_sizes_come_from_the_sources(values, tmp_path):
    built = check_values(values)
    found = data_of(tmp_path, built)
    assert 2e6 < found.unique_tokens < 3e6 and not found.cuttable
    assert 0.9e6 < found.sft_tokens < 1.5e6  # 1,316,096 when they were made
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/book.txt").write_text("word " * 70_000, encoding="utf-8")
    values["download"]["sources"] = [{"type": "files", "name": "own", "globs": ["corpus/*.txt"]}]
    values["mixture"]["sources"] = {"own": {"share": 1.0, "max_epochs": 4.0}}
    assert data_of(tmp_path, check_values(values)).unique_tokens == pytest.approx(100_000)


def test_afterwards_from_what_the_stages_counted(values, tmp_path):
    sources = {name: {"unique_tokens": 1000, "bytes_per_token": 3.0} for name in values["mixture"]["sources"]}
    write_json(tmp_path / "data/shards/manifest.json", {"sources": sources})
    write_json(
        tmp_path / "data/sft/manifest.json",
        {"counts": {"train": {"rows": 10}}, "context_tokens": 256, "sources": list(values["sft_data"]["sources"])},
    )
    found = data_of(tmp_path, check_values(values))
    assert (found.unique_tokens, found.bytes_per_token, found.sft_tokens) == (2000, 3.0, 2560)
    write_json(tmp_path / "data/shards/manifest.json", {"sources": {"another": sources["python-docs"]}})
    assert data_of(tmp_path, check_values(values)).unique_tokens > 1e6  # of another params.yaml

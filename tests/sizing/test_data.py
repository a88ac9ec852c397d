"""What a recipe may count on, before and after the stages that count it."""

from __future__ import annotations

import json

import pytest

from athanor.base.artifacts import write_json
from athanor.runtime import presets
from athanor.runtime.schema import check_values
from athanor.sizing.data import conversation_tokens, data_of
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


@pytest.mark.parametrize("times_own, made", [(2.0, 582 * 256), (20.0, 1809 * 256)])
def test_fine_tuning_on_a_book_in_another_script_is_what_its_rows_were(times_own, made, values, tmp_path):
    """36 talks about a Japanese novel, typed in two ways: the rows that the stages made of them."""
    values = presets.values(ROOT / "presets/own-text.yaml")
    values["download"]["sources"] = [{"type": "files", "name": "book", "kind": "prose", "globs": ["book.txt"]}]
    values["mixture"]["sources"] = {"book": {"share": 1.0, "max_epochs": 4.0}}
    values["clean"]["rules"]["prose"]["min_ascii_fraction"] = None
    talks = {"type": "messages", "name": "talks", "files": "talks.jsonl", "as_typed": True}
    values["instruct"]["sources"] = [*values["instruct"]["sources"], talks]
    values["sft_data"]["sources"] |= {"talks": {"repeats": 10, "follow_ups": 10}}
    values["sft_data"]["sources"]["identity"]["times_own"] = times_own
    said = [
        {"role": "user", "content": "先生と初めて会ったのはどこ？"},
        {"role": "assistant", "content": "鎌倉の海で知り合った。"},
    ]
    (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 36, encoding="utf-8")
    assert conversation_tokens(check_values(values)) == pytest.approx(made, rel=0.1)

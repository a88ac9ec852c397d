"""The last lines of `make repro`: what ran, and how long that took."""

from __future__ import annotations

from pathlib import Path

import pytest

from athanor.artifacts import write_json
from athanor.commands import summary


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "dvc.yaml").write_text("stages:\n  clean: {cmd: x}\n  shard: {cmd: x}\n  sft: {cmd: x}\n")
    for stage, started, seconds in (("clean", 1, 100.0), ("shard", 2, 20.0), ("sft", 3, 3.0)):
        facts = {"run": f"{stage}-{started:013}-1", "seconds": seconds, "ended_ms": started}
        write_json(tmp_path / "metrics" / "runs" / f"{stage}.json", facts)
    return tmp_path


def rows(text: str) -> dict[str, str]:
    lines = [line.split() for line in text.splitlines() if line.startswith("  ")]
    return {" ".join(words[:-2]): " ".join(words[-2:]) for words in lines}


def test_what_was_cached_or_restored_does_not_count_as_time_of_this_run(root: Path) -> None:
    before = {"clean": "clean-0000000000001-1", "shard": "shard-0000000000000-1", "sft": "sft-0000000000000-1"}
    told = rows(summary.text(root, before, since_ms=3))
    assert told["clean kept 1 min"] == "40 s" and told["shard restored"] == "20.0 s" and told["sft ran"] == "3.0 s"
    assert told["all that ran"] == "3.0 s"


def test_all_is_the_sum_when_all_ran(root: Path) -> None:
    text = summary.text(root, {}, since_ms=1)
    assert text.splitlines()[-1].split() == ["all", "2", "min", "03", "s"]
    alone = summary.text(root)  # `athanor summary` knows nothing of what ran
    assert alone.splitlines()[-1].split() == ["all", "2", "min", "03", "s"] and "kept" not in alone

"""The last lines of `make repro`: what ran, and how long that took."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from athanor.base.artifacts import read_json, write_json
from athanor.cli import repro, summary


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


def test_classifiers_that_stepped_aside_are_told(root: Path) -> None:
    write_json(
        root / "metrics" / "train_classifiers.json",
        {"quality_no": {"stepped_aside": 1}, "toxicity_weak": {"auroc": {}}},
    )
    text = summary.text(root)
    assert "stepped aside and dropped nothing: quality (" in text and "toxicity" not in text


def test_the_health_of_each_training_is_told_in_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    assert "Health" not in summary.text(root)  # it ran on another machine
    journal = root / ".athanor" / "runs" / "sft-0000000000003-1" / "files" / "health.json"
    for status, line in (
        ("ok", "Health    sft ok"),
        ("critical", "Health    sft critical   (why: athanor health sft)"),
    ):
        write_json(journal, {"status": status, "findings": []})
        assert summary.text(root).splitlines()[-1] == line
    (root / "dvc.yaml").write_text("stages:\n  pretrain: {cmd: x}\n  sft: {cmd: x}\n")
    leaf = {"run": "pretrain-0000000000002-1", "seconds": 1.0, "ended_ms": 2}
    write_json(root / "metrics/runs/pretrain.json", leaf)
    journal.parents[1].rename(root / ".athanor/runs" / str(leaf["run"]))  # and sft is of a colleague's experiment
    line = "Health    pretrain critical, sft unknown (trained elsewhere)   (why: athanor health pretrain)"
    assert summary.text(root).splitlines()[-1] == line


def scored(score: float, floor: float = 0.0) -> dict[str, float]:
    spread = {"low": max(0.0, score - 0.1), "high": min(1.0, score + 0.1)}
    return {"n": 36, "score": score, **spread, "floor": floor, "floor_answer": "x" * 56}


@pytest.fixture
def measured(root: Path) -> Path:
    """With a battery of 28 categories, the worst first in the alphabet, and what is measured beside it."""
    source = {
        "base": {"bpb": 1.8, "stderr": 0.1},
        "sft": {"bpb": 1.9, "stderr": None},
        "documents": 12,
        "gzip": 2.3,
        "xz": 2.4,
    }
    scores = {f"category_{n:02}": scored(n / 30, 0.4) for n in range(28)} | {"all": scored(0.5)}
    share = {"n": 800, "count": 792, "rate": 0.99, "stderr": 0.01}
    pair = {
        "difference": 0.4,
        "low": 0.35,
        "high": 0.45,
        "wins": 330,
        "losses": 10,
        "p": 1e-40,
        "resolves_similar": 0.031,
    }
    metrics = {
        "bpb": {"sources": {"code": source}, "all": source, "beats_xz": {"base": True}},
        "battery": {"sft": scores},
        "paired": {"sft_minus_base": {"all": pair}},
        "gold": {model: {"all": {"bpb": 1.5}} for model in ("base", "sft")},
        "health": {"sft": {name: share for name in ("stop", "fake_turn", "repetition", "hedge", "identity_leak")}},
    }
    metrics["taught"] = {"talks": {"taught": {"n": 9, "right": 8}}}
    write_json(root / "metrics" / "eval.json", metrics)
    write_json(
        root / "metrics" / "sft_data.json", {"sources": {"talks": {"read": 18, "too_long": 8, "contaminated": 1}}}
    )
    return root


def test_the_battery_has_a_line_for_each_category_with_its_floor_and_what_reaches_it(measured: Path) -> None:
    told = summary.text(measured, whole=True).partition("Battery")[2]
    lines = told.splitlines()
    assert len(lines) < 37 and max(map(len, lines)) <= 120
    assert all(f"category_{n:02}" in told for n in range(28))
    assert f"90 % [ 80, 100] n 36   floor  40   {'x' * 56}" in told
    assert "category_00" in lines[28] and f"floor  40 < {'x' * 56}" in lines[28]
    assert "Held-out text, 12 documents, bits" in summary.text(measured)  # ± 0.3 is no riddle where they are ten
    assert "  talks, your own questions not taught: 1 contaminated, 8 too_long (docs/own-data.md)\n" in told
    assert "sft minus base: +40.0 points [+35.0, +45.0], 330 won, 10 lost, p 1e-40" in told
    assert "two similar models: 3.1 points can be resolved" in told and "99.0% end by themselves" in told


def test_without_all_it_fits_a_screen_with_the_best_the_worst_and_what_is_asked_first(measured: Path) -> None:
    """It was 54 lines of up to 118 columns, and what the run took had left the screen."""
    metrics = read_json(measured / "metrics" / "eval.json")
    metrics["battery"]["sft"] |= {"identity": scored(0.5), "first_words": scored(0.6)}
    metrics["bpb"]["sources"] |= {f"source_{n}": metrics["bpb"]["all"] for n in range(12)}
    write_json(measured / "metrics" / "eval.json", metrics)
    (measured / "models/export").mkdir(parents=True)
    (measured / "models/export/MODEL_CARD.md").touch()
    lines = summary.text(measured).splitlines()
    seven_more_stages, data_and_tracking_lines, prompt = 7, 2, 1
    assert len(lines) + seven_more_stages + data_and_tracking_lines + prompt <= 40 and max(map(len, lines)) <= 100
    start = next(number for number, line in enumerate(lines) if line.startswith("Battery")) + 1
    shown = [line.split()[0] for line in lines[start : start + 6]]
    assert shown == ["category_27", "category_26", "first_words", "identity", "category_00", "all"]
    assert "  25 more categories: athanor summary --all" in lines


def test_a_run_that_had_nothing_to_do_says_so_instead_of_a_table(root: Path) -> None:
    lines = summary.text(root, summary.runs(root), since_ms=4).splitlines()
    assert "all 3 were kept" in lines[1] and len(lines) == 2


def test_after_a_part_of_the_graph_no_scores_of_the_model_before_are_told(measured: Path) -> None:
    """`athanor repro sft-data` ended with "eval kept" and the battery of a model that had learned from other rows."""
    chain = {"sft-data": ("raw", "rows"), "sft": ("rows", "model"), "eval": ("model", "scores")}
    graph = {name: {"cmd": "x", "deps": [dep], "outs": [out]} for name, (dep, out) in chain.items()}
    (measured / "dvc.yaml").write_text(json.dumps({"stages": graph}))
    for name in chain:
        write_json(measured / "metrics/runs" / f"{name.replace('-', '_')}.json", {"run": name, "seconds": 1.0})

    def told(made: str, **words: Any) -> str:
        entries = {
            name: {"cmd": "x", "deps": [{"path": dep, "md5": "1"}], "outs": [{"path": out, "md5": made}]}
            for name, (dep, out) in chain.items()
        }
        (measured / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": entries}))
        return summary.text(measured, **words)

    assert "Battery" in told("1") and "Old " not in told("1")
    before = {**summary.runs(measured), "sft-data": "sft-data-0000000000001-1"}
    text = told("2", before=before, asked=repro.asked_for(measured, ["sft-data"]))
    assert re.findall(r"  (\S+) +(\D*\w) +[\d.]+ s", text)[1:3] == [("sft", "not asked for"), ("eval", "not asked for")]
    assert "Battery" not in text and "Old       the scores: of the model before; athanor repro brings" in text
    kept = told("2", before=summary.runs(measured), asked={"sft-data"})
    assert "all 1 that were asked for were kept" in kept and "Old " in kept
    assert "Battery" not in told("2")  # nor in what `athanor summary` says


def test_what_the_words_of_repro_ask_for(root: Path) -> None:
    graph = {"a": ([], "x"), "b": (["x"], "y"), "c": (["y"], "z")}
    stages = {name: {"cmd": "x", "deps": deps, "outs": [out]} for name, (deps, out) in graph.items()}
    (root / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    for words, asked in (("b", {"a", "b"}), ("-f -s b", {"b"}), ("", None), ("-f", None), ("--downstream b", None)):
        assert repro.asked_for(root, words.split()) == asked, words
    assert repro.asked_for(root, ["probes/dvc.yaml"]) is None

"""The eval stage as a whole: outputs, figures, gates, and that it repeats to the byte."""

from __future__ import annotations

import csv
import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest

from athanor.base.artifacts import new_dir, read_json, read_manifest, verify_files, write_json, write_manifest
from athanor.base.errors import GateError, InputError, Interrupted, ParamsError
from athanor.text.conversations import Conversation, Item, Message, write_rows
from athanor.text.documents import Document, write_documents
from athanor.tokenizer.tokenizer import Tokenizer
from stages import evaluate
from tests.evaluation import tiny
from tests.stages import conftest

PARAMS = conftest.PARAMS["eval"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Everything the stage reads, small."""
    root = tmp_path_factory.mktemp("eval")
    tokenizer = tiny.write_tiny_tokenizer(root / "models/tokenizer")
    tiny.save(root / "models/base", tiny.silence(tiny.make_model(tokenizer), tokenizer), tokenizer)
    tiny.save(root / "models/sft", tiny.always_says(tokenizer, tokenizer.stop), tokenizer)
    conftest.write_battery(root, tiny.all_kinds())
    draw = random.Random(1)
    words = ["return", "value", "string", "node", "self"]
    texts = {source: [" ".join(draw.choices(words, k=60)) for _ in range(12)] for source in ("code", "prose")}
    documents = [Document(text, source, "prose", "MIT", "val") for source in texts for text in texts[source]]
    with new_dir(root / "data/clean") as folder:
        write_documents(folder / "val.parquet", documents)
        write_manifest(folder, kind="clean", version=1, counts={}, contaminated_items={tiny.all_kinds()[0].id: 3})
    write_json(root / "metrics/sft_data.json", {"contaminated_items": {}})
    with new_dir(root / "data/instruct") as folder:
        write_manifest(folder, kind="instruct", version=1, counts={})
    return root


@pytest.fixture
def workspace(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "work")
    conftest.settle(monkeypatch, tmp_path / "work")
    return tmp_path / "work"


def execute(stop_after=None, **changes):
    conftest.run_stage(evaluate, {"eval": PARAMS | changes}, stop_after)


def outputs():
    paths = [Path("metrics/eval.json"), Path("plots/eval_battery.tsv"), *sorted(Path("data/eval").iterdir())]
    return {str(path): path.read_bytes() for path in paths}


def test_figures_and_files(workspace):
    execute()
    metrics = read_json("metrics/eval.json")
    assert set(read_json("metrics/summary/eval.json")) == {"base_bpb", "sft_bpb", "accuracy"}
    for name in ("base", "sft"):
        assert metrics["battery"][name]["all"]["n"] == 6 and metrics["development"][name]["n"] == 6
        assert {"n", "score", "stderr", "low", "high", "floor", "margin_stderrs"} <= set(
            metrics["battery"][name]["sum"]
        )
        fake = metrics["health"][name]["fake_turn"]
        assert (fake["n"], fake["count"], fake["rate"]) == (10, 0, 0) and fake["stderr"] > 0.09
        assert metrics["gold"][name]["all"]["bpb"] > 0 and "score_norm" in metrics["battery"][name]["choice"]
        assert set(metrics["truncation"][name]) == {"code", "copy", "form", "list", "sum"}
    assert metrics["paired"]["sft_minus_base"]["all"]["n"] == 6 and metrics["paired"]["sft_minus_base"]["sum"]["p"] == 1
    assert metrics["truncation"]["base"]["copy"]["rate"] == 1 == metrics["health"]["base"]["truncated"]["rate"]
    assert metrics["verbosity"] == {"base": {"n": 10, "mean_tokens": 10}, "sft": {"n": 10, "mean_tokens": 0}}
    assert all("rate" in row for row in metrics["health"]["sft"].values())  # the model card prints them all
    assert metrics["conditions"]["warm"]["n"] == metrics["conditions"]["greedy"]["n"] == 4
    assert metrics["contamination"] == {
        "items": 12,
        "documents_dropped": 3,
        "conversations_dropped": 0,
        "items_touched": 1,
    }
    assert metrics["health"]["sft"]["stop"]["rate"] == 1 and metrics["health"]["base"]["stop"]["rate"] == 0
    assert metrics["health"]["sft"]["empty"]["rate"] == 1 and metrics["health"]["sft"]["identity_leak"]["count"] == 0
    row = metrics["bpb"]["sources"]["code"]
    # Random weights do not beat a compressor, and the limit of 3,000 bytes is respected.
    assert 2990 < row["bytes"] <= 3000 and row["base"]["bpb"] > row["xz"] > row["xz_joined"] > 0
    assert row["base"]["stderr"] > 0 and metrics["bpb"]["beats_xz"]["base"] is False
    assert metrics["bpb"]["all"]["bytes"] == sum(r["bytes"] for r in metrics["bpb"]["sources"].values())

    verify_files("data/eval")
    assert read_manifest("data/eval", "eval", 1)["counts"] == {"answers": 24, "items": 12}
    rows = [json.loads(line) for line in Path("data/eval/battery.jsonl").read_text().splitlines()]
    assert len(rows) == 24 and {row["model"] for row in rows} == {"base", "sft"}
    with open("plots/eval_battery.tsv") as file:
        table = list(csv.DictReader(file, delimiter="\t"))
    assert len(table) == 7 and {"category", "base", "sft", "floor"} <= set(table[0]) and table[0]["category"] == "all"
    assert "## copy" in Path("data/eval/samples.md").read_text()
    assert "| warm | 4 |" in Path("data/eval/battery.md").read_text()
    facts = read_json("metrics/runs/eval.json")["facts"]
    assert facts["sft_battery_seconds"] >= 0 and "seconds" not in json.dumps(metrics)
    for data in outputs().values():
        assert str(workspace).encode() not in data


def test_it_repeats_to_the_byte_and_measures_what_the_model_is(workspace):
    execute()
    first = outputs()
    execute()
    assert outputs() == first
    execute(batch_rows=64)  # another grouping, the same answers
    assert outputs() == first
    execute(seed=2)
    assert outputs()["metrics/eval.json"] != first["metrics/eval.json"]
    assert outputs()["data/eval/battery.jsonl"] == first["data/eval/battery.jsonl"]


def test_one_s_own_questions_have_a_result_of_their_own(workspace):
    """Of two questions that were taught a model that says "word" answers one; one is too long to be taught, one held out."""
    tokenizer = Tokenizer.load("models/tokenizer")
    (word,) = tokenizer.encode("a")[-1:]
    tiny.save(Path("models/sft"), tiny.always_says(tokenizer, word), tokenizer)
    says = tokenizer.decode([word] * 10).strip()
    with new_dir("data/instruct") as folder:
        turns = [
            ("One?", says, "train"),
            ("One?", says, "train"),
            ("Two?", "two", "train"),
            ("Three?", "3", "val"),
            ("?", 999 * says, "train"),
        ]
        rows = [
            Conversation((Message("user", q), Message("assistant", a), Message("user", "?"), Message("assistant", "!")),
                         "talks", "MIT", split, q)
            for q, a, split in turns
        ]  # fmt: skip
        write_rows(folder / "talks.jsonl", rows)
        write_manifest(folder, kind="instruct", version=1, counts={}, own=["talks"])
    execute()
    metrics = read_json("metrics/eval.json")
    assert metrics["taught"] == {"talks": {"taught": {"n": 2, "right": 1}, "held_out": {"n": 1, "right": 0}}}
    assert metrics["battery"]["sft"]["all"]["n"] == 6 and "talks" not in metrics["battery"]["sft"]
    rows = [json.loads(line) for line in Path("data/eval/battery.jsonl").read_text().splitlines()]
    assert [row["prompt"][0]["content"] for row in rows if row["origin"] == "taught" and row["correct"]] == ["One?"]
    assert len(rows) == 24 + 3


def test_a_battery_that_contradicts_its_scorer_stops_before_any_model_is_read(workspace):
    """All contradictions: tests/evaluation/test_scoring.py."""
    shutil.rmtree("models/base")  # reading it would be another error
    first, *others = tiny.all_kinds()
    conftest.write_battery(workspace, [dataclasses.replace(first, accepted=()), *others])
    with pytest.raises(GateError, match="one accepted"):
        execute()
    assert not Path("data/eval").exists() and not Path("metrics/eval.json").exists()


def test_without_conditions_nothing_more_is_decoded(workspace):
    execute(conditions={})
    assert read_json("metrics/eval.json")["conditions"] == {}
    conftest.write_battery(workspace, tiny.items())  # nothing for development
    execute()
    metrics = read_json("metrics/eval.json")
    assert metrics["conditions"] == {} and metrics["development"] == {} and metrics["battery"]["sft"]["all"]["n"] == 8


def test_a_penalty_that_hides_what_the_model_knows_is_reported(workspace, capsys):
    tokenizer = Tokenizer.load("models/tokenizer")
    (letter,) = tokenizer.encode("e")
    shutil.rmtree("models/sft")
    tiny.save(Path("models/sft"), tiny.always_says(tokenizer, letter), tokenizer)
    rows = []
    for number in range(6):
        ask = (Message("user", f"Say e ten times, please: number {number}"),)
        split = "development" if number % 2 else "test"
        rows.append(Item("say", ask, "exact", "e" * 10, ("e" * 10,), ("e", "x"), split=split))
    conftest.write_battery(workspace, rows)
    execute(conditions={"heavy": {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 10.0}})
    metrics = read_json("metrics/eval.json")
    assert metrics["conditions"]["greedy"]["score"] == 1 and metrics["conditions"]["heavy"]["score"] == 0
    assert "condition heavy: a repetition penalty of 10 costs 100.0 points" in capsys.readouterr().err
    assert metrics["paired"]["sft_minus_base"]["all"]["wins"] == 3


def test_an_empty_battery_and_a_missing_one(workspace):
    conftest.write_battery(workspace, [])
    with pytest.raises(InputError, match="no items"):
        execute()
    shutil.rmtree("data/battery")
    with pytest.raises(InputError, match="items.jsonl"):
        execute()


@pytest.mark.parametrize("key", ["tokenizer_digest", "template_hash"])
def test_a_model_made_with_another_tokenizer_or_template_is_refused(workspace, key):
    config = read_json("models/sft/config.json")
    config["facts"][key] = "0" * 64
    Path("models/sft/config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="another"):
        execute()
    assert not Path("data/eval").exists()


def test_a_failing_run_leaves_the_last_result(workspace):
    execute()
    first = outputs()
    long = Item("sum", (Message("user", "word " * 200),), "numeric", "1", ("1",), ("2", "3"))
    conftest.write_battery(workspace, [long])
    with pytest.raises(InputError, match="context"):
        execute()
    assert outputs() == first


def test_a_request_to_stop_is_heard(workspace):
    with pytest.raises(Interrupted):
        execute(stop_after=1)
    assert not Path("data/eval").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"condition_items": 0},
        {"conditions": {"greedy": PARAMS["conditions"]["warm"]}},
        {"max_new_tokens": 0},
        {"batch_rows": 0},
        {"bpb_max_bytes_per_source": 10},
        {"tokens": 5},
        {"seed": 1.5},
    ],
)
def test_bad_params_are_named(workspace, changes):
    with pytest.raises(ParamsError, match=f"eval.{next(iter(changes))}"):
        execute(**changes)


def test_a_source_with_one_document_has_no_error_estimate(workspace):
    only = Document("one document of some words " * 9, "prose", "prose", "MIT", "val")
    write_documents("data/clean/val.parquet", [only])
    execute()
    row = read_json("metrics/eval.json")["bpb"]["sources"]["prose"]
    assert row["documents"] == 1 and row["base"]["stderr"] is None

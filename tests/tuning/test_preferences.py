"""Pairs in the shapes of data sets and what is left out of them; DPO by TRL, killed and resumed. 30 s."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("trl")
from athanor.base.artifacts import new_dir, write_manifest
from athanor.base.strict import build
from athanor.text.conversations import Item, Message, write_rows
from athanor.text.rows import MalformedRow
from athanor.tuning.pair_params import PairsSource
from athanor.tuning.pairs import Pair, parse
from tests.tuning.world import World

PROMPT = (Message("user", "How are you?"),)
PAIR = Pair(PROMPT, Message("assistant", "Well."), Message("assistant", "Why?"))
USER, WELL, WHY = ({"role": m.role, "content": m.content} for m in (*PROMPT, PAIR.chosen, PAIR.rejected))


def read(prompt, chosen, rejected, column="prompt"):
    source = build(PairsSource, {"type": "pairs", "name": "x", "files": "x", "prompt": column}, "x")
    return parse(source, {"prompt": prompt, "chosen": chosen, "rejected": rejected}, "x:1")


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "column"),
    [
        ("How are you?", "Well.", "Why?", "prompt"),
        ([USER], [WELL], [WHY], "prompt"),
        ([USER], "Well.", "Why?", "prompt"),
        ("How are you?", [USER, WELL], [USER, WHY], "prompt"),
        ("an id", [USER, WELL], [USER, WHY], None),
    ],
)
def test_shapes(prompt, chosen, rejected, column):
    assert read(prompt, chosen, rejected, column) == PAIR


def test_rows_that_are_no_pairs():
    assert read("Hi", "a", " ") == read("Hi", [], "b") == "empty"
    assert read("Hi", "a", "a") == "equal_answers"
    for row in (("Hi", [WELL, USER], "x"), ("", "a", "b"), ("a", "b", "c", None)):
        with pytest.raises(MalformedRow):
            read(*row)
    with pytest.raises(MalformedRow, match="same messages"):
        read("an id", [USER, WELL], [{"role": "user", "content": "Who?"}, WHY])


def test_data_to_a_model_that_prefers_the_better_answers(tmp_path):
    def row(number, chosen, rejected):
        return {"prompt": f"What is number {number}?", "chosen": chosen, "rejected": rejected}

    rows = [row(n, f"It is {n}.", "no " * (n % 5 + 1)) for n in range(60)]
    rows += [rows[0], row(70, "a", "b"), row(70, "b", "a"), row(71, "x" * 300, "y"), row(72, "<|im_end|>", "y")]
    rows += [{"prompt": "Which question is held out here?", "chosen": "this", "rejected": "that"}]
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/pairs.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    source = {"type": "pairs", "name": "own", "files": "corpus/pairs.jsonl"}
    data = {"context_tokens": 128, "sources": [source], "val_fraction": 0.2}
    sizes = {"pairs_per_step": 4, "rows_at_once": 2, "epochs": 2.0, "lr": 0.01, "saves": 4}
    made = World(tmp_path, side={"base": "base", "method": "lora"}, dpo_data=data, dpo=sizes)
    with new_dir(tmp_path / "data/battery") as battery:
        question = Message("user", "Which question is held out here?")
        write_rows(battery / "items.jsonl", [Item("facts", (question,), "exact", "this", ("this",), ("that", "it"))])
        write_manifest(battery, kind="battery", version=1, counts={}, parents={})
    done = made.run("-m", "stages.dpo_data")
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "metrics/dpo_data.json").read_text())
    assert sum(facts["pairs"].values()) == 60
    expected = {"copies": 1, "contradictions": 2, "too_long": 1, "control_text": 1, "battery_items": 1}
    assert facts["left_out"] == expected
    metrics = made.killed_and_resumed("dpo")
    assert metrics["before"]["val_loss"] == pytest.approx(0.693147, abs=1e-5)  # the model is its own reference
    assert metrics["after"]["val_loss"] < 0.5 and metrics["after"]["eval_rewards.accuracies"] > 0.9


def test_too_few_pairs_are_an_error_that_says_what_to_do(tmp_path):
    made = World(tmp_path, dpo_data={"context_tokens": 128})
    with new_dir(tmp_path / "data/battery") as battery:
        write_rows(battery / "items.jsonl", [])
    done = made.run("-m", "stages.dpo_data")
    assert done.returncode == 1 and "takes 20" in done.stderr and "chat pairs" in done.stderr

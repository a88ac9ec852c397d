"""The stage dpo-data: whole pairs in rows, the same bytes twice, its gates, and what it says when there is too little."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from athanor.base.artifacts import manifest_digest, read_json, read_manifest, verify_files
from athanor.base.errors import GateError, InputError, ParamsError
from athanor.base.strict import read_yaml
from athanor.cli import pin
from athanor.data.rows import KIND, VERSION, PackedRows
from athanor.preferences import gates
from athanor.preferences.pairs import REASONS
from athanor.runtime import presets
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids, template_hash
from athanor.tokenizer.tokenizer import Tokenizer
from stages import dpo_data
from tests.stages.conftest import PARAMS, QUESTION, ROOT, run_stage, write_battery

CHATS = copy.deepcopy(PARAMS["sft_data"]) | {"context_tokens": 128}
DPO: dict[str, Any] = {
    "seed": 1,
    "val_fraction": 0.2,
    "sources": [{"type": "pairs", "name": "chat", "files": "corpus/*.jsonl", "license": "MIT"}],
}
LATER = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "bye?"},
]


def rows_of_pairs() -> list[dict[str, Any]]:
    made = [{"prompt": f"say {n}", "chosen": f"{n}" * (n % 7 + 1), "rejected": f"no {n}"} for n in range(60)]
    made += [
        {"prompt": LATER, "chosen": "bye", "rejected": "what"},
        {"prompt": LATER, "chosen": "bye", "rejected": "no"},
    ]
    made += [made[0], {"prompt": "x", "chosen": "a", "rejected": "b"}, {"prompt": "x", "chosen": "b", "rejected": "a"}]
    made += [
        {"prompt": "y", "chosen": "same", "rejected": "same"},
        {"prompt": "z", "chosen": "word " * 120, "rejected": "no"},
    ]
    return [*made, {"prompt": QUESTION, "chosen": "twelve", "rejected": "one"}]


def write_pairs(rows: list[dict[str, Any]], name: str = "pairs.jsonl") -> None:
    Path("corpus").mkdir(exist_ok=True)
    Path("corpus", name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def world(tokenizer_world):
    write_battery(tokenizer_world)
    write_pairs(rows_of_pairs())
    return tokenizer_world


def build(**changes: Any) -> None:
    run_stage(dpo_data, {"dpo_data": {**DPO, **changes}, "sft_data": CHATS})


def texts(tokenizer: Tokenizer, split: str) -> list[tuple[str, ...]]:
    pairs = gates.check_packed(tokenizer, PackedRows("data/dpo", split), dpo_data.ItemIndex([]), 10)
    return [(*(message.content for message in chosen), rejected[-1].content) for chosen, rejected in pairs]


def test_rows_hold_whole_pairs_with_the_last_answers_supervised_and_the_losses_are_counted(world):
    build()
    verify_files("data/dpo")
    tokenizer, told = Tokenizer.load("models/tokenizer"), read_manifest("data/dpo", KIND, VERSION)
    assert told["pairs"] is True and told["sources"] == ["chat"]
    assert (told["tokenizer"], told["template_hash"]) == (tokenizer.digest, template_hash(tokenizer))
    assert told["parents"] == {name: manifest_digest(path) for name, path in
                               {"tokenizer": Path("models/tokenizer"), "battery": Path("data/battery")}.items()}  # fmt: skip
    assert (told["context_tokens"], told["pad_id"], told["stop_id"]) == (128, tokenizer.pad, tokenizer.stop)

    metrics = read_json("metrics/dpo_data.json")
    left_out = dict.fromkeys(REASONS, 0) | {
        "equal_answers": 1,
        "contradictions": 2,
        "copies": 1,
        "too_long": 1,
        "contaminated": 1,
    }
    assert metrics["sources"]["chat"]["left_out"] == left_out and sum(metrics["contaminated_items"].values()) == 1
    assert metrics["train"]["pairs"] + metrics["val"]["pairs"] == 62 and metrics["val"]["pairs"] > 4
    assert metrics["sources"]["chat"]["train"] == metrics["train"]["pairs"]
    assert metrics["train"]["prompts"] + metrics["val"]["prompts"] == 61

    wanted = {(row["prompt"], row["chosen"], row["rejected"]) for row in rows_of_pairs()[:60]}
    wanted |= {(*(message["content"] for message in LATER), "bye", worse) for worse in ("what", "no")}
    assert {*texts(tokenizer, "train"), *texts(tokenizer, "val")} == wanted
    for split in ("train", "val"):
        packed = PackedRows("data/dpo", split)
        lengths = packed.lengths()
        for row in range(len(packed)):
            numbers = packed.numbers(row)
            assert lengths[numbers].sum() <= 129
            assert numbers == [
                number for first in numbers[::2] for number in (first - first % 2, first - first % 2 + 1)
            ]
        assert metrics[split]["tokens"] == lengths.sum()
        assert metrics[split]["chosen_tokens"] == packed.supervised()[::2].sum()
        assert metrics[split]["rejected_tokens"] == packed.supervised()[1::2].sum()
    prompt = len(prompt_ids(tokenizer, [Message(**message) for message in LATER]))
    found = [
        packed.conversation(number)
        for packed in (PackedRows("data/dpo", split) for split in ("train", "val"))
        for number in range(packed.conversation_count)
    ]
    later = [(ids, mask) for ids, mask in found if "hello" in tokenizer.decode(ids.tolist())]
    assert len(later) == 4 and all(not mask[:prompt].any() and mask[prompt:].all() for _, mask in later)


def test_the_same_bytes_twice(world):
    build()
    before = {path.name: path.read_bytes() for path in sorted(Path("data/dpo").iterdir())}
    metrics = Path("metrics/dpo_data.json").read_bytes()
    build()
    assert {path.name: path.read_bytes() for path in sorted(Path("data/dpo").iterdir())} == before and len(before) > 10
    assert Path("metrics/dpo_data.json").read_bytes() == metrics


def test_sources_are_told_apart_and_a_side_is_decided_by_the_prompt(world):
    write_pairs([{"ask": f"say {n}", "good": "web", "bad": f"no {n}"} for n in range(60)], "web.jsonl")
    web = {
        "type": "pairs",
        "name": "web",
        "files": "corpus/web.jsonl",
        "prompt": "ask",
        "chosen": "good",
        "rejected": "bad",
    }
    build(sources=[{**DPO["sources"][0], "files": "corpus/pairs.jsonl"}, web])
    told = read_json("metrics/dpo_data.json")["sources"]
    assert (told["web"]["train"] + told["web"]["val"], told["web"]["license"]) == (60, "unknown")
    tokenizer, packed = Tokenizer.load("models/tokenizer"), PackedRows("data/dpo", "val")
    names = [packed.source(number) for number in range(packed.conversation_count)]
    assert names[::2] == names[1::2] and set(names) == {"chat", "web"}
    prompts = [{text[:-2] for text in texts(tokenizer, split)} for split in ("train", "val")]
    assert prompts[0].isdisjoint(prompts[1])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sources": []}, "no source of pairs is named.*athanor chat pairs corpus/pairs.jsonl"),
        ({"min_pairs": 63}, "62 pairs, dpo_data.min_pairs is 63; left out: 1 equal_answers, 2 contradictions, 1 copies.*"
                            "collect more on the chat page.*thumbs and corrections"),
        ({"val_fraction": 0.0}, "none of 62 pairs is in val.*raise it"),
        ({"sources": [{**DPO["sources"][0], "files": "corpus/none.jsonl"}]}, "corpus/none.jsonl: no file matches"),
    ],
)  # fmt: skip
def test_too_little_says_what_to_do_and_publishes_nothing(world, changes, told):
    with pytest.raises(InputError, match=told):
        build(**changes)
    assert not Path("data/dpo").exists()


def divided(rows: list[list[int]]) -> list[list[int]]:
    return [rows[0][:1], rows[0][1:], *rows[1:]]


def exchanged(entries: list[Any]) -> list[Any]:
    """The chosen answers of two pairs in each other's place, with their prompts; of one length, so that no row grows."""
    chosen = range(0, len(entries), 2)
    ids = [list(entry[0]) for entry in entries]
    one, two = next((a, b) for a in chosen for b in chosen if len(ids[a]) == len(ids[b]) and ids[a] != ids[b])
    changed = list(entries)
    changed[one], changed[two] = entries[two], entries[one]
    return changed


def all_answers(entries: list[Any]) -> list[Any]:
    return [(ids, np.ones_like(mask)) for ids, mask in entries]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda entries, rows: (entries, divided(rows)), "does not hold whole pairs"),
        (lambda entries, rows: (entries, [sum(rows, [])]), "longer than the context"),
        (lambda entries, rows: (entries, [*rows, rows[0]]), "do not hold every pair once"),
        (lambda entries, rows: (all_answers(entries), rows), "supervises other tokens"),
        (lambda entries, rows: (exchanged(entries), rows), "have other prompts"),
    ],
)
def test_what_was_written_is_checked(world, monkeypatch, spoil, told):
    real = dpo_data.write_split

    def write_split(folder, split, entries, rows, *more):
        real(folder, split, *spoil(entries, rows), *more)

    monkeypatch.setattr(dpo_data, "write_split", write_split)
    with pytest.raises(GateError, match=told):
        build()
    assert not Path("data/dpo").exists()


def test_decontamination_looks_at_the_packed_artifact(world, monkeypatch):
    from athanor.preferences import pairs

    monkeypatch.setattr(pairs, "items_in", lambda found, *_: [None for _ in found])
    with pytest.raises(GateError, match="contamination.*1 pairs hold a battery item"):
        build()


def test_pin_knows_its_data_sets(tmp_path, monkeypatch):
    monkeypatch.setattr(pin, "newest_commit", lambda dataset: {"a/pairs": "c" * 40}[dataset])
    entry = (
        "  sources: [{type: pairs, name: own, files: a.jsonl}, {type: pairs, name: web, hub_id: a/pairs, revision: }]\n"
    )
    text = presets.complete(ROOT / "presets/default.yaml").partition("\ndpo_data:")
    old = next(line for line in text[2].split("\n") if line.startswith("  sources: []"))
    path = tmp_path / "params.yaml"
    path.write_text(text[0] + text[1] + text[2].replace(old + "\n", entry))
    assert pin.pin(path) == {"dpo_data.sources[1]": "c" * 40}
    assert read_yaml(path)["dpo_data"]["sources"][1]["revision"] == "c" * 40
    with pytest.raises(ParamsError, match="does not pin"):
        path.write_text(path.read_text().replace("c" * 40, "main"))
        pin.pin(path)

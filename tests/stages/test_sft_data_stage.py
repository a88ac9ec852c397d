from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from athanor.artifacts import manifest_digest, read_json, sha256_file, verify_files, write_manifest
from athanor.corpus.conversations import Conversation, Item, Message, write_rows
from athanor.corpus.documents import split_of
from athanor.data.rows import PackedRows
from athanor.data.sampler import SftSampler
from athanor.errors import GateError, InputError, ParamsError
from athanor.tokenizer import chat, sft_rows
from athanor.tokenizer.tokenizer import Tokenizer
from stages import sft_data

SFT = {
    "context_tokens": 64,
    "seed": 1,
    "max_source_share": 0.9,
    "max_pad_share": 0.1,
    "decontamination": {"ngram_words": 13, "max_ngram_conversations": 10, "max_ngram_items": 1, "fact_categories": []},
    "sources": {
        "sums": {"max_copies": 1, "repeats": 1, "max_supervised_tokens": None},
        "chat": {"max_copies": 2, "repeats": 3, "max_supervised_tokens": 400},
    },
}
QUESTION = "How many green apples did the old farmer sell at the market on the third Sunday in May?"


def conversation(source: str, *texts: str) -> Conversation:
    roles = ("user", "assistant") * (len(texts) // 2)
    split = split_of(texts[0], 0.2)
    return Conversation(tuple(map(Message, roles, texts)), source, "CC0-1.0", split, texts[0])


def conversations() -> dict[str, list[Conversation]]:
    rng = random.Random(1)
    sums = []
    for _ in range(120):
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        sums.append(conversation("sums", f"What is {a} + {b}?", f"{a} + {b} = {a + b}"))
    talks = [conversation("chat", f"hello {i}", "hi there", "and now?", f"bye {i}") for i in range(60)]
    talks += [talks[0]] * 3 + [conversation("chat", "tell me all", "word " * 100)]
    talks += [conversation("chat", "short", "yes", "long", "word " * 100), conversation("chat", QUESTION, "twelve")]
    return {"sums": sums, "chat": talks}


@pytest.fixture
def world(tokenizer_world):
    (tokenizer_world / "data/instruct").mkdir()
    for name, rows in conversations().items():
        write_rows(tokenizer_world / "data/instruct" / f"{name}.jsonl", rows)
    write_manifest("data/instruct", kind="instruct", version=1, counts={})
    (tokenizer_world / "data/battery").mkdir()
    item = Item("facts", (Message("user", QUESTION),), "exact", "twelve", ("twelve",), ("one", "two"))
    write_rows(tokenizer_world / "data/battery/items.jsonl", [item])
    write_manifest("data/battery", kind="battery", version=1, counts={})
    return tokenizer_world


def changed(**values):
    return {**copy.deepcopy(SFT), **values}


def test_rows_hold_the_conversations_and_the_losses_are_counted(world, run_text_stage):
    run_text_stage(sft_data, sft_data=SFT)
    verify_files("data/sft")
    metrics, manifest = read_json("metrics/sft_data.json"), read_json("data/sft/manifest.json")
    tokenizer = Tokenizer.load("models/tokenizer")
    assert manifest["tokenizer"] == tokenizer.digest
    assert manifest["template_hash"] == chat.template_hash(tokenizer)
    talk = metrics["sources"]["chat"]
    assert (talk["too_long"], talk["truncated"], talk["contaminated"]) == (1, 1, 1) and metrics["contaminated"] == 1
    assert talk["duplicates"] >= 2 and talk["over_cap"] > 0
    assert sum(entry["supervised_share"] for entry in metrics["sources"].values()) == pytest.approx(1, abs=1e-5)
    sampler = SftSampler("data/sft", 64, seed=1)
    ids, mask, _ = sampler.batch(0, sampler.tokens_per_epoch)
    assert int(mask.sum()) == metrics["supervised_tokens"]
    assert QUESTION not in tokenizer.decode(ids.ravel().tolist())


def test_repeats_are_entries_and_not_copies_and_validation_is_not_repeated(world, run_text_stage):
    run_text_stage(sft_data, sft_data=SFT)
    tokenizer, train, val = Tokenizer.load("models/tokenizer"), PackedRows("data/sft"), PackedRows("data/sft", "val")
    entries = np.bincount([n for row in range(len(train)) for n in train.numbers(row)])
    is_sum = ["+" in tokenizer.decode(train.conversation(n)[0].tolist()) for n in range(train.conversation_count)]
    assert {(a, int(b)) for a, b in zip(is_sum, entries, strict=True)} == {(True, 1), (False, 3)}
    assert sorted(n for row in range(len(val)) for n in val.numbers(row)) == list(range(val.conversation_count))


def test_repeats_to_the_byte(world, run_text_stage):
    run_text_stage(sft_data, sft_data=SFT)
    first = manifest_digest("data/sft"), sha256_file("metrics/sft_data.json")
    run_text_stage(sft_data, sft_data=SFT)
    assert (manifest_digest("data/sft"), sha256_file("metrics/sft_data.json")) == first


def test_decontamination_looks_at_the_packed_artifact(world, run_text_stage, monkeypatch):
    monkeypatch.setattr(sft_rows, "decontaminate", lambda rows, *_: list(rows))
    with pytest.raises(GateError, match="contamination.*1 conversations hold a battery item"):
        run_text_stage(sft_data, sft_data=SFT)
    assert not (world / "data/sft").exists()


def test_a_template_that_training_and_serving_do_not_share(world, run_text_stage, monkeypatch):
    real = sft_rows.render

    def with_newlines(tokenizer, messages):
        return real(tokenizer, [Message(m.role, f"\n{m.content}") for m in messages])

    monkeypatch.setattr(sft_rows, "prompt_ids", lambda t, m: chat.prompt_ids(t, m)[:-1] + t.encode("\n"))
    with pytest.raises(GateError, match="prompt-ids"):
        run_text_stage(sft_data, sft_data=SFT)
    monkeypatch.setattr(sft_rows, "render", with_newlines)
    with pytest.raises(GateError, match="prompt-ids"):
        run_text_stage(sft_data, sft_data=SFT)


def test_one_source_that_drowns_the_rest(world, run_text_stage):
    with pytest.raises(GateError, match="source-share.*lower sft_data.sources"):
        run_text_stage(sft_data, sft_data=changed(max_source_share=0.3))
    assert not (world / "data/sft").exists()


def test_sources_of_data_and_params_must_be_the_same(world, run_text_stage):
    sources = SFT["sources"]
    with pytest.raises(ParamsError, match="source 'chat' is not named"):
        run_text_stage(sft_data, sft_data=changed(sources={"sums": sources["sums"]}))
    with pytest.raises(InputError, match="sft_data source 'more'"):
        run_text_stage(sft_data, sft_data=changed(sources={**sources, "more": sources["sums"]}))
    off = {**sources, "chat": {**sources["chat"], "repeats": 0}}
    run_text_stage(sft_data, sft_data=changed(sources=off, max_source_share=1.0))
    assert list(read_json("metrics/sft_data.json")["sources"]) == ["sums"]
    with pytest.raises(ParamsError, match="every source has repeats 0"):
        nothing = {name: {**entry, "repeats": 0} for name, entry in sources.items()}
        run_text_stage(sft_data, sft_data=changed(sources=nothing))

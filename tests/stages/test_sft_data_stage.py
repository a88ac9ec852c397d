from __future__ import annotations

import copy
import dataclasses
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from athanor.base.artifacts import manifest_digest, read_json, verify_files, write_manifest
from athanor.base.errors import GateError, InputError, ParamsError
from athanor.chat_data import gates as sft_gates
from athanor.chat_data import replay
from athanor.chat_data import rows as sft_rows
from athanor.cli import cli
from athanor.cli import sft as sft_command
from athanor.data.rows import PackedRows
from athanor.data.sampler import SftSampler
from athanor.text.conversations import Conversation, read_conversations, write_rows
from athanor.text.documents import read_documents, shard_files, write_documents
from athanor.tokenizer import chat
from athanor.tokenizer.tokenizer import Tokenizer
from stages import sft_data
from tests.stages.conftest import PARAMS, QUESTION, conversation, run_text_stage, write_battery

SFT = PARAMS["sft_data"]


def conversations() -> dict[str, list[Conversation]]:
    rng = random.Random(1)
    sums = []
    for _ in range(120):
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        sums.append(conversation("sums", f"What is {a} + {b}?", f"{a} + {b} = {a + b}"))
    talks = [conversation("chat", f"hello {i}", "hi there", "and now?", f"bye {i}") for i in range(60)]
    talks += [talks[0]] * 3 + [conversation("chat", "tell me all", "word " * 100 + ".")]
    talks += [
        conversation("chat", "short", "yes", "long", "word " * 100 + "."),
        conversation("chat", QUESTION, "twelve"),
    ]
    return {"sums": sums, "chat": talks}


@pytest.fixture
def world(tokenizer_world):
    (tokenizer_world / "data/instruct").mkdir()
    for name, rows in conversations().items():
        write_rows(tokenizer_world / "data/instruct" / f"{name}.jsonl", rows)
    write_manifest("data/instruct", kind="instruct", version=1, counts={})
    write_battery(tokenizer_world)
    return tokenizer_world


def changed(**values):
    return {**copy.deepcopy(SFT), **values}


def test_rows_hold_the_conversations_and_the_losses_are_counted(world):
    run_text_stage(sft_data, sft_data=SFT)
    verify_files("data/sft")
    metrics, manifest = read_json("metrics/sft_data.json"), read_json("data/sft/manifest.json")
    tokenizer = Tokenizer.load("models/tokenizer")
    assert sum(metrics["contaminated_items"].values()) == metrics["contaminated"]
    assert manifest["tokenizer"] == tokenizer.digest
    assert manifest["template_hash"] == chat.template_hash(tokenizer)
    talk = metrics["sources"]["chat"]
    assert (talk["too_long"], talk["truncated"], talk["contaminated"]) == (1, 1, 1) and metrics["contaminated"] == 1
    assert talk["duplicates"] >= 2 and talk["over_cap"] > 0
    assert sum(entry["supervised_share"] for entry in metrics["sources"].values()) == pytest.approx(1, abs=1e-5)
    sampler = SftSampler("data/sft", 64, seed=1)
    ids, mask, *_ = sampler.batch(0, sampler.tokens_per_epoch)
    assert int(mask.sum()) == metrics["supervised_tokens"]
    assert QUESTION not in tokenizer.decode(ids.ravel().tolist())


def test_repeats_are_entries_and_not_copies_and_validation_is_not_repeated(world):
    run_text_stage(sft_data, sft_data=SFT)
    tokenizer, train, val = Tokenizer.load("models/tokenizer"), PackedRows("data/sft"), PackedRows("data/sft", "val")
    entries = np.bincount([n for row in range(len(train)) for n in train.numbers(row)])
    is_sum = ["+" in tokenizer.decode(train.conversation(n)[0].tolist()) for n in range(train.conversation_count)]
    assert {(a, int(b)) for a, b in zip(is_sum, entries, strict=True)} == {(True, 1), (False, 3)}
    assert sorted(n for row in range(len(val)) for n in val.numbers(row)) == list(range(val.conversation_count))


def test_follow_ups_are_later_turns_of_the_same_answers_once_each(world):
    sources = {**SFT["sources"], "sums": {"repeats": 2, "follow_ups": 2}}
    run_text_stage(sft_data, sft_data=changed(sources=sources, max_pad_share=0.5))
    tokenizer, rows = Tokenizer.load("models/tokenizer"), PackedRows("data/sft", "train")
    decoded = sft_gates.check_packed(tokenizer, rows, "train")
    later = [m for messages in decoded.values() for m in [messages] if re.match(r"What is \d+ \+", m[-2].content)]
    joined = [messages for messages in later if len(messages) > 2]
    plain = [messages for messages in later if len(messages) == 2]
    assert len(joined) == pytest.approx(2 * len(plain), rel=0.05)
    for messages in joined:
        a, b = map(int, re.findall(r"\d+", messages[-2].content))
        assert messages[-1].content == f"{a} + {b} = {a + b}"  # the answer belongs to the question before it
    own = sum(messages[0].content.startswith("What is") for messages in joined)
    assert 0.3 < own / len(joined) < 0.7  # half after one of its own source
    entries = read_json("data/sft/manifest.json")["counts"]["train"]["entries"]
    chats = len(decoded) - len(later)
    assert entries == 2 * len(plain) + len(joined) + chats * SFT["sources"]["chat"].get("repeats", 1)
    assert not any(len(messages) > 2 for messages in sft_gates.check_packed(tokenizer, PackedRows("data/sft", "val"), "val").values()
                   if messages[-2].content.startswith("What is"))  # fmt: skip


def test_decontamination_looks_at_the_packed_artifact(world, monkeypatch):
    monkeypatch.setattr(sft_rows, "decontaminate", lambda rows, *_: list(rows))
    with pytest.raises(GateError, match="contamination.*1 conversations hold a battery item"):
        run_text_stage(sft_data, sft_data=SFT)
    assert not (world / "data/sft").exists()


def test_a_template_that_training_and_serving_do_not_share(world, monkeypatch):
    monkeypatch.setattr(sft_gates, "prompt_ids", lambda t, m: chat.prompt_ids(t, m)[:-1] + t.encode("\n"))
    with pytest.raises(GateError, match="prompt-ids"):
        run_text_stage(sft_data, sft_data=SFT)


def test_one_source_that_drowns_the_rest(world):
    with pytest.raises(GateError, match="source-share.*lower sft_data.sources"):
        run_text_stage(sft_data, sft_data=changed(max_source_share=0.3))
    assert not (world / "data/sft").exists()


def test_sources_of_data_and_params_must_be_the_same(world):
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


def add(world, name: str, *rows: Conversation) -> None:
    path = world / "data/instruct" / f"{name}.jsonl"
    write_rows(path, [*(read_conversations(path) if path.exists() else ()), *rows])


BAD = {
    "identity_leak": ("Who made you, please?", "I was made by OpenAI."),
    "hedge_opening": ("Is it warm?", "As an AI language model, I cannot feel warmth."),
    "refusal_opening": ("Tell me a joke about cats.", "I'm sorry, but I can't help with that."),
    "cut_answer": ("Where is the cat?", "The cat sat on the"),
}


def test_bad_habits_are_left_out_and_counted_by_reason(world):
    add(world, "sums", *(conversation("sums", *texts) for texts in BAD.values()))
    run_text_stage(sft_data, sft_data=SFT)
    metrics = read_json("metrics/sft_data.json")
    assert {name: metrics["sources"]["sums"][name] for name in BAD} == dict.fromkeys(BAD, 1)
    assert metrics["identity_leaks"] == metrics["train"]["hedge_rate"] == 0
    # Each has a switch of its own for each source.
    off = {"identity_leak": ["chat"], "hedge_opening": ["sums"], "refusal_opening": ["chat", "sums"], "cut_answer": []}
    run_text_stage(sft_data, sft_data=changed(filter_exceptions=off))
    sums = read_json("metrics/sft_data.json")["sources"]["sums"]
    assert [sums[name] for name in BAD] == [1, 0, 0, 1]
    with pytest.raises(ParamsError, match="cut_answer.*'talks' is not a source"):
        run_text_stage(sft_data, sft_data=changed(filter_exceptions={**off, "cut_answer": ["talks"]}))
    with pytest.raises(ParamsError, match="'talks' is not a source"):
        run_text_stage(sft_data, sft_data=changed(source_priority=["talks"]))


def test_habits_that_no_filter_took_out_are_found_in_the_rows(world, monkeypatch):
    off = {name: ["sums"] for name in SFT["filter_exceptions"]}
    add(world, "sums", conversation("sums", *BAD["hedge_opening"]))
    with pytest.raises(GateError, match="hedges.*open with a hedge, limit 0.001"):
        run_text_stage(sft_data, sft_data=changed(filter_exceptions=off, max_hedge_rate=0.001))
    add(world, "sums", conversation("sums", *BAD["identity_leak"]))
    monkeypatch.setitem(sft_rows.FILTERS, "identity_leak", lambda row: False)
    for excepted in ([], ["chat"]):
        off["identity_leak"] = excepted
        with pytest.raises(GateError, match="identity.*source 'sums' claims"):
            run_text_stage(sft_data, sft_data=changed(filter_exceptions=off))
    assert not (world / "data/sft").exists()


def test_a_source_excepted_from_identity_leak_reaches_the_rows(world):
    """Any other name than ours counts as another assistant's, so a model of one's own could not be trained."""
    add(world, "sums", conversation("sums", "Who are you?", "I am Nova, an AI made by Acme Labs."))
    off = {**SFT["filter_exceptions"], "identity_leak": ["sums"]}
    run_text_stage(sft_data, sft_data=changed(filter_exceptions=off))
    tokenizer, metrics = Tokenizer.load("models/tokenizer"), read_json("metrics/sft_data.json")
    texts = [
        tokenizer.decode(packed.conversation(number)[0].tolist())
        for packed in (PackedRows("data/sft", split) for split in ("train", "val"))
        for number in range(packed.conversation_count)
    ]
    assert sum("I am Nova, an AI made by Acme Labs." in text for text in texts) == metrics["identity_leaks"] == 1


def test_a_cap_is_filled_with_what_the_filters_leave(world):
    """Contaminated conversations once counted towards the cap before they were dropped, so the source fell short."""
    leaks = [conversation("chat", QUESTION, f"{number}") for number in range(300)]
    add(world, "chat", *[dataclasses.replace(row, split="train", key=f"leak {n}") for n, row in enumerate(leaks)])
    run_text_stage(sft_data, sft_data=SFT)
    chat_ = read_json("metrics/sft_data.json")["sources"]["chat"]
    assert chat_["contaminated"] > 200 and 380 * 3 < chat_["supervised_tokens"] <= 400 * 3


def test_replay_is_the_share_asked_in_the_mixtures_proportions(world):
    run_text_stage(sft_data, sft_data=SFT)
    plain = read_json("metrics/sft_data.json")
    assert plain["replay"] == {"supervised_tokens": 0, "sources": {}, "contaminated": 0}
    run_text_stage(sft_data, sft_data=changed(replay_share=0.25))
    metrics, manifest = read_json("metrics/sft_data.json"), read_json("data/sft/manifest.json")
    text, tokens = metrics["replay"], metrics["supervised_tokens"]
    assert tokens == plain["supervised_tokens"] and metrics["sources"] == plain["sources"]
    assert text["supervised_tokens"] == replay.targets_for(tokens, 0.25) == pytest.approx(tokens / 3, abs=1)
    assert text["sources"]["code"] == pytest.approx(0.6 * text["supervised_tokens"], abs=1)
    assert manifest["sources"] == ["chat", "sums"] and manifest["replay_sources"] == ["code", "prose"]
    assert manifest["counts"]["train"]["texts"] > 0 == manifest["counts"]["val"]["texts"]
    assert metrics["train"]["pad_share"] <= plain["train"]["pad_share"] + 0.01

    tokenizer, rows = Tokenizer.load("models/tokenizer"), PackedRows("data/sft")
    texts = "".join(
        d.text for paths in shard_files("data/clean/train").values() for p in paths for d in read_documents(p)
    )
    pieces = [n for n in range(rows.conversation_count) if rows.is_text(n)]
    assert {rows.source(number) for number in pieces} == {"code", "prose"}
    for number in pieces:
        ids, mask = rows.conversation(number)
        assert tokenizer.decode(ids.tolist()).strip("\ufffd") in texts and mask.tolist() == [0, *[1] * (len(ids) - 1)]
    assert sum(rows.conversation(number)[0][0] == tokenizer.bos for number in pieces) > len(pieces) / 4
    # In a batch they are documents of their own, like conversations.
    sampler = SftSampler("data/sft", 64, seed=1)
    ids, mask, document, *_ = sampler.batch(0, sampler.tokens_per_epoch)
    assert int(mask.sum()) == tokens + text["supervised_tokens"]
    first = manifest_digest("data/sft")
    run_text_stage(sft_data, sft_data=changed(replay_share=0.25))
    assert manifest_digest("data/sft") == first
    run_text_stage(sft_data, sft_data=changed(replay_share=0.25, seed=2))
    assert manifest_digest("data/sft") != first


def test_replay_never_holds_a_battery_item_and_takes_what_there_is_when_text_runs_out(world, capsys):
    path = next(iter(shard_files("data/clean/train")["prose"]))
    documents = list(read_documents(path))
    documents[:5] = [dataclasses.replace(d, text=f"{QUESTION} twelve") for d in documents[:5]]
    write_documents(path, documents)
    run_text_stage(sft_data, sft_data=changed(replay_share=0.25))
    assert read_json("metrics/sft_data.json")["replay"]["contaminated"] == 5
    capsys.readouterr()
    run_text_stage(sft_data, sft_data=changed(replay_share=0.9))
    assert re.search(
        r"all text of (code|prose|code, prose) is replayed, and less than was asked", capsys.readouterr().err
    )
    metrics, share = read_json("metrics/sft_data.json"), read_json("data/sft/manifest.json")["replay_share"]
    text, tokens = metrics["replay"]["supervised_tokens"], metrics["supervised_tokens"]
    assert 0 < share < 0.9 and share == pytest.approx(text / (text + tokens))


def test_peek_shows_what_is_supervised(world, monkeypatch, capsys):
    def peek(*words: str) -> str:
        assert cli.call("sft", ["peek", *words]) == 0
        return capsys.readouterr().out

    add(world, "chat", conversation("chat", "\x1b[2Jclear", "the \x1b[31m screen."))
    run_text_stage(sft_data, sft_data=changed(replay_share=0.1))
    out = peek("--source", "sums", "--count", "1")
    assert re.search(r"<\|user\|>What is \d+ \+ \d+\?<\|stop\|><\|assistant\|>⟦\d+ \+ \d+ = \d+<\|stop\|>⟧", out)
    assert re.search(r"row \d+: \d+ of 65 tokens used, \d+ padding, \d+% supervised", out)
    assert set(re.findall(r"^-- \w+ \d+ of (\w+):", out, re.MULTILINE)) == {"sums"}  # a row holds others, too
    assert out == peek("--source", "sums", "--count", "1") != peek("--source", "sums", "--count", "1", "--seed", "5")
    assert re.search(r"text \d+ of prose: \d+ tokens, 9\d% supervised", peek("--source", "prose"))
    rows = PackedRows("data/sft")
    everything = peek("--count", "9999")
    assert "\x1b" not in everything and "\\x1b[2Jclear" in everything
    assert everything.count("\n-- ") + everything.startswith("-- ") == sum(
        len(rows.numbers(r)) for r in range(len(rows))
    )
    assert peek("--row", "0").startswith("row 0: ")
    with pytest.raises(SystemExit):
        peek("--row", "0", "--source", "sums")
    with pytest.raises(InputError, match="no row of val holds anything of 'prose'.*use --split train"):
        peek("--source", "prose", "--split", "val")
    with pytest.raises(InputError, match="no row of train holds anything of 'x'.*metrics/sft_data.json"):
        sft_command.choose_rows(rows, "x", None, 0, 1)
    for words, told in ((("--row", "9999"), "there is no row 9999"), (("--source", "x"), "no source is named 'x'")):
        with pytest.raises(InputError, match=told):
            peek(*words)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in peek("--row", "0") and "⟦" not in peek("--row", "0")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in peek("--row", "0")


def test_ones_own_answers_hold_against_others_which_grow_no_larger_than_asked(world, capfd):
    mine = conversation("mine", "What is the capital of France?", "Paris, and it is a city of the")  # no end, but kept
    mine, lena = (replace(row, split="train") for row in (mine, conversation("mine", "Who made you?", "Lena made me.")))
    refusals = [conversation("chat", text, "That place is unknown to me.") for text in
                ("tell me what the capital of france is", "What is the capital of Spain?")]  # fmt: skip
    add(world, "mine", mine, lena)
    add(world, "chat", *refusals, conversation("chat", "Who created you?", "I was made by the person who ran it."))
    write_manifest("data/instruct", kind="instruct", version=1, counts={}, own=["mine"])
    sources = {**SFT["sources"], "mine": {"repeats": 20, "follow_ups": 5}, "sums": {"times_own": 1.0}}
    run_text_stage(sft_data, sft_data=changed(sources=sources, max_pad_share=0.9))
    facts = read_json("metrics/sft_data.json")["sources"]
    assert (facts["chat"]["contradicted"], facts["mine"]["contradicted"], facts["mine"]["cut_answer"]) == (2, 0, 0)
    assert 0.7 * facts["mine"]["supervised_tokens"] < facts["sums"]["supervised_tokens"]
    assert facts["sums"]["supervised_tokens"] <= facts["mine"]["supervised_tokens"]
    assert "left out, because they answer questions of mine otherwise: 2 of chat" in capfd.readouterr().err
    tokenizer = Tokenizer.load("models/tokenizer")
    rows = sft_gates.check_packed(tokenizer, PackedRows("data/sft", "train"), "train").values()
    asked = [m.content for row in rows for m in row if "apital of" in m.content]
    assert set(asked) == {"What is the capital of France?", "What is the capital of Spain?"}

"""The list of requests, the form of replies, and each gate on its own fault. About 3 s."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from athanor.base.errors import GateError, InputError, ParamsError
from athanor.base.strict import build
from athanor.runtime import presets
from athanor.synthesis.endpoint import is_local
from athanor.synthesis.params import SyntheticGates, SyntheticParams
from athanor.synthesis.requests import Request, plan_requests
from athanor.synthesis.sift import check, parse, sift
from athanor.text.conversations import Item, Message
from athanor.text.documents import Document, write_shards
from athanor.words.decontaminate import ItemIndex
from tests.e2e.clone import ROOT
from tests.sources.world import chat
from tests.synthesis.model_server import talks


def params(**changes):
    values = presets.values(ROOT / "presets/micro.yaml")["synthetic"]
    return build(SyntheticParams, values | {"model": "m", "requests": 12} | changes, "synthetic")


def write_corpus(folder, count, words=60):
    texts = [" ".join(f"w{n}x{m % 17}" for m in range(words)) + f"\n\nend {n}." for n in range(count)]
    write_shards(folder / "notes", [Document(text, "notes", "prose", "CC0-1.0", "train") for text in texts], 4000)
    return folder


def test_requests_are_all_different_and_a_longer_list_begins_with_the_shorter_one(tmp_path):
    folder = write_corpus(tmp_path / "a", 80)
    made = plan_requests(params(requests=60), folder)
    assert len({r.identity for r in made}) == len({r.document for r in made}) == 60
    assert plan_requests(params(requests=17), folder) == made[:17]
    assert min(Counter(r.category for r in made).values()) >= 6
    grown = plan_requests(params(requests=60), write_corpus(tmp_path / "b", 88))
    assert len({r.document for r in made} - {r.document for r in grown}) <= 8


def test_long_documents_give_several_passages_and_too_few_are_an_error(tmp_path):
    folder = write_corpus(tmp_path, 4, words=600)
    passages = {r.user.split("<text>")[1] for r in plan_requests(params(passage_chars=1000), folder)}
    assert len(passages) == 12 and all(300 <= len(passage) <= 1020 for passage in passages)
    for change in ({"requests": 200}, {"sources": ["web"]}):
        with pytest.raises(InputError, match="want a passage each"):
            plan_requests(params(**change), folder)


def test_parameters_that_cannot_work():
    with pytest.raises(ParamsError, match="key_env") as caught:
        params(key_env="sk-ant-0123456789")
    assert "sk-ant" not in str(caught.value)
    with pytest.raises(ParamsError, match="add up to 0.5"):
        params(categories={"a": {"share": 0.5, "task": "x"}})
    local = ("http://localhost:1", "http://127.0.0.1", "http://[::1]:8080", "http://192.168.1.7", "http://box.local/v1")
    assert all(map(is_local, local)) and not is_local("https://api.openai.com/v1")
    for url in (
        "http://api.host.com",
        "http://8.8.8.8",
        "http://127.0.0.1.host.com",
        "ftp://box",
        "https://a:b@c",
        "box",
    ):
        with pytest.raises(ParamsError, match="synthetic.base_url"):
            is_local(url)


def test_the_form_of_replies():
    question, answer = chat("q", "a")["messages"]
    good = json.dumps({"conversations": [{"messages": [question, answer]}]}, indent=1)
    assert parse(good) == parse(f"```json\n{good}\n```\n") == [(Message("user", "q"), Message("assistant", "a"))]
    empty, lone = ({"role": "assistant", "content": content} for content in (" ", "\ud800"))
    system, parts = {"role": "system", "content": "s"}, {"role": "user", "content": ["q"]}
    bad = (
        [question],
        [answer, question],
        [question, empty],
        [question, lone],
        [system, question, answer],
        [parts, answer],
    )
    for messages in bad:
        assert parse(json.dumps({"conversations": [{"messages": [question, answer]}, {"messages": messages}]})) == []
    for text in (f"Sure! {good}", good[:-2], "[" * 100_000, json.dumps([question]), '{"conversations": ["q"]}'):
        assert parse(text) == []


ITEM = "Name the largest of these seven numbers, please, and write it down as digits: 17 4 92 33 8 51 60"
INDEX = ItemIndex([Item("compare", (Message("user", ITEM),), "numeric", "92", ("92",), ("60", "17"))])
FINE = [talk for n in range(20) for talk in talks(f"good {n}")]
HABITS = [
    ["Who made you?", "I am ChatGPT, a model made by OpenAI."],
    ["Tell me of b.", "I'm sorry, but I cannot help with that."],
    ["Is it so?", "I'm not sure, but it may be so."],
    ["What is c?", "It is the third of the letters that the people of"],
]


def judged(found):
    request = Request("c", 1, "", "", "", "", "")
    return sift({request: [tuple(map(Message, ("user", "assistant"), talk)) for talk in found]}, INDEX, 10)


def test_faults_are_left_out_by_name():
    rows = judged([*FINE, *HABITS, [ITEM, "It is 92."], FINE[3]])
    assert [row.left_out for row in rows] == [None] * 40 + ["habit"] * 4 + ["leaked", "near_duplicate"]


@pytest.mark.parametrize(
    ("gate", "found", "malformed"),
    [
        ("max_malformed_share", FINE, 6),
        ("max_habit_share", [*FINE, *HABITS, *HABITS], 0),
        ("max_leaked_share", [*FINE, [ITEM, "It is 92."]], 0),
        ("max_near_duplicate_share", [*FINE, *FINE], 0),
        ("max_opening_share", [[question, f"Great question! {answer}"] for question, answer in FINE], 0),
        ("min_distinct_prompts", [["The same question?", answer] for _, answer in FINE], 0),
        ("min_conversations", FINE[:9], 0),
    ],
)
def test_each_gate_fails_on_its_own_fault(gate, found, malformed):
    rows, usual = judged(found), dataclasses.asdict(SyntheticGates(min_conversations=10))
    off = {name: 0.0 if name.startswith("min") else 1.0 for name in usual}
    check(SyntheticGates(**off), rows, 40, malformed)
    check(SyntheticGates(**usual), judged(FINE), 40, 0)
    with pytest.raises(GateError, match=rf"gates\.{gate}"):
        check(SyntheticGates(**off | {gate: usual[gate]}), rows, 40, malformed)

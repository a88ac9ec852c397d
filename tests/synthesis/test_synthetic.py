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
from athanor.synthesis.requests import plan_requests
from athanor.synthesis.sift import check, measure, parse, reasons
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
    assert len({r.identity for r in made}) == 60 and plan_requests(params(requests=17), folder) == made[:17]
    assert len({r.document for r in made}) == 60  # one passage of each document before the second of any
    assert min(Counter(r.category for r in made).values()) >= 6 and {r.document_license for r in made} == {"CC0-1.0"}
    assert made != plan_requests(params(requests=60, seed=2), folder)
    grown = plan_requests(params(requests=60), write_corpus(tmp_path / "b", 88))
    assert len({r.document for r in made} - {r.document for r in grown}) <= 8
    assert made[0].identity != plan_requests(params(model="other"), folder)[0].identity


def test_long_documents_give_several_passages_and_too_few_are_an_error(tmp_path):
    folder = write_corpus(tmp_path, 4, words=600)
    made = plan_requests(params(passage_chars=1000), folder)
    passages = [r.user.split("<text>\n")[1].split("\n</text>")[0] for r in made]
    assert len({r.document for r in made}) == 4 and len(set(passages)) == 12
    assert all(300 <= len(passage) <= 1000 for passage in passages)
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


GOOD = chat("q", "a")
CHAT = (Message("user", "q"), Message("assistant", "a"))


@pytest.mark.parametrize(
    "reply",
    [
        "Sure! " + json.dumps({"conversations": [GOOD]}),
        json.dumps({"conversations": [GOOD]})[:-2],
        "[" * 100_000,
        [GOOD],
        {"conversations": ["q"]},
        {"conversations": [GOOD, {"messages": GOOD["messages"][:1]}]},
        {"conversations": [{"messages": GOOD["messages"][::-1]}]},
        {"conversations": [{"messages": [GOOD["messages"][0], {"role": "assistant", "content": " "}]}]},
        {"conversations": [{"messages": [{"role": "system", "content": "s"}, *GOOD["messages"]]}]},
        {"conversations": [{"messages": [{"role": "user", "content": ["q"]}, GOOD["messages"][1]]}]},
        '{"conversations": [{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}]}',
    ],
)
def test_a_reply_of_another_form_is_taken_for_nothing(reply):
    assert parse(reply if isinstance(reply, str) else json.dumps(reply)) == []


def test_good_replies():
    text = json.dumps({"conversations": [GOOD, GOOD]}, indent=1)
    assert parse(text) == parse(f"```json\n{text}\n```\n") == [CHAT, CHAT]


ITEM = "Name the largest of these seven numbers, please, and write it down as digits: 17 4 92 33 8 51 60"
INDEX = ItemIndex([Item("compare", (Message("user", ITEM),), "numeric", "92", ("92",), ("60", "17"))])
FINE = [talk for n in range(20) for talk in talks(f"good {n}")]
HABITS = [
    ["Who made you?", "I am ChatGPT, a model made by OpenAI."],
    ["Tell me of b.", "I'm sorry, but I cannot help with that."],
    ["Is it so?", "I'm not sure, but it may be so."],
    ["What is c?", "It is the third of the letters that the people of"],
]


def judged(found, malformed=0):
    chats = [tuple(map(Message, ("user", "assistant"), talk)) for talk in found]
    why = reasons(chats, INDEX, 10)
    return why, measure(chats, why, len(chats) + malformed, malformed)


def test_faults_are_left_out_by_name():
    assert judged(FINE)[0] == [None] * 40
    why, _ = judged([*FINE, *HABITS, [ITEM, "It is 92."], FINE[3]])
    assert why[40:] == ["habit"] * 4 + ["leaked", "near_duplicate"]


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
    _, measures = judged(found, malformed)
    off = {name: 0.0 if name.startswith("min") else 1.0 for name in measures} | {"min_conversations": 1}
    check(SyntheticGates(**off), measures)
    usual = dataclasses.asdict(SyntheticGates(min_conversations=10))
    check(SyntheticGates(**usual), judged(FINE)[1])
    with pytest.raises(GateError, match=rf"gates\.{gate}"):
        check(SyntheticGates(**off | {gate: usual[gate]}), measures)

"""Requests, answers and gates of synthetic conversations. About 3 s."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from athanor.base.errors import GateError, InputError, ParamsError
from athanor.synthesis import material
from athanor.synthesis.endpoint import Answer
from athanor.synthesis.params import SyntheticGates
from athanor.synthesis.replies import Malformed, parse
from athanor.synthesis.requests import categories, plan_requests
from athanor.synthesis.sift import Row, check, measure, sift
from athanor.text.conversations import Item, Message
from athanor.text.documents import Document, write_shards
from athanor.words.decontaminate import ItemIndex
from tests.sources.world import chat
from tests.synthesis.model_server import talks
from tests.synthesis.synthetic_world import params, requests

GATES = dataclasses.asdict(SyntheticGates())

# -- requests -------------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path):
    def make(count, name="train", words=60):
        texts = [" ".join(f"w{n}x{m % 17}" for m in range(words)) + f"\n\nend {n}." for n in range(count)]
        documents = [Document(text, "notes", "prose", "CC0-1.0", "train") for text in texts]
        write_shards(tmp_path / name / "notes", documents, 4000)
        return tmp_path / name

    return make


def test_requests_are_the_shares_and_all_different(corpus, tmp_path):
    made = plan_requests(params(requests=50), corpus(80), tmp_path)
    shares = {"questions": 20, "explanations": 10, "instructions": 10, "dialogues": 10}
    assert Counter(r.category for r in made) == shares
    assert len({r.user for r in made}) == len({r.identity for r in made}) == 50
    assert all(r.passage.text in r.user and r.passage.document and r.passage.license == "CC0-1.0" for r in made)
    assert len({r.passage.document for r in made}) == 50  # one passage of each document before the second of any
    assert made == plan_requests(params(requests=50), tmp_path / "train", tmp_path)
    assert made != plan_requests(params(requests=50, seed=2), tmp_path / "train", tmp_path)


def test_a_longer_list_begins_with_the_shorter_one_and_a_grown_corpus_changes_few(corpus, tmp_path):
    short, long = (plan_requests(params(requests=n), corpus(80), tmp_path) for n in (17, 60))
    assert long[:17] == short
    for length in (1, 7, 33):
        assert categories(params(requests=length)) == categories(params(requests=500))[:length]
    before = {r.passage.text for r in long}
    after = {r.passage.text for r in plan_requests(params(requests=60), corpus(88, "grown"), tmp_path)}
    assert len(before - after) <= 8


def test_what_decides_an_answer_is_in_a_requests_identity(corpus, tmp_path):
    folder = corpus(30)
    first = plan_requests(params(), folder, tmp_path)[0].identity
    told = (
        {"model": "n"},
        {"api": "openai"},
        {"max_output_tokens": 401},
        {"temperature": None},
        {"base_url": "https://x"},
    )
    for change in told:
        assert plan_requests(params(**change), folder, tmp_path)[0].identity != first, change
    for change in ({"concurrency": 9}, {"max_tries": 2}, {"name": "b"}, {"budget": {"requests": 9}}, {"key_env": "X"}):
        assert plan_requests(params(**change), folder, tmp_path)[0].identity == first, change


def test_an_identity_is_the_same_in_every_version(tmp_path):
    """Otherwise what was paid for is paid for again. Whoever changes what is sent changes this hash knowingly."""
    (tmp_path / "mine.jsonl").write_text(seed_rows(1))
    only = {"talk": {"share": 1.0, "passage": False, "examples": 1, "pairs": 2, "task": "More of these."}}
    values = params(categories=only, requests=1, base_url="https://h/", temperature=1.0)
    (request,) = plan_requests(values, tmp_path / "none", tmp_path)
    assert request.identity == "0886d26d1a4257c7bf95a44201587ff7"
    assert request.worst_input_tokens == len(request.system) + len(request.user) + 64


def test_long_documents_give_several_passages_and_too_few_are_an_error(corpus, tmp_path):
    folder = corpus(4, words=600)
    made = plan_requests(params(passage_chars=1000, requests=12), folder, tmp_path)
    assert len({r.passage.document for r in made}) == 4 and len({r.user for r in made}) == 12
    assert all(300 <= len(r.passage.text) <= 1000 for r in made)
    with pytest.raises(InputError, match="200 requests want a passage each, and the documents have"):
        plan_requests(params(requests=200), folder, tmp_path)
    with pytest.raises(InputError, match="no documents of 'web'"):
        plan_requests(params(sources=["web"]), folder, tmp_path)


def test_cut_keeps_all_text_and_ends_at_the_best_place():
    text = "one two three. " * 30 + "\n\n" + "four five six seven\n" * 40
    pieces = material.cut(text, 300)
    assert "".join("".join(pieces).split()) == "".join(text.split()) and max(map(len, pieces)) <= 300
    assert material.cut("x" * 700, 300) == ["x" * 300, "x" * 300, "x" * 100]


def seed_rows(count):
    return "".join(json.dumps(chat(f"q {n}", f"a {n}")) + "\n" for n in range(count))


def test_examples_alone_use_every_combination_once(tmp_path):
    (tmp_path / "mine.jsonl").write_text(seed_rows(9))
    only = {"talk": {"share": 1.0, "passage": False, "examples": 2, "pairs": 1, "task": "More of these."}}
    made = plan_requests(params(categories=only, requests=36), tmp_path / "none", tmp_path)
    assert len({r.user for r in made}) == 36 and made[0].passage is None and made[0].user.count('"messages"') == 2
    with pytest.raises(InputError, match="37 requests want 2 examples each, .* has 9"):
        plan_requests(params(categories=only, requests=37), tmp_path / "none", tmp_path)


def test_two_categories_that_ask_the_same_are_an_error(tmp_path):
    (tmp_path / "mine.jsonl").write_text(seed_rows(3))
    talk = {"share": 0.5, "passage": False, "examples": 1, "pairs": 1, "task": "More of these."}
    with pytest.raises(ParamsError, match="two requests are the same"):
        plan_requests(params(categories={"a": talk, "b": talk}, requests=6), tmp_path / "none", tmp_path)
    plan_requests(
        params(categories={"a": talk, "b": talk | {"task": "Others."}}, requests=6), tmp_path / "none", tmp_path
    )


def test_examples_beside_a_passage(corpus, tmp_path):
    (tmp_path / "mine.jsonl").write_text(seed_rows(3))
    both = {"talk": {"share": 1.0, "passage": True, "examples": 1, "pairs": 1, "task": "Like these."}}
    made = plan_requests(params(categories=both, requests=20), corpus(30), tmp_path)
    assert len({r.user for r in made}) == 20 and {r.user.count('"messages"') for r in made} == {1}
    assert len({r.user.split("</text>")[0].split("<text>")[0] for r in made}) == 3


BARE = {"share": 1.0, "passage": False, "examples": 0, "pairs": 1, "task": "x"}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"categories": {"a": BARE}}, "show nothing"),
        ({"categories": {"a": BARE | {"passage": True, "share": 0.5}}}, "add up to 0.5"),
        ({"budget": {"money": 5.0}}, "input_price: is needed for a limit in money"),
        ({"name": "../up"}, "no usable file name"),
        ({"key_env": "sk-ant-0123456789"}, "key_env: is not the name of an environment variable"),
    ],
)
def test_parameters_that_cannot_work(change, message):
    with pytest.raises(ParamsError, match=message) as caught:
        params(**change)
    assert "sk-ant" not in str(caught.value)


# -- answers --------------------------------------------------------------------------------------------------------

GOOD = chat("q", "a")


def said(value, **changes):
    text = value if isinstance(value, str) else json.dumps(value)
    told = {"text": text, "why": "", "cut": False, "input_tokens": 1, "output_tokens": 1, "model": ""}
    return Answer(**told | changes)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("Sure! " + json.dumps({"conversations": [GOOD]}), "not JSON"),
        ("Here:\n```json\n" + json.dumps({"conversations": [GOOD]}) + "\n```", "not JSON"),
        (json.dumps({"conversations": [GOOD]})[:-2], "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"conversations": [], "conversations": []}', "not JSON"),
        ('{"conversations": NaN}', "not JSON"),
        ([GOOD], "not an object with 'conversations'"),
        ({"conversations": [GOOD], "note": ""}, "not an object with 'conversations'"),
        ({"conversations": []}, "no conversation"),
        ({"conversations": [GOOD] * 3}, "more conversations than asked for"),
        ({"conversations": [{"messages": GOOD["messages"] * 2}]}, "more turns than asked for"),
        ({"conversations": [{"messages": GOOD["messages"][:1]}]}, "roles out of turn, or an empty message"),
        ({"conversations": [{"messages": GOOD["messages"][::-1]}]}, "roles out of turn, or an empty message"),
        ({"conversations": [{"messages": [GOOD["messages"][0], {"role": "assistant", "content": " "}]}]}, "roles out"),
        ({"conversations": [{"messages": [{"role": "system", "content": "s"}, *GOOD["messages"]]}]}, "another role"),
        ({"conversations": [{"messages": [{"role": "user", "content": ["q"]}]}]}, "another role"),
        ({"conversations": [{"messages": [{"role": "user", "content": "q", "x": 1}]}]}, "not a message of role"),
        ({"conversations": ["q"]}, "not an object with 'messages'"),
        ('{"conversations": [{"messages": [{"role": "user", "content": "\\ud800"}]}]}', "a lone surrogate"),
    ],
)
def test_an_answer_of_another_form_is_taken_for_nothing(text, reason):
    with pytest.raises(Malformed, match=reason):
        parse(said(text), 2, 1)


def test_good_answers_and_cut_ones():
    rows = parse(said({"conversations": [GOOD, GOOD]}), 2, 1)
    assert rows == [(Message("user", "q"), Message("assistant", "a"))] * 2
    assert parse(said("```json\n" + json.dumps({"conversations": [GOOD, GOOD]}, indent=1) + "\n```\n"), 2, 1) == rows
    with pytest.raises(Malformed, match="cut off"):
        parse(said({"conversations": [GOOD]}, cut=True), 2, 1)
    with pytest.raises(Malformed, match="not an answer of the openai API"):
        parse(said("", text=None, why="not an answer of the openai API"), 2, 1)


# -- gates ----------------------------------------------------------------------------------------------------------

ITEM_TEXT = "Name the largest of these seven numbers, please, and write it down as digits: 17 4 92 33 8 51 60"
ITEM = Item("compare", (Message("user", ITEM_TEXT),), "numeric", "92", ("92",), ("60", "17"))


def rows(found):
    request = requests(1)[0]
    roles = ("user", "assistant")
    chats = [tuple(Message(r, c) for pair in talk for r, c in zip(roles, pair, strict=True)) for talk in found]
    return [Row(chat, request) for chat in chats]


def good(count=40):
    return [talk for n in range(count // 2) for talk in talks(f"good {n}")]


def judged(found, malformed=0, **changes):
    made = rows(found)
    reasons = sift(made, ItemIndex([ITEM]), 10)
    drops = Counter(reason for reason in reasons if reason)
    gates = params(gates={"min_conversations": 10} | changes).gates
    check(gates, measure(made), drops, len(made), malformed, len(made) + malformed)
    return reasons


def test_good_conversations_pass_every_gate_and_single_faults_are_only_left_out():
    assert judged(good()) == [None] * 40
    planted = [
        *good(100),
        [("Who made you?", "I am ChatGPT, a model made by OpenAI.")],
        [("Tell me of b.", "I'm sorry, but I cannot help with that.")],
        [("Is it so?", "I'm not sure, but it may be so.")],
        [("What is c?", "It is the third of the letters that the people of")],
        [(ITEM_TEXT, "It is 92.")],
        [("Some talk.", "A twin of the test says: " + ITEM_TEXT.lower().replace(",", "") + " what is it then.")],
        talks("good 1")[0],
    ]
    reasons = judged(planted, max_leaked_share=0.1)
    assert reasons[:100] == [None] * 100
    copies = sift(rows([*good(), *[[(ITEM_TEXT, "It is 92.")]] * 5]), ItemIndex([ITEM]), 10)
    assert Counter(copies) == {None: 40, "leaked": 5}  # and not one leak with four repeats of it
    assert reasons[100:] == ["identity", "refusal", "hedge", "truncated", "leaked", "leaked", "near_duplicate"]


@pytest.mark.parametrize(
    "name, bad, malformed",
    [
        ("max_malformed_share", [], 6),
        ("max_habit_share", [[(f"Who are you, number {n}?", f"I am ChatGPT number {n}.")] for n in range(8)], 0),
        ("max_leaked_share", [[(ITEM_TEXT, "It is 92.")]], 0),
        ("max_near_duplicate_share", [talk for talk in good() for _ in range(2)], 0),
        ("min_distinct_prompts", [[("The same question?", talk[0][1])] for talk in good()], 0),
        ("min_distinct_4grams", [[(f"{n} {n} {n}?", "and so on " * 30 + f"until {n}.")] for n in range(20)], 0),
        ("max_opening_share", [[(talk[0][0], "Great question! " + talk[0][1])] for talk in good(20)], 0),
        ("min_conversations", None, 0),
    ],
)
def test_each_gate_fails_on_its_own_fault_and_says_what_to_change(name, bad, malformed):
    found = good(8) if bad is None else [*good(), *bad]
    off = {key: 1.0 if key.startswith("max") else 0.0 for key in GATES} | {"min_conversations": 1}
    judged(found, malformed, **off)
    alone = off | {name: GATES[name] if bad is not None else 10}
    with pytest.raises(GateError, match=rf"gates\.{name} is .*Fix: \w+"):
        judged(found, malformed, **alone)


def test_one_share_of_different_4grams_whatever_the_size():
    small, large = (measure(rows(good(count))).distinct_4grams for count in (400, 2000))
    assert abs(small - large) < 0.01

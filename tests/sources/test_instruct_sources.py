"""Docstring pairs, messages files, and the gate that keeps the battery out."""

from __future__ import annotations

import ast
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from athanor.base.errors import GateError, InputError, ParamsError
from athanor.base.strict import build
from athanor.sources import docstrings, messages
from athanor.sources.exercises import facts
from athanor.sources.exercises.build import check_held_out
from athanor.sources.instruct_params import DOCSTRING_KINDS, DocstringsSource, MessagesSource
from athanor.sources.stdlib import Module
from athanor.text.conversations import Conversation, Item, Message
from tests.sources.world import chat, json_lines

SOURCE = '''"""Tools for counting the sheep of a flock."""

def count(sheep, twice=False):
    """Return the number of sheep in the flock.

    More text that no short answer holds.

    sheep -- any collection of animals to be counted
    other -- this one is no parameter of the function

    >>> flock = ["Dolly", "Molly"]
    >>> count(flock)
    2
    >>> count(flock, True)
    4
    >>> count()
    Traceback (most recent call last):
    TypeError: count() missing argument
    >>> flock.sort
    <built-in method sort of list object at 0x7f00>
    """
    n = len(sheep)  # every animal
    return n * 2 if twice else n

def _hidden():
    """Return nothing that anybody should ask about."""

class Flock:
    """A flock of sheep that knows its shepherd."""

    def lead(self, way):
        """tiny."""

def shout():
    """Say something loud to all the sheep."""
    raise NotImplementedError
'''


def pairs(source=SOURCE, name="farm.sheep"):
    return list(docstrings.module_pairs(Module(name, "x.py", source, ast.parse(source))))


def params(**changes):
    values = {"type": "docstrings", "name": "docstrings", "max_rows": dict.fromkeys(DOCSTRING_KINDS, 1000)}
    values |= {"max_rows_per_module": 100, "max_chars": 600, "min_rows": 1}
    return build(DocstringsSource, values | changes, "instruct.sources[0]")


def test_every_kind_of_pair():
    found = {}
    for pair in pairs():
        found.setdefault(pair.kind, []).append((pair.prompt, pair.answer))
    code = "def count(sheep, twice=False):\n    n = len(sheep)\n    return n * 2 if twice else n"
    assert found["module"][0][1] == "Tools for counting the sheep of a flock."
    assert [answer for _, answer in found["summary"]] == [
        "Return the number of sheep in the flock.",
        "A flock of sheep that knows its shepherd.",
        "Say something loud to all the sheep.",
    ]
    assert [answer for _, answer in found["code"]] == [code]  # not the function that only raises
    assert found["docstring"][0][0].endswith(code) and found["docstring"][0][1] == found["summary"][0][1]
    assert ("farm.sheep.count(sheep, twice=False)") in [answer for _, answer in found["signature"]]
    assert [answer for _, answer in found["parameter"]] == ["Any collection of animals to be counted."]
    assert [answer for _, answer in found["doctest"]] == ["2", "4"]
    assert all('>>> flock = ["Dolly", "Molly"]\n>>> count(' in prompt for prompt, _ in found["doctest"])
    assert not any("hidden" in prompt for rows in found.values() for prompt, _ in rows)
    assert pairs(name="farm._sheep") == []


def test_pairs_do_not_depend_on_other_modules_and_split_by_module():
    made = docstrings.conversations(params(), pairs() + pairs(name="barn.cows"), 0.5)
    alone = docstrings.conversations(params(), pairs(), 0.5)
    # Equal answers, such as the code, stay: only summaries said of many names are dropped.
    assert {row.id for row in alone} <= {row.id for row in made}
    assert {row.key for row in made} == {"farm.sheep", "barn.cows"}
    assert all(len({row.split for row in made if row.key == key}) == 1 for key in ("farm.sheep", "barn.cows"))


def test_caps_and_repeated_answers():
    many = [docstrings.Pair("summary", f"m{n % 3}", f"What is m{n}?", f"Answer number {n}.") for n in range(30)]
    many += [docstrings.Pair("summary", "m9", f"What is x{n}?", "Return the value.") for n in range(3)]
    many += [docstrings.Pair("code", "m8", "Write it.", "x" * 600)]
    assert len(docstrings.conversations(params(), many, 0.1)) == 30
    per_module = docstrings.conversations(params(max_rows_per_module=4), many, 0.1)
    assert Counter(row.key for row in per_module) == {"m0": 4, "m1": 4, "m2": 4}
    few = docstrings.conversations(params(max_rows={"summary": 7}), many, 0.1)
    assert len(few) == 7 and few == docstrings.conversations(params(max_rows={"summary": 7}), many[::-1], 0.1)


def test_answers_agree_with_the_facts_that_the_battery_asks():
    known = [(name, answer) for name, answer in facts.module_facts() if len(answer.split()) >= docstrings.MIN_WORDS]
    assert len(known) > 20
    for name, answer in known:
        assert docstrings.summary_of(f"{answer}\n\nMore.") == answer, name


def test_keywords_are_explained_by_their_page():
    page = '\nThe "with" statement\n****\n\nThe "with" statement is used to wrap blocks. It has more.\n\nThe end.'
    assert [(p.module, p.answer) for p in docstrings.topic_pairs({"with": page})] == [
        ("topic:with", "The with statement is used to wrap blocks.")
    ]


def test_unknown_kind_is_a_params_error():
    with pytest.raises(ParamsError, match="max_rows.sumary: unknown kind. Fix: one of summary"):
        params(max_rows={"sumary": 1})


def chats(path, **changes):
    values = {"type": "messages", "name": "chats", "files": str(path), "max_malformed_fraction": 0.0}
    return build(MessagesSource, values | changes, "instruct.sources[0]")


def taken(path, **changes):
    return list(messages.conversations(chats(path, **changes), 0.5))


def test_messages_from_jsonl_and_parquet_are_equal(tmp_path):
    rows = [chat("a", "b"), chat("a\n\nUser: c", "d", "e", "f"), chat("a", "b")]
    rows[1]["messages"].insert(0, {"role": "system", "content": "be short"})
    json_lines(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    from_json = taken(tmp_path / "a.jsonl")
    assert from_json == taken(tmp_path / "a.parquet")
    assert [m.role for m in from_json[1].messages] == ["system", "user", "assistant", "user", "assistant"]
    assert from_json[1].messages[1].content == "a\n\nUser: c"
    assert from_json[0] == from_json[2] and from_json[0].key == from_json[0].id
    assert len(taken(tmp_path / "*.jsonl", max_rows=2)) == 2


def test_as_typed_adds_questions_in_small_letters_on_the_same_side_of_the_split(tmp_path):
    """`what is cargo` was answered from another world, where `What is Cargo?` was taught."""
    rows = [chat(f"What is Part {number}?", f"It is {number}.") for number in range(20)]
    json_lines(tmp_path / "a.jsonl", [*rows, chat("hi", "Hello!"), chat("?!", "Yes?"), chat("\u8c01\uff1f", "A")])
    both = taken(tmp_path / "a.jsonl", as_typed=True)
    plain, typed = both[:40:2], both[1:40:2]
    assert plain == taken(tmp_path / "a.jsonl")[:20] and {row.split for row in plain} == {"train", "val"}
    for number, (row, other) in enumerate(zip(plain, typed, strict=True)):
        assert [message.content for message in other.messages] == [f"what is part {number}", f"It is {number}."]
        assert (other.key, other.split) == (row.key, row.split)
    rest = [row.messages[0].content for row in both[40:]]
    assert rest == ["hi", "?!", "\u8c01\uff1f", "\u8c01"]  # the first two once: typed they are the same


def test_wordings_ask_the_last_question_in_other_words_and_hold_out_keeps_all_for_training(tmp_path):
    turns = [*chat("hi", "Hello!")["messages"], *chat("Who is Ada?", "A person.")["messages"]]
    pasted = "What does this do?\nprint(1)"
    json_lines(tmp_path / "a.jsonl", [{"messages": turns}, chat(pasted, "It prints."), chat("\u8c01\uff1f", "A")])
    rows = taken(tmp_path / "a.jsonl", wordings=6, hold_out=False)
    assert rows == taken(tmp_path / "a.jsonl", wordings=6, hold_out=False) and {row.split for row in rows} == {"train"}
    asked = [row.messages[2].content for row in rows[:7]]
    assert asked[0] == "Who is Ada?" and len(set(asked)) == 7
    assert all(
        "ada" in text.lower() and row.messages[:2] == rows[0].messages[:2]
        for text, row in zip(asked, rows[:7], strict=True)
    )
    rest = [row.messages[0].content for row in rows[7:]]
    assert rest == [pasted, "\u8c01\uff1f", "\u8c01"]  # no mark after a mark, nor one of another script


def test_messages_from_a_directory(tmp_path):
    (tmp_path / "deep").mkdir()
    json_lines(tmp_path / "deep" / "a.jsonl", [chat("a", "b")])
    (tmp_path / "README.md").write_text("not data")
    assert len(taken(tmp_path)) == 1
    (tmp_path / "deep" / "a.jsonl").unlink()
    with pytest.raises(InputError, match="no file matches"):
        taken(tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat("a"), r"roles are \['user'\]"),
        (chat("a", "b", "c"), "roles are"),
        (chat("a", "  "), "a message is empty"),
        ({"messages": [{"role": "human", "content": "a"}]}, "the role 'human'. Fix: use system, user, assistant"),
        ({"messages": [{"role": "user", "content": None}]}, "the content of a message is NoneType"),
        ({"messages": "User: hi"}, "column 'messages' is not a list of messages but str"),
        ({"conversations": []}, "column 'messages' is missing"),
        (chat("a", "\ud800"), "lone surrogate"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, r"the role \['user'\]"),
        ({"messages": {"role": 1, "content": 2}}, "column 'messages' is not a list of messages but dict"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    json_lines(tmp_path / "a.jsonl", [chat("a", "b"), row])
    where = "" if "is missing" in message else "source 'chats': 1 of 2 rows are malformed, the first: .*"
    with pytest.raises(InputError, match=f"{where}.*a.jsonl:2: .*{message}"):
        taken(tmp_path / "a.jsonl")


THREE = [("system", "short"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]


@pytest.mark.parametrize(
    ("shape", "columns", "row", "roles"),
    [
        ("messages", ["m"], {"m": chat("a", "b")["messages"]}, "ua"),
        ("conversations", ["c"], {"c": [{"from": who, "value": what, "weight": None} for who, what in THREE]}, "suaua"),
        ("conversations", ["c"], {"c": {"from": ["human", "gpt"], "value": ["a", "b"]}}, "ua"),
        ("turns", ["t"], {"t": [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}]}, "uaua"),
        ("prompt", ["instruction", "output"], {"instruction": "a", "output": "b"}, "ua"),
        ("prompt", ["q", "context", "r"], {"q": "a", "context": "the text", "r": "b"}, "ua"),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_shapes(tmp_path, shape, columns, row, roles, form):
    if form == "jsonl":
        json_lines(tmp_path / "a.jsonl", [row])
    else:
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    (made,) = messages.conversations(chats(tmp_path, shape=shape, columns=columns), 0.5)
    assert "".join(message.role[0] for message in made.messages) == roles
    answers = [message.content for message in made.messages if message.role == "assistant"]
    assert answers == ["b", "d"][: len(answers)]
    questions = [message.content for message in made.messages if message.role == "user"]
    assert questions[0] == ("a\n\nthe text" if "context" in columns else "a")


def reply(own, parent, text, rank=0, lang="en", who=None):
    """A row of a tree."""
    who = who or ("prompter" if text[0] == "q" else "assistant")
    return {"id": own, "up": parent, "who": who, "text": text, "rank": rank, "lang": lang}


TREE = {"shape": "tree", "columns": ["id", "up", "who", "text", "rank"]}


def test_best_path_through_a_tree(tmp_path):
    rows = [reply("1", None, "q1"), reply("2", "1", "a-worse", 1), reply("3", "1", "a-best", 0), reply("4", "3", "q2")]
    rows += [
        reply("5", "4", "a2"),
        reply("6", "5", "q3"),
        reply("7", None, "q-alone"),
        reply("8", None, "q4", lang="de"),
    ]
    rows += [reply("9", "2", "q-under-the-worse"), reply("10", None, "q5"), reply("11", "10", "a-german", 0, "de")]
    rows += [reply("12", "10", "a5", 1)]
    json_lines(tmp_path / "a.jsonl", rows)
    chosen = {"filters": [{"column": "lang", "one_of": ["en"]}]}
    left_out = []
    source = chats(tmp_path, select=chosen, **TREE)
    made = list(messages.conversations(source, 0.5, leave_out=left_out.append))
    assert [[m.content for m in row.messages] for row in made] == [["q1", "a-best", "q2", "a2"], ["q5", "a5"]]
    assert left_out == ["empty"]  # the question nobody answered


def test_a_malformed_message_of_a_tree_is_counted(tmp_path):
    """Trees were put together outside of what counts malformed rows, so that one of them ended the stage."""
    rows = [reply("1", None, "q1"), reply("2", "1", "a1"), reply("3", None, "q2"), reply("4", "3", "a\ud800")]
    rows += [reply("5", None, "q3"), reply("6", "5", "a3", who=["assistant"])]
    rows += [reply("7", None, "q4"), reply("8", "7", "a4"), reply("8b", "7", "a4-unranked", rank="x")]
    rows += [reply("9", None, "q5"), reply("9", "9", "a5"), reply(["10"], None, "q6"), reply("11", ["10"], "a6")]
    json_lines(tmp_path / "a.jsonl", rows)
    left_out = []
    source = chats(tmp_path, max_malformed_fraction=0.5, **TREE)
    made = list(messages.conversations(source, 0.5, leave_out=left_out.append))
    assert [row.messages[1].content for row in made] == ["a1", "a4", "a5", "a6"] and left_out == ["malformed"] * 2
    with pytest.raises(InputError, match="2 of 6 rows are malformed, the first: .*a.jsonl:4: .*lone surrogate"):
        taken(tmp_path, max_malformed_fraction=0.1, **TREE)


def test_selection_of_conversations(tmp_path):
    def row(*turns, system=None, lang="python"):
        first = [{"role": "system", "content": system}] if system else []
        return {"messages": first + chat(*turns)["messages"], "lang": lang}

    rows = [row("a", "b", "c", "d", "e", "f"), row("a", "As an AI Language Model, no."), row("a" * 50, "b")]
    rows += [row("x", "y", lang="c"), row("g", "h", system="be short"), row("I asked ChatGPT", "b")]
    json_lines(tmp_path / "a.jsonl", rows)
    chosen = {
        "filters": [{"column": "lang", "one_of": ["python"]}],
        "max_pairs": 2,
        "drop_system": True,
        "max_chars": 40,
    }
    chosen |= {"drop_phrases": ["as an AI language model", "chatgpt"]}
    left_out = []
    made = list(messages.conversations(chats(tmp_path, select=chosen), 0.5, leave_out=left_out.append))
    taken = [[m.content for m in row.messages] for row in made]
    assert taken == [["a", "b", "c", "d"], ["g", "h"], ["I asked ChatGPT", "b"]]
    assert left_out == ["phrase", "long", "filters"]


def test_one_odd_row_does_not_end_a_set(tmp_path):
    """Every hub set has some: the first of them used to end the stage, whatever its size."""
    rows = [chat("a", f"b{number}") for number in range(98)] + [chat("a"), {"messages": None}]
    json_lines(tmp_path / "a.jsonl", rows)
    left_out = []
    made = list(messages.conversations(chats(tmp_path, max_malformed_fraction=0.02), 0.5, leave_out=left_out.append))
    assert len(made) == 98 and left_out == ["malformed", "malformed"]
    with pytest.raises(InputError, match=r"2 of 100 rows are malformed, the first: .*a.jsonl:99: roles are"):
        taken(tmp_path, max_malformed_fraction=0.019)


def test_columns_fit_the_shape():
    for shape, columns in (("messages", ["a", "b"]), ("prompt", ["a"]), ("tree", ["a", "b", "c", "d"])):
        with pytest.raises(ParamsError, match=rf"columns: shape {shape} needs \d columns"):
            chats("x", shape=shape, columns=columns)


def test_hub_conversations_need_a_commit():
    with pytest.raises(ParamsError, match="revision: .*does not pin"):
        chats("x", **{"files": None, "hub_id": "owner/name", "revision": "main"})


def test_battery_question_in_training_is_a_failed_gate():
    ask, answer = Message("user", "What is 2 + 2?"), Message("assistant", "4")
    name, hello = Message("user", "I am Ada."), Message("assistant", "Hello Ada!")
    scoring = {"kind": "exact", "answer": "4", "accepted": ("4",), "rejected": ("5", "6")}
    items = [Item("sums", (ask,), **scoring), Item("memory", (name, hello, ask), **scoring)]

    def row(*content):
        return {"mine": [Conversation(content, "mine", "CC0-1.0", "train", "k")]}

    assert check_held_out(row(name, hello, Message("user", "What is 2 + 3?"), answer), items) == 2
    for leaking in ((ask, answer), (Message("system", "s"), ask, answer), (name, hello, ask, answer)):
        with pytest.raises(GateError, match=r"battery held out.*\(sums|memory\).*'mine': 'What is 2 \+ 2"):
            check_held_out(row(*leaking), items)
    with pytest.raises(GateError, match="memory"):
        check_held_out(row(name, hello, ask, answer), items[1:])
    assert check_held_out(row(name, Message("assistant", "Hi."), ask, answer), items[1:]) == 2

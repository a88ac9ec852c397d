"""Pairs of answers: the shapes that data sets have, strict reading, and what is dropped for which reason."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from athanor.base import strict
from athanor.base.errors import InputError, ParamsError
from athanor.preferences.pairs import Pair, choose, encode, read_pairs
from athanor.preferences.params import DpoDataParams, PairsSource
from athanor.runtime.schema import check_values
from athanor.text.conversations import Item, Message
from athanor.text.documents import split_of
from athanor.tokenizer.chat import prompt_ids, render
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.words.decontaminate import ItemIndex
from tests.evaluation.tiny import write_tiny_tokenizer
from tests.runtime.test_presets import raw
from tests.runtime.view import ROOT

SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}
EARLIER = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
GOOD, BAD = {"role": "assistant", "content": "7"}, {"role": "assistant", "content": "8"}
LONG = [SYSTEM, *EARLIER, ASK]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tiny") / "tokenizer")


def source(**values: Any) -> PairsSource:
    return strict.build(PairsSource, {"type": "pairs", "name": "own", "files": "pairs.jsonl", **values}, "source")


def read(*rows_: dict[str, Any] | str, **values: Any) -> tuple[list[Pair], Counter[str]]:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows_]
    Path("pairs.jsonl").write_text("".join(line + "\n" for line in lines))
    left_out: Counter[str] = Counter()
    return list(read_pairs(source(**values), 0.3, lambda reason: left_out.update([reason]))), left_out


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": ASK["content"], "chosen": "7", "rejected": "8"}, [ASK]),
        ({"prompt": LONG, "chosen": "7", "rejected": "8"}, LONG),
        ({"prompt": LONG, "chosen": [GOOD], "rejected": [BAD]}, LONG),  # TRL, conversational
        ({"prompt": ASK["content"], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK]),  # UltraFeedback binarized
        ({"prompt": ASK["content"], "chosen": [*LONG, GOOD], "rejected": [*LONG, BAD]}, LONG),
        ({"prompt": LONG, "chosen": [*LONG, GOOD], "rejected": [BAD]}, LONG),
        ({"prompt": ASK["content"], "chosen": [*LONG, GOOD], "rejected": "8"}, LONG),
        ({"chosen": [*LONG, GOOD], "rejected": [*LONG, BAD]}, LONG),  # implicit prompt
        ({"question": [ASK], "better": "7", "worse": "8"}, [ASK]),
    ],
)
def test_every_shape_is_the_same_pair(row, prompt):
    names = {"question": "prompt", "better": "chosen", "worse": "rejected"}
    columns = {names[name]: name for name in row if name in names} | (
        {} if "prompt" in row or "question" in row else {"prompt": None}
    )
    (pair,), left_out = read(row, license="MIT", **columns)
    assert not left_out and pair.prompt == tuple(Message(**message) for message in prompt)
    assert (pair.chosen, pair.rejected, pair.source, pair.license) == ("7", "8", "own", "MIT")
    assert pair.split == split_of(pair.key, 0.3)
    (direct,), _ = read({"prompt": prompt, "chosen": "7", "rejected": "no"})
    assert direct.key == pair.key  # of the prompt alone


def test_parquet_is_read_like_json_lines_and_only_so_many():
    table = [
        {"prompt": f"Say {n}.", "chosen": [ASK | {"content": f"Say {n}."}, GOOD], "rejected": [BAD]} for n in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(table), "pairs.parquet")
    pairs = list(read_pairs(source(files="*.parquet", max_rows=3), 0.3))
    assert [pair.prompt[0].content for pair in pairs] == ["Say 0.", "Say 1.", "Say 2."]
    assert {(pair.chosen, pair.rejected) for pair in pairs} == {("7", "8")}


BROKEN = [
    ({"prompt": "a", "chosen": 7, "rejected": "8"}, "'chosen' is not a list of messages but int"),
    ({"prompt": "a", "chosen": [ASK], "rejected": "8"}, "the last message of column 'chosen' is not the assistant's"),
    ({"prompt": "a", "chosen": [], "rejected": "8"}, "the last message of column 'chosen'"),
    ({"prompt": "b", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "do not begin with the same messages"),
    ({"prompt": LONG, "chosen": [ASK, GOOD], "rejected": "8"}, "do not begin with the same messages"),
    ({"prompt": ASK["content"], "chosen": [ASK, GOOD], "rejected": [*LONG, BAD]}, "do not begin with the same"),
    ({"prompt": [ASK, GOOD], "chosen": "7", "rejected": "8"}, "roles are"),
    ({"prompt": [{"role": "human", "content": "a"}], "chosen": "7", "rejected": "8"}, "has the role 'human'"),
    ({"prompt": [{"role": "user", "content": 1}], "chosen": "7", "rejected": "8"}, "int, not text"),
    ({"prompt": "\ud800", "chosen": "7", "rejected": "8"}, "lone surrogate"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "told"), BROKEN)
def test_a_malformed_row_is_an_error_with_its_place_or_counted_where_some_are_tolerated(row, told):
    good = {"prompt": "a", "chosen": "7", "rejected": "8"}
    with pytest.raises(InputError, match="pairs.jsonl:2") as error:
        read(good, row)
    assert told in str(error.value) and "1 of 2 rows are malformed" in str(error.value)
    pairs, left_out = read(good, row, max_malformed_fraction=0.5)
    assert len(pairs) == 1 and left_out == {"malformed": 1}


def test_answers_without_any_prompt_are_malformed():
    with pytest.raises(InputError, match="hold answers alone.*name the column of the prompt"):
        read({"chosen": "7", "rejected": "8"}, prompt=None)


def test_no_json_and_a_missing_column_end_the_reading():
    with pytest.raises(InputError, match="none of 1 rows can be read.*pairs.jsonl:1.*not valid JSON"):
        read("{", max_malformed_fraction=1.0)
    with pytest.raises(InputError, match="column 'rejected' is missing.*found: chosen, prompt"):
        read({"prompt": "a", "chosen": "b"}, max_malformed_fraction=1.0)
    with pytest.raises(InputError, match="no file matches"):
        list(read_pairs(source(files="none/*.jsonl"), 0.3))


def test_empty_and_equal_answers_are_left_out_and_counted():
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    changes = (
        {"rejected": "b "},
        {"chosen": ""},
        {"rejected": [{"role": "assistant", "content": " "}]},
        {"prompt": None},
    )
    pairs, left_out = read(good, *({**good, **change} for change in changes))
    assert len(pairs) == 1 and left_out == {"equal_answers": 1, "empty": 3}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"hub_id": "a/b"}, "source.files: set exactly one of"),
        ({"files": None}, "source.files: set exactly one of"),
        ({"files": None, "hub_id": "a/b", "revision": "main"}, "source.revision: 'main' does not pin"),
        ({"columns": ["a"]}, "source.columns: unknown key"),
    ],
)
def test_a_source_is_checked_before_anything_is_read(values, told):
    with pytest.raises(ParamsError) as error:
        source(**values)
    assert told in str(error.value)


def test_a_hub_data_set_has_to_be_pinned_and_names_once():
    with pytest.raises(ParamsError, match="a/b is not pinned.*athanor pin"):
        list(read_pairs(source(files=None, hub_id="a/b"), 0.3))
    with pytest.raises(ParamsError, match="two sources are named 'own'"):
        DpoDataParams(seed=1, val_fraction=0.1, sources=(source(), source()))


def test_no_licence_with_a_key_in_it_is_published():
    data = dict(raw(ROOT / "params.yaml"))
    pairs = {
        "type": "pairs",
        "name": "own",
        "files": "a",
        "license": "https://x.org/?token=hf_abcdefghijklmnopqrstuvwxyz012345",
    }
    data["dpo_data"] = {**data["dpo_data"], "sources": [pairs]}
    with pytest.raises(ParamsError, match=r"dpo_data\.sources\[0\]\.license: holds a signature"):
        check_values(data)


# -- those to train on --------------------------------------------------------------------------------------------------


QUESTION = "How many green apples did the old farmer sell at the market on the third Sunday in May?"
ITEM = Item("facts", (Message("user", QUESTION),), "exact", "twelve", ("twelve",), ("one", "two"))


def pair(question: str, chosen: str, rejected: str, name: str = "own") -> Pair:
    return Pair((Message("user", question),), chosen, rejected, name, "MIT", question, "train")


def test_every_reason_to_drop_a_pair_is_found_and_counted_once(tokenizer):
    kept = [pair("a?", "yes", "no"), pair("a?", "yes", "maybe"), pair("b?", "yes", "no")]
    planted = [
        pair("a?", "yes", "no", "web"),  # a copy, in another source
        pair("c?", "yes", "no"), pair("c?", "no", "yes", "web"), pair("c?", "yes", "no"),  # both ways round
        pair("d?", "long " * 120, "short"),
        pair("e?", "word " * 40, "word " * 41),  # each answer fits, both do not
        pair(QUESTION, "twelve", "one"), pair("f?", "yes", QUESTION.lower()),
    ]  # fmt: skip
    dropped: dict[str, Counter[str]] = {"own": Counter(), "web": Counter()}
    items: Counter[str] = Counter()
    capacity = encode(tokenizer, planted[5]).tokens - 1
    assert len(render(tokenizer, planted[5].conversations[0])[0]) < capacity
    assert all(encode(tokenizer, each).tokens <= capacity for each in (*kept, *planted[6:]))
    chosen = choose(tokenizer, [*kept, *planted], capacity, ItemIndex([ITEM]), 10, dropped, items)
    assert [encoded.pair for encoded in chosen] == kept
    assert dropped["own"] == {"contradictions": 2, "too_long": 2, "contaminated": 2}
    assert dropped["web"] == {"copies": 1, "contradictions": 1} and items == {ITEM.id: 2}


def test_a_phrase_of_a_prompt_counts_once_for_each_pair(tokenizer):
    """An n-gram of more than so many texts is a template: a prompt that stood there twice would soon be one."""
    pairs = [pair(f"{QUESTION} And number {n}?", "yes", "no") for n in range(3)]
    dropped = {"own": Counter()}
    item = Item("facts", (Message("user", f"{QUESTION} Tell me, please."),), "exact", "a", ("a",), ("b", "c"))
    assert not choose(tokenizer, pairs, 10_000, ItemIndex([item]), 3, dropped, Counter())
    assert len(choose(tokenizer, pairs, 10_000, ItemIndex([item]), 2, dropped, Counter())) == 3


def test_supervised_is_the_last_answer_with_its_stop_alone(tokenizer):
    turns = tuple(Message(**message) for message in LONG)
    encoded = encode(tokenizer, Pair(turns, "7", "8 is it", "own", "MIT", "k", "train"))
    prompt = prompt_ids(tokenizer, turns)
    for (ids, mask), answer in zip(encoded.entries, ("7", "8 is it"), strict=True):
        assert ids.tolist() == [*prompt, *tokenizer.encode(answer), tokenizer.stop]
        assert mask.tolist() == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    assert encoded.tokens == sum(len(ids) for ids, _ in encoded.entries)

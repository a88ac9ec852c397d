"""SFT rows: what is dropped and why, and each gate with its defect planted."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from athanor.artifacts import write_manifest
from athanor.corpus.conversations import Conversation, Item, Message
from athanor.corpus.decontaminate import ItemIndex
from athanor.data.rows import KIND, VERSION, PackedRows, write_split
from athanor.errors import GateError
from athanor.tokenizer import sft_rows
from athanor.tokenizer.chat import render


def talk(*texts: str, split: str = "train", source: str = "s", key: str = "") -> Conversation:
    roles = ("user", "assistant") * (len(texts) // 2)
    messages = tuple(Message(role, text) for role, text in zip(roles, texts, strict=True))
    return Conversation(messages, source, "CC0-1.0", split, key or texts[0])


@pytest.fixture
def losses() -> dict[str, Counter[str]]:
    return defaultdict(Counter)


def write(folder: Path, tokenizer, pairs, rows, context_tokens: int = 63) -> PackedRows:
    write_split(folder, "train", pairs, rows, tokenizer.vocab_size)
    write_manifest(
        folder, kind=KIND, version=VERSION, counts={}, dtype="uint16", pad_id=0, context_tokens=context_tokens
    )
    return PackedRows(folder)


def test_duplicates_go_and_validation_wins(losses):
    rows = [talk("a", "1"), talk("a", "1"), talk("a", "1"), talk("b", "2"), talk("b", "2", split="val"), talk("c", "3")]
    kept = sft_rows.deduplicate(rows, {"s": 1}, losses)
    assert [(row.messages[0].content, row.split) for row in kept] == [("a", "train"), ("b", "val"), ("c", "train")]
    assert losses["s"]["duplicates"] == 3
    assert len(sft_rows.deduplicate(rows, {"s": 2}, losses)) == 4


def test_long_conversations_end_after_an_assistant_turn(tokenizer, losses):
    long = talk("one", "two", "three " * 30, "four")
    made = sft_rows.encode(tokenizer, [long, talk("x " * 200, "y")], 32, losses)
    assert [len(row.conversation.messages) for row in made] == [2]
    ids, mask = render(tokenizer, long.messages[:2])
    assert made[0].ids.tolist() == ids and made[0].mask.tolist() == mask
    assert losses["s"] == {"truncated": 1, "too_long": 1}


def test_cap_counts_supervised_training_tokens(tokenizer, losses):
    talks = [talk(f"q{i}", "answer", split="val" if i < 3 else "train") for i in range(40)]
    rows = sft_rows.encode(tokenizer, talks, 64, losses)
    each = rows[0].supervised
    kept = sft_rows.cap_supervised(rows, {"s": 10 * each}, 1, losses)
    assert Counter(row.conversation.split for row in kept) == {"val": 3, "train": 10}
    assert losses["s"]["over_cap"] == 27
    assert kept != sft_rows.cap_supervised(rows, {"s": 10 * each}, 2, losses)
    assert sft_rows.cap_supervised(rows, {"s": None}, 1, losses) == rows


ITEM = Item(
    "facts",
    (Message("user", "Which of the seven wooden boats on the northern lake was painted bright yellow last summer?"),),
    "exact",
    "The third one",
    ("The third one",),
    ("no", "none"),
)


def test_conversations_that_hold_an_item_are_dropped_and_counted(tokenizer, losses):
    index = ItemIndex.from_items([ITEM])
    rows = sft_rows.encode(tokenizer, [talk("hello", "hi"), talk(ITEM.prompt[0].content, "The third one")], 128, losses)
    kept = sft_rows.decontaminate(rows, index, 10, losses)
    assert [row.conversation.messages[0].content for row in kept] == ["hello"]
    assert losses["s"]["contaminated"] == 1
    sft_rows.check_clean([row.conversation.messages for row in kept], index, 10)
    with pytest.raises(GateError, match="1 conversations hold a battery item"):
        sft_rows.check_clean([row.conversation.messages for row in rows], index, 10)


def test_messages_are_read_back_from_ids(tokenizer):
    messages = talk("a\n\n<|stop|>b", " c\u2581", "d", "e").messages
    assert sft_rows.messages_of(tokenizer, render(tokenizer, messages)[0]) == messages
    for ids in ([5, 6], render(tokenizer, messages)[0][:-1], [tokenizer.bos, 100, 101]):
        with pytest.raises(GateError, match="template"):
            sft_rows.messages_of(tokenizer, ids)


def test_sound_rows_pass_and_come_back_as_messages(tokenizer, tmp_path):
    talks = [talk("one", "two", "three", "four"), talk("five", "six")]
    packed = write(tmp_path, tokenizer, [render(tokenizer, t.messages) for t in talks], [[0, 1], [1]])
    assert sft_rows.check_packed(tokenizer, packed, "train") == [t.messages for t in talks]
    assert packed.lengths().tolist() == [len(render(tokenizer, t.messages)[0]) for t in talks]
    assert packed.supervised().tolist() == [sum(render(tokenizer, t.messages)[1]) for t in talks]


def _no_stop(tokenizer, ids, mask):
    return ids, [0 if i == tokenizer.stop else m for i, m in zip(ids, mask, strict=True)]


def _shifted(tokenizer, ids, mask):
    moved = [*mask[1:], 0]
    moved[-1] = mask[-1]
    return ids, moved


def _user_too(tokenizer, ids, mask):
    return ids, [0, 0, 1, *mask[3:]]


def _joint_encoding(tokenizer, ids, mask):
    # A space before the content, as a template would add that encodes "role: text" in one go.
    at = ids.index(tokenizer.user) + 1
    spelled = [i for c in "one" for i in tokenizer.encode(c)]
    return [*ids[:at], *spelled, *ids[ids.index(tokenizer.stop) :]], [0] * (at + 3) + mask[ids.index(tokenizer.stop) :]


@pytest.mark.parametrize(
    ("defect", "gate"), [(_no_stop, "stops"), (_shifted, "mask"), (_user_too, "mask"), (_joint_encoding, "prompt-ids")]
)
def test_rows_that_teach_something_else_are_refused(tokenizer, tmp_path, defect, gate):
    ids, mask = render(tokenizer, talk("one", "two three").messages)
    packed = write(tmp_path, tokenizer, [defect(tokenizer, ids, mask)], [[0]])
    with pytest.raises(GateError, match=f"gate '{gate}'"):
        sft_rows.check_packed(tokenizer, packed, "train")


def test_rows_too_long_or_with_nothing_to_learn(tokenizer, tmp_path):
    pair = render(tokenizer, talk("one", "two").messages)
    packed = write(tmp_path, tokenizer, [pair], [[0, 0, 0]], context_tokens=2 * len(pair[0]))
    with pytest.raises(GateError, match="row 0 is longer"):
        sft_rows.check_packed(tokenizer, packed, "train")
    packed = write(tmp_path, tokenizer, [pair], [[0], []])
    with pytest.raises(GateError, match="row 1 has no supervised token"):
        sft_rows.check_packed(tokenizer, packed, "train")


def test_share_and_padding_limits(tokenizer, tmp_path):
    assert sft_rows.check_shares({"a": 60, "b": 40}, 0.6) == {"a": 0.6, "b": 0.4}
    with pytest.raises(GateError, match="'a' makes up 0.610.*lower sft_data.sources.a"):
        sft_rows.check_shares({"a": 61, "b": 39}, 0.6)
    pair = render(tokenizer, talk("one", "two").messages)
    size = len(pair[0])
    packed = write(tmp_path, tokenizer, [pair], [[0]] * 201, context_tokens=2 * size - 1)
    with pytest.raises(GateError, match="0.500 of the rows is padding"):
        sft_rows.check_padding(packed, 0.05, "train")
    few = write(tmp_path, tokenizer, [pair], [[0]] * 200, context_tokens=2 * size - 1)
    assert sft_rows.check_padding(few, 0.05, "train") == 0.5


def test_a_key_on_both_sides_is_refused():
    sft_rows.check_split_keys([talk("a", "1", key="m"), talk("b", "2", key="n", split="val")])
    with pytest.raises(GateError, match="1 keys are in train and val, as 'm'"):
        sft_rows.check_split_keys([talk("a", "1", key="m"), talk("b", "2", key="m", split="val")])


def test_encoded_arrays_have_fixed_types(tokenizer, losses):
    row = sft_rows.encode(tokenizer, [talk("a", "b")], 64, losses)[0]
    assert row.ids.dtype == np.uint32 and row.mask.dtype == np.uint8

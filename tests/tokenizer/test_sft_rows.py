"""SFT rows: what is dropped and why, and each gate with its defect planted."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from athanor.base.artifacts import write_manifest
from athanor.base.errors import GateError
from athanor.base.strict import build
from athanor.chat_data import gates as sft_gates
from athanor.chat_data import replay
from athanor.chat_data import rows as sft_rows
from athanor.chat_data.params import SftDataParams
from athanor.data.rows import KIND, VERSION, PackedRows, write_split
from athanor.text.conversations import Conversation
from athanor.text.documents import Document, write_shards
from athanor.tokenizer.chat import render
from athanor.words.decontaminate import ItemIndex
from tests.stages.conftest import ITEM, PARAMS, conversation


def talk(*texts: str, split: str = "train", source: str = "s", key: str = "") -> Conversation:
    made = conversation(source, *texts)
    return dataclasses.replace(made, split=split, key=key or made.key)


@pytest.fixture
def dropped() -> dict[str, Counter[str]]:
    return defaultdict(Counter)


def write(folder: Path, tokenizer, pairs, rows, context_tokens: int = 63, replay: str = "") -> PackedRows:
    """The packed rows of a train split; `replay` names the source of all pieces behind the first."""
    sources = [0, *[1] * (len(pairs) - 1)] if replay else None
    write_split(folder, "train", pairs, rows, tokenizer.vocab_size, sources)
    facts = {"sources": ["s"], "replay_sources": [replay]} if replay else {}
    facts |= {"dtype": "uint16", "pad_id": 0, "stop_id": tokenizer.stop, "context_tokens": context_tokens}
    write_manifest(folder, kind=KIND, version=VERSION, counts={}, **facts)
    return PackedRows(folder)


def test_duplicates_go_and_validation_wins(dropped):
    rows = [talk("a", "1"), talk("a", "1"), talk("a", "1"), talk("b", "2"), talk("b", "2", split="val"), talk("c", "3")]
    kept = sft_rows.deduplicate(rows, {"s": 1}, dropped)
    assert [(row.messages[0].content, row.split) for row in kept] == [("a", "train"), ("b", "val"), ("c", "train")]
    assert dropped["s"]["duplicates"] == 3
    assert len(sft_rows.deduplicate(rows, {"s": 2}, dropped)) == 4


def choose(tokenizer, dropped, conversations, priority):
    """The training conversations that sources with default rules leave, as (source, first question, last answer)."""
    source = {"max_copies": 9, "repeats": 1, "max_supervised_tokens": None}
    params = PARAMS["sft_data"] | {
        "context_tokens": 512,
        "max_source_share": 1.0,
        "max_pad_share": 1.0,
        "max_hedge_rate": 1.0,
        "source_priority": list(priority),
        "sources": {name: source for name in sorted({row.source for row in conversations})},
    }
    dropped |= {name: Counter() for name in params["sources"]}
    made = build(SftDataParams, params, "sft_data")
    rows = sft_rows.choose(tokenizer, conversations, made, ItemIndex([]), dropped, Counter())
    left = [row.conversation for row in rows]
    return [(row.source, row.messages[0].content, row.messages[-1].content) for row in left]


def test_a_shared_greeting_is_no_copy(tokenizer, dropped):
    """One conversation that began "Hi" used to take every one that begins so out of another source."""
    hello = ("Hi", "Hello! How can I help you today?")
    talks = [talk(*hello, f"What about {n}?", f"It is {n}.", source="everyday") for n in range(20)]
    better = [talk(*hello, source="best"), talk(*hello, "What about 7?", "It is 7.", source="best")]
    kept = choose(tokenizer, dropped, [*better, *talks], ["best"])
    assert Counter(source for source, *_ in kept) == {"best": 2, "everyday": 19}
    assert ("everyday", "Hi", "It is 7.") not in kept and dropped["everyday"] == {"in_better_source": 1}
    # A long first question and answer says it alone, whatever follows; and where a turn ends is part of the text.
    long = "This is a question and an answer of more than a hundred and fifty characters. " * 2
    ends = [talk("q", long, "And then?", f"{source} ends so.", source=source) for source in ("best", "everyday")]
    apart = [talk("a b", "c.", source="best"), talk("a", "b c.", source="everyday")]
    kept = choose(tokenizer, dropped, [*ends, *apart], ["best"])
    assert [source for source, *_ in kept] == ["best", "best", "everyday"]


def test_an_exact_copy_stays_in_the_better_source(tokenizer, dropped):
    """Exact copies were taken out across sources, in the order of the files' names, before the priority was asked."""
    copies = [talk("What is it?", "It is this.", source=source) for source in ("a", "a", "b", "b", "c")]
    assert [source for source, *_ in choose(tokenizer, dropped, copies, ["b"])] == ["b", "b"]
    assert {name: lost["in_better_source"] for name, lost in dropped.items()} == {"a": 2, "b": 0, "c": 1}
    # Whichever side of the line the copies are on.
    sides = [talk("What?", "This.", source=name, split=split) for name, split in (("a", "val"), ("b", "train"))]
    assert [source for source, *_ in choose(tokenizer, defaultdict(Counter), sides, ["b"])] == ["b"]


def test_long_conversations_end_after_an_assistant_turn(tokenizer, dropped):
    long = talk("one", "two", "three " * 30, "four")
    made = sft_rows.encode(tokenizer, [long, talk("x " * 200, "y")], 32, dropped)
    assert [len(row.conversation.messages) for row in made] == [2]
    ids, mask = render(tokenizer, long.messages[:2])
    assert made[0].ids.tolist() == ids and made[0].mask.tolist() == mask
    assert dropped["s"] == {"truncated": 1, "too_long": 1}


def test_cap_counts_supervised_training_tokens(tokenizer, dropped):
    talks = [talk(f"q{i}", "answer", split="val" if i < 3 else "train") for i in range(40)]
    rows = sft_rows.encode(tokenizer, talks, 64, dropped)
    each = rows[0].supervised
    kept = sft_rows.cap_supervised(rows, {"s": 10 * each}, 1, dropped)
    assert Counter(row.conversation.split for row in kept) == {"val": 3, "train": 10}
    assert dropped["s"]["over_cap"] == 27
    assert kept != sft_rows.cap_supervised(rows, {"s": 10 * each}, 2, dropped)
    assert sft_rows.cap_supervised(rows, {"s": None}, 1, dropped) == rows


def test_conversations_that_hold_an_item_are_dropped_and_counted(tokenizer, dropped):
    index = ItemIndex([ITEM])
    rows = sft_rows.encode(tokenizer, [talk("hello", "hi"), talk(ITEM.prompt[0].content, "twelve")], 128, dropped)
    contaminated = Counter()
    kept = sft_rows.decontaminate(rows, index, 10, dropped, contaminated)
    assert contaminated == {ITEM.id: 1} and len(sft_rows.decontaminate(rows, index, 10, dropped, Counter())) == 1
    dropped["s"]["contaminated"] -= 1
    assert [row.conversation.messages[0].content for row in kept] == ["hello"]
    assert dropped["s"]["contaminated"] == 1
    sft_gates.check_clean([row.conversation.messages for row in kept], index, 10)
    with pytest.raises(GateError, match="1 conversations hold a battery item"):
        sft_gates.check_clean([row.conversation.messages for row in rows], index, 10)


def test_messages_are_read_back_from_ids(tokenizer):
    messages = talk("a\n\n<|stop|>b", " c\u2581", "d", "e").messages
    assert sft_gates.messages_of(tokenizer, render(tokenizer, messages)[0]) == messages
    for ids in ([5, 6], render(tokenizer, messages)[0][:-1], [tokenizer.bos, 100, 101]):
        with pytest.raises(GateError, match="template"):
            sft_gates.messages_of(tokenizer, ids)


def test_sound_rows_pass_and_come_back_as_messages(tokenizer, tmp_path):
    talks = [talk("one", "two", "three", "four"), talk("five", "six")]
    packed = write(tmp_path, tokenizer, [render(tokenizer, t.messages) for t in talks], [[0, 1], [1]])
    assert sft_gates.check_packed(tokenizer, packed, "train") == {n: t.messages for n, t in enumerate(talks)}
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
        sft_gates.check_packed(tokenizer, packed, "train")


def test_rows_too_long_or_with_nothing_to_learn(tokenizer, tmp_path):
    pair = render(tokenizer, talk("one", "two").messages)
    packed = write(tmp_path, tokenizer, [pair], [[0, 0, 0]], context_tokens=2 * len(pair[0]))
    with pytest.raises(GateError, match="row 0 is longer"):
        sft_gates.check_packed(tokenizer, packed, "train")
    packed = write(tmp_path, tokenizer, [pair], [[0], []])
    with pytest.raises(GateError, match="row 1 has no supervised token"):
        sft_gates.check_packed(tokenizer, packed, "train")


def test_share_and_padding_limits(tokenizer, tmp_path):
    assert sft_gates.check_shares({"a": 60, "b": 40}, 0.6) == {"a": 0.6, "b": 0.4}
    with pytest.raises(GateError, match="'a' makes up 0.610.*lower sft_data.sources.a"):
        sft_gates.check_shares({"a": 61, "b": 39}, 0.6)
    pair = render(tokenizer, talk("one", "two").messages)
    size = len(pair[0])
    packed = write(tmp_path, tokenizer, [pair], [[0]] * 201, context_tokens=2 * size - 1)
    with pytest.raises(GateError, match="0.500 of the rows is padding"):
        sft_gates.check_padding(packed, 0.05, "train")
    few = write(tmp_path, tokenizer, [pair], [[0]] * 200, context_tokens=2 * size - 1)
    assert sft_gates.check_padding(few, 0.05, "train") == 0.5


def test_a_key_on_both_sides_is_refused():
    sft_gates.check_split_keys([talk("a", "1", key="m"), talk("b", "2", key="n", split="val")])
    with pytest.raises(GateError, match="1 keys are in train and val, as 'm'"):
        sft_gates.check_split_keys([talk("a", "1", key="m"), talk("b", "2", key="m", split="val")])


def test_encoded_arrays_have_fixed_types(tokenizer, dropped):
    row = sft_rows.encode(tokenizer, [talk("a", "b")], 64, dropped)[0]
    assert row.ids.dtype == np.uint32 and row.mask.dtype == np.uint8


TEXT_DEFECTS = {
    "control inside": (lambda t, ids: [*ids[:3], t.stop, *ids[3:]], None, "replay-text"),
    "two beginnings": (lambda t, ids: [t.bos, *ids], None, "replay-text"),
    "first supervised": (lambda t, ids: ids, lambda mask: [1, *mask[1:]], "replay-mask"),
    "one left out": (lambda t, ids: ids, lambda mask: [*mask[:-1], 0], "replay-mask"),
}


@pytest.mark.parametrize("name", [None, *TEXT_DEFECTS])
def test_pieces_of_text_have_gates_of_their_own(tokenizer, tmp_path, name):
    change, masked, gate = TEXT_DEFECTS.get(name, (lambda t, ids: ids, None, None))
    pieces = replay.pieces_of(tokenizer, np.array(tokenizer.encode("some text of a document, long enough")), 16)
    ids = change(tokenizer, next(pieces).tolist())
    mask = replay.mask_of(np.array(ids)).tolist()
    pair = (ids, masked(mask) if masked else mask)
    packed = write(tmp_path, tokenizer, [render(tokenizer, talk("a", "b").messages), pair], [[0, 1]], replay="text")
    assert packed.is_text(1) and not packed.is_text(0) and packed.source(1) == "text"
    if gate is None:
        assert list(sft_gates.check_packed(tokenizer, packed, "train")) == [0]
    else:
        with pytest.raises(GateError, match=f"gate '{gate}'"):
            sft_gates.check_packed(tokenizer, packed, "train")


def test_another_share_of_text_than_asked_and_an_item_in_it_are_refused(tokenizer, tmp_path):
    index = ItemIndex([ITEM])
    ids = np.array([tokenizer.bos, *tokenizer.encode(f"{ITEM.prompt[0].content} twelve"), tokenizer.eos])
    pair = render(tokenizer, talk("a", "b").messages)
    packed = write(tmp_path, tokenizer, [pair, (ids, replay.mask_of(ids))], [[0, 1]], 255, replay="text")
    share = (len(ids) - 1) / (len(ids) - 1 + sum(pair[1]))
    with pytest.raises(GateError, match="replay-share"):
        sft_gates.check_replay(tokenizer, packed, share / 2, index, 10, "train")
    with pytest.raises(GateError, match="contamination.*1 pieces of text hold a battery item"):
        sft_gates.check_replay(tokenizer, packed, share, index, 10, "train")
    assert sft_gates.check_replay(tokenizer, packed, share, ItemIndex([]), 10, "train") == {"text": len(ids) - 1}


def test_replay_of_boilerplate_shared_with_an_item_passes_its_own_gate(tokenizer, tmp_path):
    """Common among the 64 documents of a batch, the item's words were rare among the few pieces used, and the gate
    called that a bug."""
    words = " ".join(ITEM.prompt[0].content.split()[1:15])  # not the whole prompt, which is found however common
    texts = [words if n % 3 == 0 else "Nothing is shared in this text" for n in range(64)]
    documents = [Document(f"{text} {n}.", "web", "prose", "CC0-1.0", "train") for n, text in enumerate(texts)]
    write_shards(tmp_path / "shards", documents, 1 << 20)
    files, index = {"web": sorted((tmp_path / "shards").iterdir())}, ItemIndex([ITEM])
    left_out = 0
    for seed in range(5):
        made = replay.choose(tokenizer, files, {"web": 300}, 64, seed, index, 10)
        pieces = made.pieces["web"]
        assert sum(len(piece) - 1 for piece in pieces) == 300
        left_out += made.contaminated
        pair = render(tokenizer, talk("a", "b").messages)
        entries = [pair, *((piece, replay.mask_of(piece)) for piece in pieces)]
        packed = write(tmp_path, tokenizer, entries, [[n] for n in range(len(entries))], replay="web")
        share = 300 / (300 + sum(pair[1]))
        assert sft_gates.check_replay(tokenizer, packed, share, index, 10, "train") == {"web": 300}
    assert left_out > 5
    made = replay.choose(tokenizer, files, {"web": 10**6}, 64, 0, index, 10)
    assert made.short == {"web": 10**6} and 0 < made.targets < 10**6
    assert made.share(0.5, 100) == made.targets / (100 + made.targets)


def test_shares_of_text_are_whole_tokens_that_sum_up():
    for total in (0, 1, 2, 7, 1000):
        parts = replay.quotas({"a": 0.2, "b": 0.3, "c": 0.5, "d": 0}, total)
        assert sum(parts.values()) == total and set(parts) == {"a", "b", "c"}
        assert all(abs(parts[name] - share * total) <= 1 for name, share in (("a", 0.2), ("b", 0.3), ("c", 0.5)))

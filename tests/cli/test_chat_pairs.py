"""From corrections and thumbs of the chat page to pairs of answers; read by the pipeline's own reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.base import strict
from athanor.preferences.pairs import read_pairs
from athanor.preferences.params import PairsSource
from tests.cli.test_chat_data import STATS, athanor, corrected, store  # noqa: F401  fixtures


def asked(store, question: str, *answers: tuple[str, str | None], parent=None, system: str = "") -> list[int]:
    """A chat, or a later turn, with judged answers to one question; returns their ids."""
    chat, above = parent or (store.create(system=system)["id"], None)
    first = store.answer(chat, (above, question), answers[0][0], model="small-1", stats=STATS)
    rest = [store.answer(chat, first[0]["id"], text, model="small-2", stats=STATS)[1] for text, _ in answers[1:]]
    ids = [made["id"] for made in (first[1], *rest)]
    for number, (_, verdict) in zip(ids, answers, strict=True):
        store.feedback(number, verdict)
    return ids


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().split("\n") if line]


def test_corrections_and_thumbs_become_pairs_that_the_real_source_reads(store, athanor):
    up, down, _ = asked(store, "Capital of Italy?", ("Rome.", "up"), ("Paris.", "down"), ("Oslo.", None))
    plain = corrected(store, "What is 3 + 4?", "8", "7", system="Be brief.")
    waits = corrected(store, "What is 1 + 1?", "3", "2")
    chat, question = store.correction(plain)["chat"], store.chat(store.correction(plain)["chat"])["messages"][0]["id"]
    right = store.answer(chat, question, "Seven.\n\u2028", model="small-1", stats=STATS)[1]["id"]
    store.feedback(right, "up")
    deeper = asked(store, "And 4 + 4?", ("9", "down"), ("eight", "up"), ("8", "up"), parent=(chat, right))
    athanor("accept", plain)
    status, told = athanor("pairs", "corpus/pairs.jsonl")
    assert status == 0 and "corpus/pairs.jsonl: 5 rows\n" in told and "DVC watches" not in told

    ask = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
    further = [
        *ask,
        {"role": "assistant", "content": "Seven.\n\u2028"},
        {"role": "user", "content": "And 4 + 4?"},
    ]
    italy = [{"role": "user", "content": "Capital of Italy?"}]
    assert rows("corpus/pairs.jsonl") == [
        {"prompt": italy, "chosen": "Rome.", "rejected": "Paris.", "pair": f"{up}-{down}"},
        {"prompt": ask, "chosen": "7", "rejected": "8", "pair": f"{plain}"},
        {"prompt": ask, "chosen": "Seven.\n\u2028", "rejected": "8", "pair": f"{right}-{plain}"},
        {"prompt": further, "chosen": "eight", "rejected": "9", "pair": f"{deeper[1]}-{deeper[0]}"},
        {"prompt": further, "chosen": "8", "rejected": "9", "pair": f"{deeper[2]}-{deeper[0]}"},
    ]
    assert store.correction(waits)["status"] == "candidate"

    # What it says to put into params.yaml is what the schema takes, and the source reads the rows.
    (values,) = YAML(typ="safe").load(told.partition("under dpo_data.sources:\n")[2])
    source, left_out = strict.build(PairsSource, values, "dpo_data.sources[0]"), []
    read = list(read_pairs(source, 0.1, left_out.append))
    assert not left_out and [(pair.chosen, pair.rejected) for pair in read] == [
        (row["chosen"], row["rejected"]) for row in rows("corpus/pairs.jsonl")
    ]


def test_the_same_store_gives_the_same_bytes_each_pair_once_and_other_files_are_not_lost(store, athanor):
    for number in range(4):
        asked(store, f"Say {number % 2}.", ("no", "down"), ("yes", "up"))
    one = corrected(store, "Say 3.", "no", "three")
    athanor("accept", "--all")
    status, told = athanor("pairs", "corpus/a.jsonl")
    assert "3 rows, 2 pairs say the same as another" in told
    athanor("pairs", "corpus/b.jsonl")
    assert Path("corpus/a.jsonl").read_bytes() == Path("corpus/b.jsonl").read_bytes()
    assert athanor("pairs", "corpus/a.jsonl")[0] == 0  # its own it replaces
    athanor("export", "corpus/rows.jsonl")
    mine = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    Path("corpus/mine.jsonl").write_text(mine)
    for name in ("corpus/rows.jsonl", "corpus/mine.jsonl"):
        before = Path(name).read_bytes()
        status, told = athanor("pairs", name)
        assert status == 1 and "would be lost" in told and Path(name).read_bytes() == before
    assert athanor("export", "corpus/a.jsonl")[0] == 1 and rows("corpus/a.jsonl")[-1]["pair"] == str(one)
    status, told = athanor("pairs", "corpus/rows.txt")
    assert status == 1 and "end in .jsonl" in told
    assert "DVC watches corpus/" in athanor("pairs", "pairs.jsonl")[1]


@pytest.mark.parametrize(
    ("first", "answers", "why"),
    [
        ("Go away!", (("no", "down"), ("yes", "up")), "has a thumb down"),
        ("", (("no", "down"), ("yes", "up")), "a message is empty"),
        (None, (("", "down"), ("yes", "up")), "a message is empty"),
        (None, (("no", "down"), (" ", "up")), "a message is empty"),
        (None, (("no", "down"), ("no ", "up")), "both answers say the same"),
    ],
)
def test_what_cannot_be_a_pair_is_left_out_and_told(store, athanor, first, answers, why):
    parent = None
    if first is not None:
        (before,) = asked(store, "Hello?", (first, "down" if first else None))
        parent = (store.chats()[0]["id"], before)
    worse, better = asked(store, "Well?", *answers, parent=parent)
    status, told = athanor("pairs", "corpus/pairs.jsonl")
    assert status == 1 and "every pair was left out, nothing was written" in told and not Path("corpus").exists()
    assert f"pair {better}-{worse}" in told and why in told
    asked(store, "Yes?", ("no", "down"), ("yes", "up"))
    status, told = athanor("pairs", "corpus/pairs.jsonl")
    assert status == 0 and "1 rows" in told and f"left out: pair {better}-{worse}: " in told


def test_without_two_judged_answers_the_next_step_is_told(store, athanor, tmp_path):
    corrected(store, "Say one.", "no", "one")  # waits
    asked(store, "Say two.", ("no", "down"), ("two", None))
    asked(store, "Say two.", ("two", "up"))
    status, told = athanor("pairs", "corpus/pairs.jsonl")
    assert status == 1 and "no correction is accepted, and no question has" in told and not Path("corpus").exists()
    assert "athanor chat accept" in told and "judge two answers" in told
    status, told = athanor("pairs", "corpus/pairs.jsonl", "--store", tmp_path / "none.sqlite3")
    assert status == 1 and "there are no chats yet" in told

"""From corrections and thumbs of the chat page to pairs of answers; read by the pipeline's own reader."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.base import strict
from athanor.tuning.pair_params import PairsSource
from athanor.tuning.pairs import read_pairs
from tests.cli.test_chat_data import athanor, corrected, feedback  # noqa: F401  fixtures
from tests.serving.judging import again, asked, judge


def judged(feedback, question: str, *answers: tuple[str, str], **how) -> list[int]:
    """A chat, or a later turn, with judged answers to one question; returns their numbers."""
    first = asked(question, "", **how)
    return [judge(feedback, again(first, text), verdict) for text, verdict in answers]


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().split("\n") if line]


def test_corrections_and_thumbs_become_pairs_that_the_real_source_reads(feedback, athanor):
    up, down, _ = judged(feedback, "Capital of Italy?", ("Rome.", "up"), ("Paris.", "down"), ("Oslo.", None))
    first = asked("What is 3 + 4?", "8", system="Be brief.")
    plain = judge(feedback, first, "down", "7")
    waits = corrected(feedback, "What is 1 + 1?", "3", "2")
    seven = again(first, "Seven.\n\u2028")
    right = judge(feedback, seven, "up")
    deeper = judged(feedback, "And 4 + 4?", ("9", "down"), ("eight", "up"), ("8", "up"), after=seven)
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
        {"prompt": further, "chosen": "8", "rejected": "9", "pair": f"{deeper[2]}-{deeper[0]}"},
        {"prompt": further, "chosen": "eight", "rejected": "9", "pair": f"{deeper[1]}-{deeper[0]}"},
        {"prompt": ask, "chosen": "7", "rejected": "8", "pair": f"{plain}"},
        {"prompt": ask, "chosen": "Seven.\n\u2028", "rejected": "8", "pair": f"{right}-{plain}"},
        {"prompt": italy, "chosen": "Rome.", "rejected": "Paris.", "pair": f"{up}-{down}"},
    ]
    assert feedback.correction(waits)["status"] == "candidate"

    # What it says to put into params.yaml is what the schema takes, and the source reads the rows.
    (values,) = YAML(typ="safe").load(told.partition("under dpo_data.sources:\n")[2])
    source, left_out = strict.build(PairsSource, values, "dpo_data.sources[0]"), Counter()
    read = list(read_pairs(source, left_out))
    assert not left_out and [(pair.chosen.content, pair.rejected.content) for pair in read] == [
        (row["chosen"], row["rejected"]) for row in rows("corpus/pairs.jsonl")
    ]


def test_the_same_store_gives_the_same_bytes_each_pair_once_and_other_files_are_not_lost(feedback, athanor):
    for number in range(4):
        judged(feedback, f"Say {number % 2}.", ("no", "down"), ("yes", "up"))
    one = corrected(feedback, "Say 3.", "no", "three")
    athanor("accept", "--all")
    status, told = athanor("pairs", "corpus/a.jsonl")
    assert "3 rows, 2 pairs more that repeat another" in told
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
def test_what_cannot_be_a_pair_is_left_out_and_told(feedback, athanor, first, answers, why):
    before = None if first is None else asked("Hello?", first)
    if first:
        judge(feedback, before, "down")
    worse, better = judged(feedback, "Well?", *answers, after=before)
    status, told = athanor("pairs", "corpus/pairs.jsonl")
    assert status == 1 and "every pair was left out, nothing was written" in told and not Path("corpus").exists()
    assert f"pair {better}-{worse}" in told and why in told
    judged(feedback, "Yes?", ("no", "down"), ("yes", "up"))
    status, told = athanor("pairs", "corpus/pairs.jsonl")
    assert status == 0 and "1 row\n" in told and f"left out: pair {better}-{worse}: " in told


def test_without_two_judged_answers_the_next_step_is_told(feedback, athanor, tmp_path):
    corrected(feedback, "Say one.", "no", "one")  # waits
    judged(feedback, "Say two.", ("no", "down"), ("two", None))
    judged(feedback, "Say two.", ("two", "up"))
    status, told = athanor("pairs", "corpus/pairs.jsonl")
    assert status == 1 and "no correction is accepted, and no question has" in told and not Path("corpus").exists()
    assert "athanor chat accept" in told and "judge two answers" in told
    status, told = athanor("pairs", "corpus/pairs.jsonl", "--feedback", tmp_path / "none.jsonl")
    assert status == 1 and "there is no feedback yet" in told
